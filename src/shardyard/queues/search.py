"""Finding records of a topic by id, key, trace, tag or time."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import reduce

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from shardyard.log import Log
from shardyard.log.port import READ_RECORDS
from shardyard.model import (
    TRACE,
    InvalidValue,
    OffsetTrimmed,
    Partition,
    PartitionOutOfRange,
    Record,
    TooLarge,
    whole_number,
)
from shardyard.model.batch import Batch, to_records
from shardyard.model.checks import check_int64, check_text
from shardyard.queues.filtering import only_tagged

MOST_FOUND = 1_000
"""Records that one search may return."""


@dataclass(frozen=True, slots=True)
class Found:
    """A record and where it lies."""

    partition: Partition
    offset: int
    record: Record


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What a record must have; None: anything."""

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

    def within(self, batch: Batch) -> pa.Table:
        """The rows that have it, with their offsets."""
        if self.tag is not None:
            batch = only_tagged(batch, [self.tag])
        places = np.arange(batch.first, batch.end) if batch.places is None else batch.places
        rows = batch.data.append_column("offset", pa.array(places))
        masks = self._masks(batch.data)
        return rows.filter(reduce(pc.and_, masks)) if masks else rows

    def _masks(self, data: pa.Table) -> list[pa.ChunkedArray]:
        """True for the rows that have one thing of it; null or False for the others."""
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
        return masks


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
    """The records that have all of what is named, the newest last; of more than `limit`, the newest.

    `since` is the first millisecond (since 1970) that counts, `until` the first that no longer does. All partitions are
    searched unless one is named, also for a key: when a topic was expanded, its earlier records stayed where they were.
    Of several tags of a record each counts, as for the groups that go by them; of several traces, the last.
    What is appended during the search is not found, nor what goes meanwhile.
    """
    wanted = _Wanted(id, key, trace, tag, since, until)
    limit = whole_number("limit", limit, at_least=1)
    if limit > MOST_FOUND:
        raise TooLarge("limit of a search", limit, MOST_FOUND)
    found: list[Found] = []
    for each in await _partitions(log, topic, partition):
        try:
            async for batch in _batches(log, each, since):
                found = sorted(found + _matching(batch, wanted, limit), key=_age)[-limit:]
        except PartitionOutOfRange:  # contracted away meanwhile
            if partition is not None:
                raise
    return found


async def _batches(log: Log, partition: Partition, since: int | None) -> AsyncIterator[Batch]:
    """What there is in a partition, from a time on."""
    span = await log.span(partition)
    offset = span.first if since is None else await log.offset_at(partition, since)
    while offset < span.end:
        count = min(READ_RECORDS, span.end - offset)
        try:
            batch = await log.read(partition, offset, epoch=span.epoch, max_records=count)
        except OffsetTrimmed as error:
            offset = error.first
            continue
        yield batch
        offset = batch.end


async def _partitions(log: Log, topic: str, named: int | None) -> list[Partition]:
    described = await log.topic(topic)
    if named is None:
        return list(described)
    partition = Partition(topic, whole_number("partition", named, at_least=0))
    if partition.index >= described.partitions:
        raise PartitionOutOfRange(partition, described.partitions)
    return [partition]


def _matching(batch: Batch, wanted: _Wanted, limit: int) -> list[Found]:
    """What a batch has of it, the newest if there are more than `limit`; no other row becomes a Python object."""
    rows = wanted.within(batch)
    if len(rows) > limit:
        rows = rows.sort_by([("timestamp", "ascending"), ("offset", "ascending")]).slice(len(rows) - limit)
    return [
        Found(batch.partition, offset, record)
        for chunk in rows.to_batches()
        for offset, record in zip(chunk["offset"].to_pylist(), to_records(chunk), strict=True)
    ]


def _age(found: Found) -> tuple[int, Partition, int]:
    return found.record.timestamp, found.partition, found.offset
