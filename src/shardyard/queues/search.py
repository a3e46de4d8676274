"""Finding records of a topic by id, key, trace, tag or time."""

from dataclasses import dataclass
from functools import reduce

import numpy as np
import pyarrow as pa

from shardyard.log import Log
from shardyard.log.port import READ_RECORDS
from shardyard.log.scan import scan
from shardyard.model import TRACE, InvalidValue, Partition, PartitionOutOfRange, Record, TooLarge, whole_number
from shardyard.model.batch import Batch, to_records
from shardyard.model.checks import check_int64, check_text
from shardyard.queues.filtering import only_tagged

MAX_RESULTS = 1_000
"""Records that one search may return."""


@dataclass(frozen=True, slots=True)
class Found:
    """A record and where it is stored."""

    partition: Partition
    offset: int
    record: Record


@dataclass(frozen=True, slots=True)
class _Query:
    """What a record must match. None matches any."""

    id: str | None
    key: bytes | None
    trace: str | None
    tag: str | None
    since: int | None
    until: int | None

    def __post_init__(self) -> None:
        if (self.id, self.key, self.trace, self.tag, self.since, self.until) == (None,) * 6:
            raise InvalidValue("search", None, "at least one of id, key, trace, tag, since and until")
        for name in ("id", "trace", "tag"):
            if getattr(self, name) is not None:
                check_text(name, getattr(self, name))
        if not isinstance(self.key, bytes | None):
            raise InvalidValue("key", self.key, "bytes")
        for name in ("since", "until"):
            if getattr(self, name) is not None:
                check_int64(name, getattr(self, name), at_least=0)
        if self.since is not None and self.until is not None and self.since >= self.until:
            raise InvalidValue("until", self.until, f"a time after {self.since}, which is `since`")

    def matching_rows(self, batch: Batch) -> pa.Table:
        """The rows of a batch that match, with their offsets."""
        if self.tag is not None:
            batch = only_tagged(batch, [self.tag])
        rows = batch.data.append_column("offset", pa.array(np.asarray(batch.offsets(), np.int64)))
        mask = self._mask(batch.data)
        return rows if mask is None else rows.filter(mask)

    def _mask(self, data: pa.Table) -> pa.ChunkedArray | None:
        """True for the rows that match all conditions, null or false for the others. None if there is no condition."""
        import pyarrow.compute as pc  # noqa: PLC0415 it takes 9 MB, and few brokers need it

        masks = []
        if self.id is not None:
            masks.append(pc.equal(data["id"], self.id))
        if self.key is not None:
            masks.append(pc.equal(data["key"], self.key))
        if self.trace is not None:
            traces = pc.map_lookup(data["headers"], pa.scalar(TRACE), "last")
            masks.append(pc.equal(traces, self.trace.encode()))
        if self.since is not None:
            masks.append(pc.greater_equal(data["timestamp"], self.since))
        if self.until is not None:
            masks.append(pc.less(data["timestamp"], self.until))
        return reduce(pc.and_, masks) if masks else None


async def search(
    log: Log,
    topic: str,
    *,
    id: str | None = None,  # noqa: A002 a record's own word
    key: bytes | None = None,
    trace: str | None = None,
    tag: str | None = None,
    since: int | None = None,
    until: int | None = None,
    partition: int | None = None,
    limit: int = 100,
) -> list[Found]:
    """The records that match all of the conditions, newest last. If more than `limit` match, the newest of them.

    `since` and `until` are in ms since 1970; `since` is inclusive, `until` is not. All partitions are searched unless
    one is named, also for a key: when a topic is expanded, its earlier records stay where they are. A record with
    several tags matches each of them; of several traces, the last one counts.
    Records that are appended or trimmed during the search are not found.
    """
    query = _Query(id, key, trace, tag, since, until)
    limit = whole_number("limit", limit, at_least=1)
    if limit > MAX_RESULTS:
        raise TooLarge("limit of a search", limit, MAX_RESULTS)
    found: list[Found] = []
    for each in await _partitions(log, topic, partition):
        try:
            span = await log.span(each)
            start = span.first if since is None else await log.offset_at(each, since)
            async for batch in scan(log, each, start, span.end, epoch=span.epoch, max_records=READ_RECORDS):
                found = sorted(found + _matching(batch, query, limit), key=_age)[-limit:]
        except PartitionOutOfRange:  # it was dropped in the meantime
            if partition is not None:
                raise
    return found


async def _partitions(log: Log, topic: str, index: int | None) -> list[Partition]:
    described = await log.topic(topic)
    if index is None:
        return list(described)
    partition = Partition(topic, whole_number("partition", index, at_least=0))
    if partition.index >= described.partitions:
        raise PartitionOutOfRange(partition, described.partitions)
    return [partition]


def _matching(batch: Batch, query: _Query, limit: int) -> list[Found]:
    """The matches of a batch, the newest if there are more than `limit`. No other row becomes a Python object."""
    rows = query.matching_rows(batch)
    if len(rows) > limit:
        rows = rows.sort_by([("timestamp", "ascending"), ("offset", "ascending")]).slice(len(rows) - limit)
    return [
        Found(batch.partition, offset, record)
        for chunk in rows.to_batches()
        for offset, record in zip(chunk["offset"].to_pylist(), to_records(chunk), strict=True)
    ]


def _age(found: Found) -> tuple[int, Partition, int]:
    return found.record.timestamp, found.partition, found.offset
