"""Scanning a range of a partition while it may be trimmed."""

from collections.abc import AsyncIterator

from shardyard.log.port import READ_BYTES, READ_RECORDS, Data
from shardyard.model import Fence, OffsetTrimmed, Partition
from shardyard.model.batch import Batch


async def scan(
    log: Data,
    partition: Partition,
    start: int,
    end: int,
    *,
    epoch: int | None = None,
    max_records: int = READ_RECORDS,
    max_bytes: int = READ_BYTES,
    fence: Fence | None = None,
) -> AsyncIterator[Batch]:
    """The records with offsets from `start` up to, but without, `end`, batch after batch, within the limits of a read.

    Records that are trimmed meanwhile are skipped. The scan stops early if the partition ends before `end`, as it does
    when its topic was recreated; `UnknownTopic` or `PartitionOutOfRange` if it no longer exists.
    """
    while start < end:
        try:
            batch = await log.read(
                partition, start, epoch=epoch, max_records=max_records, max_bytes=max_bytes, fence=fence
            )
        except OffsetTrimmed as error:
            start = error.first
            continue
        if batch.end <= start:
            return
        start = batch.end
        if len(batch := batch.before(end)):
            yield batch
