"""Forwarding records from one topic to another exactly once.

The id of a forwarded record says where it comes from. Appends carry the fences of the partitions that they come from,
so nobody but the owner forwards. A new owner looks in the target partitions for what was forwarded and not committed.
"""

import asyncio
import itertools
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from shardyard.fanout.hot_channels import HEADER, decode_split
from shardyard.fanout.rounds import all_of
from shardyard.log import Log
from shardyard.log.requests import AppendRequest
from shardyard.log.scan import scan
from shardyard.model import Fence, Fenced, Malformed, Partition, Position, Record, RetryLater, ShardyardError, Stamp
from shardyard.model.batch import SCHEMA, to_records
from shardyard.model.limits import Validated
from shardyard.runtime.clock import Clock
from shardyard.runtime.retry import Backoff
from shardyard.wire.channels import MAX_CHANNEL_LENGTH, parse_source, source_prefix

Offsets = npt.NDArray[np.int64]

APPEND_RECORDS = 20_000
APPEND_BYTES = 4 * 1024 * 1024
"""Of one append; a step with more for a partition takes several."""
CALL_BYTES = 16 * 1024 * 1024
"""Of all appends of one call, which are one commit."""
MAX_KEY_BYTES = 4 * MAX_CHANNEL_LENGTH
MAX_VALUE_BYTES = 512 * 1024
"""Of an event. Larger ones could exceed the log's limit once they have the key of a post, and are skipped."""
FEW_ROWS = 500
"""Up to so many rows of a step are appended as Python objects."""
SCANS = 8
"""Partitions that are scanned at the same time."""
APPEND_BACKOFF = Backoff(first=0.01, longest=0.5)


def source_ids(partition: Partition, epoch: int, offsets: Offsets) -> pa.Array:
    """The ids of records that are forwarded from these offsets."""
    prefix = pa.scalar(source_prefix(partition.topic, partition.index, epoch))
    return pc.binary_join_element_wise(prefix, pa.array(offsets).cast(pa.string()), "")


def usable(keys: pa.Array, values: pa.Array) -> npt.NDArray[np.bool_]:
    """Which records are events of a channel: they have a key, and are not too large."""
    length = pc.fill_null(pc.binary_length(keys), 0)
    good = pc.and_(pc.greater(length, 0), pc.less_equal(length, MAX_KEY_BYTES))
    good = pc.and_(good, pc.less_equal(pc.binary_length(values), MAX_VALUE_BYTES))
    return np.asarray(good)


def record_batch(ids: pa.Array, keys: pa.Array, values: pa.Array, headers: pa.Array | None = None) -> pa.RecordBatch:
    """Records that get the time at which they are validated: those of the source may be older than what the target
    keeps, and a scan by time relies on it."""
    if headers is None:
        headers = pa.nulls(len(ids), SCHEMA.field("headers").type)
    times = pa.array(np.zeros(len(ids), np.int64))
    return pa.RecordBatch.from_arrays([ids, keys, values, headers, times], schema=SCHEMA)


def few_or_many(records: Validated) -> Validated:
    """The same records. If they are few, they are Python objects: in small batches, Arrow takes more time for each
    batch than these take for each record."""
    if len(records) > FEW_ROWS or not isinstance(records.rows, pa.RecordBatch):
        return records
    return records.part(tuple(to_records(records.rows)))


def taken_rows(records: Validated, rows: npt.NDArray[np.int64]) -> "tuple[Record, ...] | pa.RecordBatch":
    """Some of the records, by their numbers."""
    if isinstance(records.rows, pa.RecordBatch):
        return records.rows.take(pa.array(rows))
    return tuple(map(records.rows.__getitem__, rows.tolist()))


@dataclass(slots=True)
class Forwarded:
    """What was found of the records of one source partition: for each target partition, the source offset from which
    on nothing was forwarded."""

    next_offsets: Offsets
    scanned: dict[int, Position] = field(default_factory=dict)
    """Up to where each target partition was scanned."""
    splits: dict[int, int] = field(default_factory=dict)
    """By source offset, over how many partitions an event of a hot channel was split."""
    copies: set[tuple[int, int]] = field(default_factory=set)
    """Of these events, the source offset and the target partition of each record. `next_offsets` do not tell: another
    channel's events may have been forwarded to a partition when this one was not split yet."""

    def __bool__(self) -> bool:
        return bool(self.next_offsets.any())

    def next(self, targets: int) -> Offsets:
        """`next_offsets`, for so many target partitions."""
        missing = targets - len(self.next_offsets)
        return self.next_offsets if missing <= 0 else np.pad(self.next_offsets, (0, missing))


async def find_forwarded(
    log: Log, target: str, sources: Mapping[Partition, tuple[int, int]], known: Mapping[Partition, Forwarded]
) -> dict[Partition, Forwarded]:
    """Look in all partitions of the topic `target` for records that were forwarded from `sources`: for each, the epoch
    of its topic, and the time in milliseconds since which there may be any. `known`: from an earlier scan of the same
    sources, which is continued."""
    ends = await log.ends(target)
    targets = max(ends) + 1
    found: dict[Partition, Forwarded] = {}
    for source in sources:
        has = known.get(source)
        if has is None:
            found[source] = Forwarded(np.zeros(targets, np.int64))
        else:
            found[source] = Forwarded(has.next(targets).copy(), splits=dict(has.splits), copies=set(has.copies))
    limit = asyncio.Semaphore(SCANS)

    async def look(index: int) -> None:
        span, partition = ends[index], Partition(target, index)
        async with limit:
            starts = []
            unknown = []
            for source, (_, since) in sources.items():
                place = known[source].scanned.get(index) if source in known else None
                if place is not None and place.epoch == span.epoch:
                    starts.append(place.offset)
                else:
                    unknown.append(since)
            if unknown:
                starts.append(await log.offset_at(partition, min(unknown)))
            async for batch in scan(log, partition, max(min(starts), span.first), span.end, epoch=span.epoch):
                _note(batch.data["id"], index, sources, found)
                _note_splits(batch.data, index, sources, found)
        for has in found.values():
            has.scanned[index] = Position(span.epoch, span.end)

    await all_of(map(look, ends))
    return found


