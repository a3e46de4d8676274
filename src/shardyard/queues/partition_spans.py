"""How much is stored on partitions."""

from shardyard.log import Log
from shardyard.model import Partition, PartitionOutOfRange, Span, Topic


async def spans(log: Log, topic: Topic) -> dict[Partition, Span]:
    """The spans of a topic's partitions, without partitions that were dropped since the topic was looked up."""
    found: dict[Partition, Span] = {}
    for partition in topic:
        try:
            found[partition] = await log.span(partition)
        except PartitionOutOfRange:
            break
    return found


async def records_between(log: Log, partition: Partition, start: int, end: int) -> int:
    """At most how many records have offsets from `start` up to, but without, `end`."""
    del log, partition  # an upper bound that holds for every engine: offsets are unique
    return max(end - start, 0)
