"""Calls between messaging servers: for what is not stored, and so does not go through the log."""

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

import aiohttp
import msgspec

from shardyard.messaging.tokens import Tokens
from shardyard.wire import messaging as wire
from shardyard.wire.peers import PEER_PATH, ChannelTyping, PeerAnswer, PeerCall, TypingNotice

_log = logging.getLogger(__name__)

TIMEOUT_SECONDS = 2.0
FLUSH_SECONDS = 0.02
"""How long typing notices wait for others to the same server."""
MOST_WAITING = 1_000
"""Typing notices to one server; more are dropped."""


class Peers:
    """The other servers. Nothing here is stored or retried: what does not arrive is lost."""

    def __init__(self, name: str, tokens: Tokens) -> None:
        self._name = name
        self._tokens = tokens
        self._typing: dict[str, list[TypingNotice | ChannelTyping]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_SECONDS))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._http is not None:
            await self._http.close()

    def typing(self, address: str, sender: str, recipient: str) -> None:
        """Tell a server that a user is typing to one of its users."""
        self._notify(address, TypingNotice(sender, recipient))

    def channel_typing(self, address: str, notice: ChannelTyping) -> None:
        """Tell a server that a user is typing to a channel that some of its users are members of."""
        self._notify(address, notice)

    def _notify(self, address: str, notice: TypingNotice | ChannelTyping) -> None:
        waiting = self._typing.setdefault(address, [])
        if not waiting:
            task = asyncio.create_task(self._send_typing(address), name="typing notices")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        if len(waiting) < MOST_WAITING:
            waiting.append(notice)

    async def presence(self, address: str, users: Sequence[str]) -> list[wire.Presence]:
        """Ask a server for the presence of its users."""
        return (await self._call(address, PeerCall(presence=list(users)))).presence

    async def _send_typing(self, address: str) -> None:
        await asyncio.sleep(FLUSH_SECONDS)
        notices = self._typing.pop(address)
        with contextlib.suppress(ConnectionError):
            await self._call(
                address,
                PeerCall(
                    typing=[notice for notice in notices if isinstance(notice, TypingNotice)],
                    channel_typing=[notice for notice in notices if isinstance(notice, ChannelTyping)],
                ),
            )

    async def _call(self, address: str, call: PeerCall) -> PeerAnswer:
        """`ConnectionError` if the server does not answer."""
        if self._http is None:
            raise ConnectionError("not open")
        parts = urlsplit(address)
        url = f"{'https' if parts.scheme == 'wss' else 'http'}://{parts.netloc}{PEER_PATH}"
        headers = {"Authorization": f"Bearer {self._tokens.issue_for_peer(self._name)}"}
        try:
            async with self._http.post(url, data=msgspec.json.encode(call), headers=headers) as response:
                if response.status != 200:
                    raise ConnectionError(f"status {response.status}")
                return msgspec.json.decode(await response.read(), type=PeerAnswer)
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError) as error:
            _log.debug("%s does not answer: %s", address, error)
            raise ConnectionError(str(error)) from None
