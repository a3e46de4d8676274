"""Tells the senders of messages that they were delivered, without a record for each message."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from shardyard.model import ShardyardError
from shardyard.runtime.clock import Clock

_log = logging.getLogger(__name__)

INTERVAL_SECONDS = 1.0
"""Between two marks for the same sender."""


class DeliveredMarks:
    """Collects what was delivered, and marks the newest message of each sender, at most once in `INTERVAL_SECONDS`."""

    def __init__(self, mark: Callable[[str, str], Awaitable[object]], clock: Clock) -> None:
        """`mark`: returns when the mark of a sender's message is durable."""
        self._mark = mark
        self._clock = clock
        self._newest: dict[str, str] = {}
        """The message to mark, by sender."""
        self._noted = asyncio.Event()

    def delivered(self, sender: str, id_: str) -> None:
        self._newest[sender] = id_
        self._noted.set()

    def seen(self, sender: str, id_: str) -> None:
        """Messages up to this one are marked as seen, which includes that they were delivered."""
        if int(self._newest.get(sender, id_)) <= int(id_):
            self._newest.pop(sender, None)

    async def run(self) -> None:
        while True:
            await self._noted.wait()
            await self.flush()
            await self._clock.sleep(INTERVAL_SECONDS)

    async def flush(self) -> None:
        """Mark everything that was collected."""
        self._noted.clear()
        while self._newest:
            sender = next(iter(self._newest))
            try:
                await self._mark(sender, self._newest.pop(sender))
            except ShardyardError as error:
                _log.info("messages of %r can't be marked as delivered: %s", sender, error)
