"""What goes by itself: partitions that were contracted away, when every group is done with them, and the own groups of
members of broadcast groups who never came back."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from shardyard.groups.broadcast import is_departed
from shardyard.log import Log
from shardyard.model import ShardyardError, Topic, UnknownTopic
from shardyard.queues.draining import closing
from shardyard.queues.topic_readers import Known, known
from shardyard.registry import Registry, Snapshot, Transaction, lease
from shardyard.runtime.clock import Clock, SystemClock

_log = logging.getLogger(__name__)

LEASE = "retiring"
EVERY_SECONDS = 2.0
LOOK_SECONDS = 60.0
"""Between looks for members who never came back."""
KEPT_SECONDS = 7 * 24 * 3600.0
"""How long a member of a broadcast group who is gone can come back and go on where it was. Partitions that were
contracted away do not wait for it."""


class Janitor:
    """Drops closing partitions once they are drained, and forgets members who never came back, on one broker at a
    time."""

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
        look_at = self._clock.monotonic()
        while True:
            await _tried(self.check_once)
            if self._clock.monotonic() >= look_at:
                await _tried(self.forget_once)
                look_at = self._clock.monotonic() + LOOK_SECONDS
            await self._clock.sleep(self._every)

    async def check_once(self) -> list[Topic]:
        """Drop what is drained; returns the topics it was dropped from."""
        topics = [t for t in await self._log.topics() if t.open_partitions is not None and not t.sealed]
        if not topics or not await asyncio.to_thread(self._leads):
            return []
        dropped = [await self._dropped(topic) for topic in topics]
        return [topic for topic in dropped if topic is not None]

    async def forget_once(self) -> list[str]:
        """Forget the own groups of members of broadcast groups who are gone and did nothing for `KEPT_SECONDS`; returns
        their names."""
        return await asyncio.to_thread(self._forget)

    def _forget(self) -> list[str]:
        with self._registry.snapshot() as tx:
            if not _abandoned(tx):
                return []
        with self._registry.transaction() as tx:
            if not self._leads_in(tx):
                return []
            names = _abandoned(tx)  # some may have come back
            for name in names:
                tx.delete_group(name)
                tx.audit("broker", "group deleted", name, {"because": "its member did not come back"})
            return names

    def _leads(self) -> bool:
        with self._registry.transaction() as tx:
            return self._leads_in(tx)

    def _leads_in(self, tx: Transaction) -> bool:
        return lease.acquire(tx, LEASE, self._holder, 3 * self._every) is not None

    async def _dropped(self, topic: Topic) -> Topic | None:
        """The topic without its closing partitions; None if one of them is not drained, or they went already."""
        try:
            found = await closing(self._log, await asyncio.to_thread(self._known), topic)
            if not found or not all(partition.drained for partition in found):
                return None
            after = await self._log.drop_partitions(topic.name, topic.receiving)
        except UnknownTopic:
            return None
        detail = {
            "partitions": [partition.partition for partition in found],
            "records": sum(partition.records for partition in found),
        }
        _log.info("topic %s: partitions from %d on are drained, and gone", topic.name, topic.receiving)
        await asyncio.to_thread(self._note, topic.name, detail)
        return after

    def _known(self) -> Known:
        with self._registry.snapshot() as tx:
            return known(tx)

    def _note(self, topic: str, detail: object) -> None:
        with self._registry.transaction() as tx:
            tx.audit("broker", "partitions dropped", topic, detail)


async def _tried(work: Callable[[], Awaitable[object]]) -> None:
    try:
        await work()
    except ShardyardError as error:
        _log.warning("retiring put off: %s", error)


def _abandoned(tx: Snapshot) -> list[str]:
    """Own groups of members who are gone for good. One without positions goes at once: there is
    nothing to go on from."""
    return [
        group.name
        for group in tx.groups()
        if is_departed(tx, group.name)
        and max((row.progress_at for row in tx.ownerships(group.name)), default=0.0) + KEPT_SECONDS <= tx.now
    ]