def _note(
    ids: pa.ChunkedArray,
    target: int,
    sources: Mapping[Partition, tuple[int, int]],
    found: Mapping[Partition, Forwarded],
) -> None:
    """Take account of the records with these ids in a target partition."""
    topics = {source.topic for source in sources}
    for topic in topics:
        mine = ids.filter(pc.starts_with(ids, f"{topic}."))
        if not len(mine):
            continue
        parts = pc.extract_regex(mine, rf"^{topic.replace('.', '[.]')}[.](?P<p>[0-9]+)[.](?P<e>[0-9]+)[.](?P<o>[0-9]+)")
        parts = parts.drop_null().combine_chunks()
        index, epoch, offset = (np.asarray(parts.field(i).cast(pa.int64())) for i in range(3))
        for source, (current, _) in sources.items():
            of_it = offset[(index == source.index) & (epoch == current)]
            if source.topic == topic and len(of_it):
                next_offsets = found[source].next_offsets
                next_offsets[target] = max(next_offsets[target], int(of_it.max()) + 1)


def _note_splits(
    data: pa.Table,
    target: int,
    sources: Mapping[Partition, tuple[int, int]],
    found: Mapping[Partition, Forwarded],
) -> None:
    """Note how events of hot channels were split: whoever completes that must split them alike."""
    if data["headers"].null_count == len(data):
        return
    data = data.filter(data["headers"].is_valid())
    for id_, headers in zip(data["id"].to_pylist(), data["headers"].to_pylist(), strict=True):
        split = next((decode_split(value) for name, value in headers if name == HEADER), None)
        try:
            source = parse_source(id_)
        except Malformed:
            continue
        partition = Partition(source.topic, source.index)
        if split is not None and partition in found and sources[partition][0] == source.epoch:
            found[partition].splits[source.offset] = split.ways
            found[partition].copies.add((source.offset, target))


class Outlet:
    """Appends to the partitions of a topic. An append that may or may not have been stored is repeated under the same
    stamp."""

    def __init__(self, log: Log, clock: Clock) -> None:
        self._log = log
        self._clock = clock
        self._producer = secrets.token_urlsafe(12)
        """Short, because the log stores it with each append: with names of 50 bytes, a step wrote a tenth more."""
        self._sequences: dict[Partition, itertools.count[int]] = {}

    async def append(
        self,
        topic: str,
        parts: Iterable[tuple[int, Validated, Sequence[Fence]]],
        may_continue: Callable[[], bool],
        generation: int | None = None,
    ) -> None:
        """Append to several partitions: index, records, and the fences of the partitions that they come from. Returns
        when all of it is durable; when it raises, some of it may be. While the log is out of reach, it is retried as
        long as `may_continue`.

        Most steps are one commit. `parts` is consumed as it is appended, so that a large step is never in memory for
        all of its partitions at once. What follows in the same partition is appended when the piece before it is
        durable."""
        requests: list[AppendRequest] = []
        size = 0
        for index, records, fences in parts:
            partition = Partition(topic, index)
            for piece in _pieces(records):
                if requests and (size + piece.size > CALL_BYTES or requests[-1].partition == partition):
                    await self._append(requests, may_continue)
                    requests, size = [], 0
                requests.append(AppendRequest(partition, piece, self._stamp(partition), fences, generation))
                size += piece.size
        await self._append(requests, may_continue)

    def _stamp(self, partition: Partition) -> Stamp:
        return Stamp(self._producer, next(self._sequences.setdefault(partition, itertools.count(1))))

    async def _append(self, requests: Sequence[AppendRequest], may_continue: Callable[[], bool]) -> None:
        attempt = 0
        while requests:
            attempt += 1
            outcomes = await self._log.append_many(requests)
            failed = [
                (request, outcome)
                for request, outcome in zip(requests, outcomes, strict=True)
                if isinstance(outcome, ShardyardError)
            ]
            errors = [error for _, error in failed]
            final = [error for error in errors if not isinstance(error, RetryLater)] or (
                [] if may_continue() else errors
            )
            if final:
                raise next((error for error in final if not isinstance(error, Fenced)), final[0])
            requests = [request for request, _ in failed]
            if requests:
                await self._clock.sleep(APPEND_BACKOFF.delay(attempt))


def _pieces(records: Validated) -> Iterable[Validated]:
    """The records in parts that are not too large for one append."""
    if len(records) == 1 or (len(records) <= APPEND_RECORDS and records.size <= APPEND_BYTES):
        return (records,)
    rows, half = records.rows, len(records) // 2
    return (*_pieces(records.part(rows[:half])), *_pieces(records.part(rows[half:])))
