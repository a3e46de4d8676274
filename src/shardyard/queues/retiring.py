"""Partitions that were contracted away: they go when every group is done with them."""

import asyncio
import logging
from typing import NamedTuple

from shardyard.groups import lease
from shardyard.log import Log
from shardyard.model import Clock, Partition, ShardyardError, SystemClock, Topic
from shardyard.queues.settings import is_departed
from shardyard.registry import Registry, Transaction

_log = logging.getLogger(__name__)

LEASE = "retiring"
EVERY_SECONDS = 2.0


class _Reader(NamedTuple):
    """How far a group got on a partition, and whether what it has not read is kept for it."""

    offset: int
    awaited: bool


class Retiring:
    """Drops closing partitions once they are drained, on one broker at a time."""

    def __init__(
        self, log: Log, registry: Registry, *, holder: str, every: float = EVERY_SECONDS, clock: Clock | None = None
    ) -> None:
        self._log = log
        self._registry = registry
        self._holder = holder
        self._every = every
        self._clock = clock or SystemClock()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                await self.check_once()
            except ShardyardError as error:
                _log.warning("retiring partitions put off: %s", error)
            await self._clock.sleep(self._every)

    async def check_once(self) -> list[Topic]:
        """Drop what is drained; returns the topics it was dropped from."""
        closing = [t for t in await self._log.topics() if t.open_partitions is not None and not t.sealed]
        if not closing or not await asyncio.to_thread(self._leads):
            return []
        return [await self._drop(topic) for topic in closing if await self._is_drained(topic)]

    def _leads(self) -> bool:
        with self._registry.transaction() as tx:
            return lease.acquire(tx, LEASE, self._holder, 3 * self._every) is not None

    async def _drop(self, topic: Topic) -> Topic:
        _log.info("topic %s: partitions from %d on are drained and go", topic.name, topic.receiving)
        return await self._log.drop_partitions(topic.name, topic.receiving)

    async def _is_drained(self, topic: Topic) -> bool:
        """Every group that ever had one of the closing partitions has committed all of it; unread ones stay.

        Members of a broadcast group who are gone are not waited for.
        """
        committed = await asyncio.to_thread(self._committed, topic)
        for index in range(topic.receiving, topic.partitions):
            partition = Partition(topic.name, index)
            span = await self._log.span(partition)
            readers = committed.get(partition, [])
            is_read = any(reader.offset >= span.end for reader in readers)
            is_awaited = any(reader.offset < span.end for reader in readers if reader.awaited)
            if span.first < span.end and (is_awaited or not is_read):
                return False
        return True

    def _committed(self, topic: Topic) -> dict[Partition, list[_Reader]]:
        """How far each group got on each partition of the topic."""
        with self._registry.snapshot() as tx:
            return _readers(tx, topic)


def _readers(tx: Transaction, topic: Topic) -> dict[Partition, list[_Reader]]:
    found: dict[Partition, list[_Reader]] = {}
    for group in tx.groups():
        awaited = not is_departed(tx, group.name)
        for row in tx.ownerships(group.name):
            if row.partition.topic == topic.name:
                here = row.committed is not None and row.committed.epoch == topic.epoch
                offset = row.committed.offset if here and row.committed is not None else 0
                found.setdefault(row.partition, []).append(_Reader(offset, awaited))
    return found
