"""Records that retention dropped before a group had read them: counted for each group, logged, and in a metric.

The owner of a partition notices when it reads on, and its broker counts what it missed. For partitions without an owner
the janitor looks. What is counted is stored with the group, so that each record is counted once.
"""

import logging
from collections.abc import Mapping

import msgspec

from shardyard.groups.broadcast import parent_group
from shardyard.log import Log
from shardyard.model import Partition, Position, Retention
from shardyard.queues.partition_spans import spans
from shardyard.queues.settings import group_scope
from shardyard.queues.topic_readers import topic_readers
from shardyard.registry import Snapshot, Transaction
from shardyard.registry.batcher import TransactionBatcher
from shardyard.runtime.metrics import DROPPED_UNREAD_RECORDS

_log = logging.getLogger(__name__)

NAME = "dropped-unread"
"""The name of the row of a group with what was counted, by partition."""


class _Counted(msgspec.Struct, frozen=True, array_like=True):
    """What was counted on a partition: in this epoch of it, up to this offset, in total."""

    epoch: int
    upto: int
    records: int


def dropped_unread(tx: Snapshot, group: str) -> dict[str, int]:
    """How many records of each partition, by its name, were dropped before the group had read them; at most that many,
    where offsets have gaps."""
    return {partition: counted.records for partition, counted in _stored(tx, group).items()}


async def count_dropped_unread(
    transactions: TransactionBatcher, group: str, dropped: Mapping[Partition, tuple[Position, int]]
) -> None:
    """Count the records from each of these positions, which the group had reached, up to the first offset that is still
    there. What was counted before is not counted again."""
    counted = await transactions.run(lambda tx: _count(tx, group, dropped))
    for partition, records in counted.items():
        position, first = dropped[partition]
        DROPPED_UNREAD_RECORDS.series(parent_group(group)).add(records)
        _log.warning(
            "group %s has missed %d records of %s, before offset %d: retention dropped them, and the group had read up "
            "to offset %d",
            group,
            records,
            partition,
            first,
            position.offset,
        )


async def count_without_owner(log: Log, transactions: TransactionBatcher) -> None:
    """Count for all groups what was dropped on partitions that no member owns. An owner may have read more than it has
    committed; what it missed is counted when it reads on."""
    topics = [topic for topic in await log.topics() if topic.retention != Retention()]
    if not topics:
        return
    ownerships = (await transactions.read(topic_readers)).ownerships
    for topic in topics:
        found = await spans(log, topic)
        dropped: dict[str, dict[Partition, tuple[Position, int]]] = {}
        for (group, partition), row in ownerships.items():
            span, committed = found.get(partition), row.committed
            if span is None or row.owner is not None or committed is None:
                continue
            if committed.epoch == span.epoch and committed.offset < span.first:
                dropped.setdefault(group, {})[partition] = (committed, span.first)
        for group, partitions in dropped.items():
            await count_dropped_unread(transactions, group, partitions)


def _count(tx: Transaction, group: str, dropped: Mapping[Partition, tuple[Position, int]]) -> dict[Partition, int]:
    """Returns how many records of each partition were not counted before, without those that have none."""
    stored = _stored(tx, group)
    new: dict[Partition, int] = {}
    for partition, (position, first) in dropped.items():
        before = stored.get(str(partition), _Counted(position.epoch, 0, 0))
        upto = before.upto if before.epoch == position.epoch else 0
        if (records := first - max(position.offset, upto)) > 0:
            new[partition] = records
            stored[str(partition)] = _Counted(position.epoch, first, before.records + records)
    if new and tx.group(group) is not None:
        tx.put_setting(group_scope(group), NAME, msgspec.to_builtins(stored))
    return new


def _stored(tx: Snapshot, group: str) -> dict[str, _Counted]:
    row = tx.setting(group_scope(group), NAME)
    return {} if row is None else msgspec.convert(row.value, dict[str, _Counted])
