"""Partitions that are closing, because their topic was contracted, and what keeps them.

One goes when every group that reads the topic is done with it. A group that never committed there has not read it,
wherever else it is: it may be offline. One that no group ever read stays.
"""

from collections import Counter
from dataclasses import dataclass

from shardyard.groups.broadcast import parent_group
from shardyard.log import Log
from shardyard.model import Partition, PartitionOutOfRange, Span, Topic
from shardyard.queues.topic_readers import Known, leading_to


@dataclass(frozen=True, slots=True)
class ClosingPartition:
    """A partition that is closing."""

    partition: int
    records: int
    """That are stored on it, and go with it."""
    waiting_for: dict[str, int]
    """The groups that are not done with it, and how many records each of them has left."""
    drained: bool
    """It may go. If it may not and no group is waited for, none has read it."""


async def closing(log: Log, known: Known, topic: Topic) -> list[ClosingPartition]:
    """The closing partitions of a topic. Members of a broadcast group who are gone are not waited for."""
    readers = known.reading(topic.name, leading_to(topic.name, await log.topics()))
    found = await spans(log, topic)
    return [
        _closing(known, readers, partition, span)
        for partition, span in found.items()
        if partition.index >= topic.receiving
    ]


def _closing(known: Known, readers: list[str], partition: Partition, span: Span) -> ClosingPartition:
    left = {
        group: span.end - min(max(known.offset(group, partition, span.epoch), span.first), span.end)
        for group in readers
    }
    waiting: Counter[str] = Counter()
    for group, records in left.items():
        if records and group not in known.departed:
            waiting[parent_group(group)] += records
    is_read = span.first == span.end or 0 in left.values()
    return ClosingPartition(partition.index, span.end - span.first, dict(waiting), is_read and not waiting)


async def spans(log: Log, topic: Topic) -> dict[Partition, Span]:
    """Of its partitions, without those that went since it was looked up."""
    found: dict[Partition, Span] = {}
    for partition in topic:
        try:
            found[partition] = await log.span(partition)
        except PartitionOutOfRange:
            break
    return found
