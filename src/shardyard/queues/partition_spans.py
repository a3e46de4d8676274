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
