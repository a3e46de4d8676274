"""What this server has just appended to `inbox`, for the mirror: to read it from the log again would take longer than
to copy it, and the messages of users would wait meanwhile."""

from collections import deque
from itertools import islice
from typing import TYPE_CHECKING

from shardyard.log import Log
from shardyard.log.port import READ_BYTES, READ_RECORDS
from shardyard.model import Appended, Fence, Partition, Record, Span, Stamp, Topic
from shardyard.model.plain_batch import PlainBatch, ReadBatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa

MOST_RECORDS = 2_000
MOST_BYTES = 1024 * 1024
"""Of the values, that are kept of each partition."""


class _Kept:
    """The newest records of a partition, without a gap between them."""

    __slots__ = ("bytes", "end", "epoch", "first", "records")

    def __init__(self, epoch: int, first: int) -> None:
        self.epoch = epoch
        self.first = self.end = first
        self.records: deque[Record] = deque()
        self.bytes = 0

    def add(self, record: Record) -> None:
        self.records.append(record)
        self.end += 1
        self.bytes += len(record.value)

    def drop_before(self, offset: int) -> None:
        while self.records and self.first < offset:
            self.bytes -= len(self.records.popleft().value)
            self.first += 1


class FreshRecords:
    """A log as an owner reads it. It has at hand what was added to it and not read yet, of the partitions that are read
    here, unless somebody else has appended since. A partition that is not read any more, or whose reader is far behind,
    is forgotten until it is read again. A read from memory does not check its fence: the appends and the commit that
    follow do."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._kept: dict[Partition, _Kept] = {}

    def add(self, appended: Appended, record: Record) -> None:
        """A record was appended, and is durable."""
        kept = self._kept.get(appended.partition)
        if kept is None:
            return
        place = appended.first
        if (kept.epoch, kept.end) != (place.epoch, place.offset):
            kept = self._kept[appended.partition] = _Kept(place.epoch, place.offset)
        kept.add(record)
        if len(kept.records) > MOST_RECORDS or kept.bytes > MOST_BYTES:
            del self._kept[appended.partition]

    async def read(
        self,
        partition: Partition,
        offset: int,
        *,
        epoch: int | None = None,
        max_records: int = READ_RECORDS,
        max_bytes: int = READ_BYTES,
        wait: float = 0.0,
        fence: Fence | None = None,
    ) -> ReadBatch:
        kept = self._kept.setdefault(partition, _Kept(-1, -1))
        kept.drop_before(offset)
        if kept.first <= offset < kept.end and epoch in (None, kept.epoch) and kept.bytes <= max_bytes:
            skipped = offset - kept.first
            rows = list(islice(kept.records, skipped, skipped + max_records))
            return PlainBatch(partition, kept.epoch, offset, offset + len(rows), rows)
        return await self._log.read(
            partition, offset, epoch=epoch, max_records=max_records, max_bytes=max_bytes, wait=wait, fence=fence
        )

    # Everything else is the log's

    async def topic(self, name: str) -> Topic:
        return await self._log.topic(name)

    async def span(self, partition: Partition) -> Span:
        return await self._log.span(partition)

    async def set_fence(self, fence: Fence) -> None:
        await self._log.set_fence(fence)

    async def append(
        self,
        partition: Partition,
        records: "Sequence[Record] | pa.RecordBatch",
        *,
        stamp: Stamp | None = None,
        fence: Fence | None = None,
    ) -> Appended:
        return await self._log.append(partition, records, stamp=stamp, fence=fence)
