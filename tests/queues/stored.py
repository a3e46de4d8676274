"""What is stored in a log, for tests that run on any engine: offsets may have gaps."""

from collections.abc import AsyncIterator

from shardyard.log import Log
from shardyard.log.scan import scan
from shardyard.model import Partition, Record


async def numbered(log: Log, partition: Partition) -> AsyncIterator[tuple[int, Record]]:
    """The records of a partition with their offsets. Records that are trimmed meanwhile are left out."""
    span = await log.span(partition)
    async for batch in scan(log, partition, span.first, span.end):
        for pair in zip(batch.offsets(), batch.records(), strict=True):
            yield pair


async def contents(log: Log, partition: Partition) -> list[Record]:
    """The records of a partition."""
    return [record async for _, record in numbered(log, partition)]


async def offsets(log: Log, partition: Partition) -> list[int]:
    """The offsets of the records of a partition."""
    return [offset async for offset, _ in numbered(log, partition)]
