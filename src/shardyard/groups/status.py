"""A group as it is seen from outside: who owns what, how far the owners got, who hangs."""

import asyncio
from dataclasses import dataclass

from shardyard.log import Log
from shardyard.model import Partition, PartitionOutOfRange, UnknownGroup, UnknownTopic
from shardyard.registry import OwnershipRow, Registry, Snapshot


@dataclass(frozen=True, slots=True)
class PartitionStatus:
    """A partition as a group sees it: who owns it, how far the group got, how much is left."""

    partition: Partition
    owner: str | None
    target: str | None
    """Who is to own it next, if that is not the owner."""
    epoch: int
    committed: int | None
    """The offset to continue from; None if the group never committed."""
    end: int
    lag: int
    """Records that are there and not committed; at most that many, where the log cannot count them."""
    stuck_for: float
    """Seconds since the owner made progress or had nothing to do; a member that hangs shows here."""


async def status(log: Log, registry: Registry, group: str) -> list[PartitionStatus]:
    """All partitions of a group that exist, in order; of a topic that moved, only those that are still owned."""

    def read(tx: Snapshot) -> tuple[float, list[OwnershipRow]]:
        if tx.group(group) is None:
            raise UnknownGroup(group)
        return tx.now, tx.ownerships(group)

    now, rows = await asyncio.to_thread(registry.read, read)
    topics = {topic.name: topic for topic in await log.topics()}
    moved = {topic.name for topic in topics.values() if topic.successor in topics}
    result = []
    for row in rows:
        if row.owner is None and row.partition.topic in moved:
            continue
        try:
            span = await log.span(row.partition)
            current = row.committed is not None and row.committed.epoch == span.epoch
            committed = row.committed.offset if current and row.committed is not None else None
            lag = await log.count(row.partition, max(committed or 0, span.first), span.end)
        except (UnknownTopic, PartitionOutOfRange):  # deleted; its rows go with the next rebalance
            continue
        result.append(
            PartitionStatus(
                row.partition,
                row.owner,
                row.target if row.target != row.owner else None,
                row.epoch,
                committed,
                span.end,
                lag,
                max(now - row.progress_at, 0.0) if row.owner is not None else 0.0,
            )
        )
    return result
