"""How far the history has got, which decides what a new client gets from its connection instead."""

import asyncio
import contextlib
import logging
from collections.abc import Mapping

from shardyard.groups import Node
from shardyard.messaging.resume import HISTORY_GROUP
from shardyard.model import Partition, Position, ShardyardError
from shardyard.runtime.clock import timeout

_log = logging.getLogger(__name__)

TAKE_OVER_SECONDS = 1.0
"""How long partitions that are taken over wait for it. Without it, their clients get older messages once more."""

Ends = Mapping[Partition, Position]
"""The history has everything before these positions."""


class HistoryEnds:
    """Reads from the registry what the history has committed."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._next: asyncio.Task[Ends] | None = None
        """A read that has not begun."""
        self._tasks: set[asyncio.Task[Ends]] = set()

    async def read(self) -> Ends:
        rows = await self._node.transactions.read(lambda tx: tx.ownerships(HISTORY_GROUP))
        return {row.partition: row.committed for row in rows if row.committed is not None}

    def for_take_over(self) -> "asyncio.Task[Ends]":
        """A read that never fails: it returns nothing if the registry can't be read in time. All calls of one turn of
        the event loop share it."""
        if self._next is None:
            self._next = asyncio.create_task(self._read_in_time(), name="end of the history")
            self._tasks.add(self._next)
            self._next.add_done_callback(self._tasks.discard)
        return self._next

    async def _read_in_time(self) -> Ends:
        self._next = None
        try:
            async with timeout(self._node.clock, TAKE_OVER_SECONDS):
                return await self.read()
        except (ShardyardError, TimeoutError) as error:
            reason = str(error) or f"no answer in {TAKE_OVER_SECONDS:g} s"
            _log.warning("new clients may get older messages, because the registry can't be read: %s", reason)
            return {}

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
