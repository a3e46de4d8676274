"""Typing notices for channels: they go to the fan-out worker that serves the channel, and are never stored."""

import asyncio
import contextlib
import logging
from urllib.parse import urlsplit

import aiohttp
import msgspec

from shardyard.groups import Directory, Node
from shardyard.messaging.tokens import Tokens
from shardyard.model import Partition
from shardyard.wire.channels import FANOUT
from shardyard.wire.peers import TYPING_PATH, ChannelTyping

_log = logging.getLogger(__name__)

WORKERS = "fanout.workers"
"""The group of the fan-out workers, over the partitions of `fanout`."""
EVENT_READERS = "fanout.events"
"""The group of those who read `events`: in the mode `replicated` the workers, each of which knows all channels."""
TIMEOUT_SECONDS = 2.0
MOST_WAITING = 1_000
"""Notices that are being sent; more are dropped."""


class TypingNotices:
    """Nothing here is stored or retried: what does not arrive is lost."""

    def __init__(self, node: Node, tokens: Tokens) -> None:
        self._node = node
        self._tokens = tokens
        self._workers: Directory | None = None
        self._readers: Directory | None = None
        self._http: aiohttp.ClientSession | None = None
        self._stack = contextlib.AsyncExitStack()
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        if self._http is None:
            enter = self._stack.enter_async_context
            self._workers = await enter(Directory(self._node, WORKERS))
            self._readers = await enter(Directory(self._node, EVENT_READERS))
            self._http = await enter(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_SECONDS)))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._stack.aclose()

    def send(self, partition: int, channel: str, sender: str, device: str) -> None:
        """A client of the sender is typing in a channel of that partition of `fanout`."""
        address = self._address(partition)
        if address is not None and len(self._tasks) < MOST_WAITING:
            task = asyncio.create_task(self._post(address, ChannelTyping(channel, sender, device)), name="typing")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _address(self, partition: int) -> str | None:
        """The worker that knows the channels of the partition."""
        if self._workers is None or self._readers is None:
            return None
        owner = self._workers.owner_of(Partition(FANOUT, partition))
        if owner is not None and owner.address is not None:
            return owner.address
        workers = [each.address for each in self._readers.members().values() if each.address is not None]
        return workers[partition % len(workers)] if workers else None

    async def _post(self, address: str, notice: ChannelTyping) -> None:
        if self._http is None:
            return
        parts = urlsplit(address)
        url = f"{'https' if parts.scheme in ('https', 'wss') else 'http'}://{parts.netloc}{TYPING_PATH}"
        headers = {"Authorization": f"Bearer {self._tokens.issue_for_peer(self._node.name)}"}
        try:
            async with self._http.post(url, data=msgspec.json.encode(notice), headers=headers) as response:
                if response.status != 200:
                    _log.debug("%s answers a typing notice with status %d", address, response.status)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            _log.debug("%s does not answer: %s", address, error)
