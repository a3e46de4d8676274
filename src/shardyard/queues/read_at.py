"""Reading single records by their offsets, and finding the newest ones."""

from collections import deque
from collections.abc import Collection, Iterator

import numpy as np
import pyarrow as pa
from msgspec import structs

from shardyard.log import Log
from shardyard.log.port import READ_RECORDS
from shardyard.log.scan import scan
from shardyard.model import Fence, OffsetBeyondEnd, Partition, Record
from shardyard.model.batch import Batch

NEAR_OFFSETS = 100
"""Records whose offsets differ by no more than this are read together."""


async def read_at(log: Log, partition: Partition, offsets: Collection[int], fence: Fence) -> dict[int, Record]:
    """The records at these offsets; those that were trimmed are missing. `Fenced` if the ownership is over, and
    `OffsetBeyondEnd` if the partition ends before one of the offsets."""
    span = await log.span(partition)
    if max(offsets) >= span.end:
        raise OffsetBeyondEnd(partition, max(offsets), span.end)
    found: dict[int, Record] = {}
    for start, end in _ranges(offsets):
        most = min(end - start, READ_RECORDS)
        async for batch in scan(log, partition, start, end, max_records=most, fence=fence):
            found |= _pick(batch, offsets)
    return found


async def newest_offset(log: Log, partition: Partition, count: int) -> int:
    """The offset from which on the newest `count` records are read; the first offset if there are no more than that."""
    span = await log.span(partition)
    width = count
    while (start := span.end - width) > span.first:
        newest: deque[int] = deque(maxlen=count)
        async for batch in scan(log, partition, start, span.end):
            newest.extend(batch.offsets())
        if len(newest) == count:
            return newest[0]
        width *= 2  # the offsets have gaps
    return span.first


def _ranges(offsets: Collection[int]) -> Iterator[tuple[int, int]]:
    """The ranges of offsets to read, from the first up to, but without, the second: offsets that are near each other
    are in one range."""
    first, *others = sorted(offsets)
    last = first
    for offset in others:
        if offset - last > NEAR_OFFSETS:
            yield first, last + 1
            first = offset
        last = offset
    yield first, last + 1


def _pick(batch: Batch, offsets: Collection[int]) -> dict[int, Record]:
    """The records of a batch at these offsets; only these become Python objects."""
    found = np.asarray(batch.offsets(), np.int64)
    rows = np.flatnonzero(np.isin(found, list(offsets)))
    records = structs.replace(batch, content=batch.data.take(pa.array(rows)), places=None, stop=None).records()
    return dict(zip(found[rows].tolist(), records, strict=True))
