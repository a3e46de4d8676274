"""Reading single records by their offsets."""

from collections.abc import Collection, Iterator
from dataclasses import replace

import numpy as np
import pyarrow as pa

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
    records = replace(batch, data=batch.data.take(pa.array(rows)), places=None, stop=None).records()
    return dict(zip(found[rows].tolist(), records, strict=True))
