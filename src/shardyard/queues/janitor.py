"""`Janitor`: removing what is no longer needed, on one broker at a time."""

import logging

from shardyard.groups.broadcast import is_departed
from shardyard.log import Log
from shardyard.model import Topic, UnknownTopic
from shardyard.queues.draining import draining_partitions
from shardyard.queues.dropped_unread import count_without_owner
from shardyard.queues.settings import delete_settings, group_scope
from shardyard.queues.topic_readers import topic_readers
from shardyard.registry import Snapshot, Transaction
from shardyard.registry.batcher import TransactionBatcher
from shardyard.registry.lease import RegistryLease
from shardyard.runtime.clock import Clock, SystemClock
from shardyard.runtime.leader import LeaderLoop

_log = logging.getLogger(__name__)

LEASE = "janitor"
LEASE_SECONDS = 30.0
EVERY_SECONDS = 2.0
DEPARTED_EVERY_SECONDS = 60.0
"""How often departed members are looked for."""
DROPPED_EVERY_SECONDS = 10.0
"""How often records are looked for that retention dropped before a group had read them."""
KEPT_SECONDS = 7 * 24 * 3600.0
"""How long a member that left a broadcast group can come back and continue where it was. Draining partitions do not
wait for it."""


class Janitor:
    """Drops draining partitions when every group has read them, deletes the own groups of members that left a broadcast
    group and did not come back, and counts what retention dropped before a group had read it."""

    def __init__(
        self,
        log: Log,
        transactions: TransactionBatcher,
        *,
        holder: str,
        every: float = EVERY_SECONDS,
        clock: Clock | None = None,
    ) -> None:
        """`holder`: the name of this broker, different from that of any other. `every`: seconds between two rounds."""
        self._log = log
        self._transactions = transactions
        self._clock = clock or SystemClock()
        self._departed_at = self._clock.monotonic()
        """When to look for departed members next."""
        self._dropped_at = self._clock.monotonic()
        """When to look for records next that were dropped before a group had read them."""
        self._leader = LeaderLoop(
            "cleaning up",
            RegistryLease(transactions, LEASE, holder, LEASE_SECONDS),
            self._clean_up,
            every=every,
            clock=self._clock,
        )

    async def run(self) -> None:
        """Until cancelled."""
        await self._leader.run()

    async def run_once(self) -> bool:
        """One round. Returns whether this broker holds the lease; if not, nothing was done."""
        return await self._leader.run_once()

    async def _clean_up(self, token: int) -> None:
        """Each step checks in its own transaction what it relies on, so a second leader would do no harm."""
        del token
        if self._clock.monotonic() >= self._departed_at:
            await self.delete_departed_members()
            self._departed_at = self._clock.monotonic() + DEPARTED_EVERY_SECONDS
        if self._clock.monotonic() >= self._dropped_at:
            await count_without_owner(self._log, self._transactions)
            self._dropped_at = self._clock.monotonic() + DROPPED_EVERY_SECONDS
        await self.drop_drained_partitions()

    async def drop_drained_partitions(self) -> list[Topic]:
        """Drop the draining partitions of each topic, if all of them are drained. Returns the topics that changed."""
        topics = [t for t in await self._log.topics() if t.open_partitions is not None and not t.sealed]
        dropped = [await self._drop_partitions(topic) for topic in topics]
        return [topic for topic in dropped if topic is not None]

    async def _drop_partitions(self, topic: Topic) -> Topic | None:
        """The topic without its draining partitions; None if one of them is not drained, or they were dropped
        already."""
        try:
            found = await draining_partitions(self._log, await self._transactions.read(topic_readers), topic)
            if not found or not all(partition.drained for partition in found):
                return None
            after = await self._log.drop_partitions(topic.name, topic.receiving)
        except UnknownTopic:
            return None
        detail = {
            "partitions": [partition.partition for partition in found],
            "records": sum(partition.records for partition in found),
        }
        _log.info("topic %s: partitions from %d on are drained and were dropped", topic.name, topic.receiving)
        await self._transactions.run(lambda tx: tx.audit("broker", "partitions dropped", topic.name, detail))
        return after

    async def delete_departed_members(self) -> list[str]:
        """Delete the own groups of members that left a broadcast group and have not been active for `KEPT_SECONDS`.
        Returns the names of these groups."""
        if not await self._transactions.read(_departed_groups):
            return []
        return await self._transactions.run(_delete_departed_groups)


def _delete_departed_groups(tx: Transaction) -> list[str]:
    names = _departed_groups(tx)
    for name in names:
        tx.delete_group(name)
        delete_settings(tx, group_scope(name))
        tx.audit("broker", "group deleted", name, {"because": "its member did not come back"})
    return names


def _departed_groups(tx: Snapshot) -> list[str]:
    """The own groups of members that will not come back. One without positions is among them at once: there is nothing
    to continue from."""
    return [
        group.name
        for group in tx.groups()
        if is_departed(tx, group.name)
        and max((row.progress_at for row in tx.ownerships(group.name)), default=0.0) + KEPT_SECONDS <= tx.now
    ]
