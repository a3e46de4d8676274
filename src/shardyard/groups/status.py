"""A group as one sees it from outside: who owns what, how far they got, who hangs."""

import asyncio
from dataclasses import dataclass

from shardyard.log import Log
from shardyard.model import Partition, PartitionOutOfRange, UnknownGroup, UnknownTopic
from shardyard.registry import OwnershipRow, Registry


@dataclass(frozen=True, slots=True)
class PartitionStatus:
    """A partition as a group sees it: who owns it, how far the group got, how much is left."""

    partition: Partition
    owner: str | None
    target: str | None
    """Who is to own it next, where that is not the owner."""
    epoch: int
    committed: int | None
    """The offset to go on from; None if the group never committed."""
    end: int
    lag: int
    """Records that are there and not committed."""
    stuck_for: float
    """Seconds since the owner got ahead or had nothing to do; a member that hangs shows here."""


async def status(log: Log, registry: Registry, group: str) -> list[PartitionStatus]:
    """All partitions of a group that are there, in order; of a topic that moved, only those that somebody owns yet."""

    def rows() -> tuple[float, list[OwnershipRow]]:
        with registry.snapshot() as tx:
            if tx.group(group) is None:
                raise UnknownGroup(group)
            return tx.now, tx.ownerships(group)

    now, found = await asyncio.to_thread(rows)
    topics = {topic.name: topic for topic in await log.topics()}
    moved = {topic.name for topic in topics.values() if topic.successor in topics}
    result = []
    for row in found:
        if row.owner is None and row.partition.topic in moved:
            continue
        try:
            span = await log.span(row.partition)
        except (UnknownTopic, PartitionOutOfRange):  # gone; its rows go with the next rebalance
            continue
        current = row.committed is not None and row.committed.epoch == span.epoch
        committed = row.committed.offset if current and row.committed is not None else None
        result.append(
            PartitionStatus(
                row.partition,
                row.owner,
                row.target if row.target != row.owner else None,
                row.epoch,
                committed,
                span.end,
                span.end - max(committed or 0, span.first),
                max(now - row.progress_at, 0.0) if row.owner is not None else 0.0,
            )
        )
    return result
