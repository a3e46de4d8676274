"""Draining partitions: their topic was contracted, so they take no more records and are dropped once they are read.

A partition is drained when every group that reads the topic has read it to its end. A group that never committed on the
partition has not read it, wherever else it has committed: it may be offline. A partition that no group ever read stays.
"""

import contextlib
from collections import Counter
from dataclasses import dataclass

from shardyard.groups.broadcast import parent_group
from shardyard.log import Log
from shardyard.model import Partition, PartitionOutOfRange, Span, Topic
from shardyard.queues.partition_spans import spans
from shardyard.queues.topic_readers import TopicReaders, with_predecessors


@dataclass(frozen=True, slots=True)
class DrainingPartition:
    """A partition that takes no more records, and what it waits for."""

    partition: int
    records: int
    """Records stored on it, which are dropped with it."""
    waiting_for: dict[str, int]
    """The groups that have not read it to its end, and how many records each has left."""
    drained: bool
    """It may be dropped. If it may not although no group is waited for, no group has ever read it."""


async def draining_partitions(log: Log, readers: TopicReaders, topic: Topic) -> list[DrainingPartition]:
    """The draining partitions of a topic. Members that have left a broadcast group are not waited for."""
    groups = readers.reading_groups(topic.name, with_predecessors(topic.name, await log.topics()))
    draining = []
    for partition, span in (await spans(log, topic)).items():
        if partition.index >= topic.receiving:
            with contextlib.suppress(PartitionOutOfRange):  # it was dropped meanwhile
                draining.append(await _draining_partition(log, readers, groups, partition, span))
    return draining


async def _draining_partition(
    log: Log, readers: TopicReaders, groups: list[str], partition: Partition, span: Span
) -> DrainingPartition:
    waiting_for: Counter[str] = Counter()
    is_read = span.first == span.end
    for group in groups:
        start = max(readers.committed_offset(group, partition, span.epoch), span.first)
        unread = await log.count(partition, start, span.end)
        is_read = is_read or not unread
        if unread and group not in readers.departed:
            waiting_for[parent_group(group)] += unread
    stored = await log.count(partition, span.first, span.end)
    return DrainingPartition(partition.index, stored, dict(waiting_for), is_read and not waiting_for)
