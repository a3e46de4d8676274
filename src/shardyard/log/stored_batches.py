"""Batches as engines with a database store them: one row each, with a checksum. No I/O.

Most are Arrow batches. A few records are stored as columns in MessagePack, which takes a fraction of the time and room,
until they are merged with others. The first byte tells which it is.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby, repeat, starmap
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import xxhash
from msgspec import Struct

from shardyard.model import Damaged, Partition, Record, Span
from shardyard.model.batch import SCHEMA, Batch, cut, from_records

FEW_RECORDS = 64
"""Up to so many records are stored in MessagePack."""
_MSGPACK = 0x95
"""The first byte of an array of five items. An Arrow batch begins with 0xff."""
_encoder = msgspec.msgpack.Encoder()


class _FewColumns(NamedTuple):
    """The columns of a few records."""

    ids: list[str]
    keys: list[bytes | None] | None
    """None if no record has one."""
    values: list[bytes]
    headers: list[tuple[tuple[str, bytes], ...]] | None
    """None if no record has any."""
    timestamps: list[int]


_decoder = msgspec.msgpack.Decoder(_FewColumns)


class StoredBatch(Struct, frozen=True):
    """The columns of a row."""

    first: int
    """The offset of the first record; the others follow without gaps."""
    count: int
    latest: int
    """The latest timestamp, in milliseconds."""
    checksum: int
    """A signed integer of 64 bits. It covers partition and offset, so a misplaced batch fails too."""
    data: pa.Buffer | bytes


class LoadedBatch(Struct, frozen=True):
    """A stored batch that was checked and decoded."""

    first: int
    size: int
    """Stored bytes. Decoded Arrow columns point into these."""
    content: pa.RecordBatch | Sequence[Record]

    def __len__(self) -> int:
        return len(self.content)

    @property
    def end(self) -> int:
        return self.first + len(self.content)


def encode(partition_id: int, first: int, data: pa.RecordBatch) -> StoredBatch:
    """`partition_id`: a number that the engine never gives to another partition."""
    stored = data.serialize()
    latest = int(data["timestamp"].to_numpy().max())  # for a few records five times as fast as Arrow's own
    return StoredBatch(first, len(data), latest, _checksum(stored, partition_id, first), stored)


def encode_few(partition_id: int, first: int, records: Sequence[Record], now: int) -> StoredBatch:
    """The same of a few records that were validated. Those with the timestamp 0 get `now`, in milliseconds."""
    timestamps = [record.timestamp or now for record in records]
    keys = [record.key for record in records]
    headers = [record.headers for record in records]
    stored = _encoder.encode(
        (
            [record.id for record in records],
            keys if keys.count(None) < len(keys) else None,
            [record.value for record in records],
            headers if any(headers) else None,
            timestamps,
        )
    )
    return StoredBatch(first, len(records), max(timestamps), _checksum(stored, partition_id, first), stored)


def decode(stored: bytes, checksum: int, partition_id: int, first: int, count: int, where: str) -> LoadedBatch:
    """Load a stored batch; `Damaged` if it is not what was stored. `where`: for the error."""
    content = _content(stored, checksum, partition_id, first, count, where)
    return LoadedBatch(first, len(stored), _records(content) if isinstance(content, _FewColumns) else content)


def join(rows: Iterable[tuple[int, int, int, bytes]], partition_id: int, where: str) -> pa.RecordBatch:
    """The records of stored batches that follow each other: their first offsets, counts, checksums and bytes.
    `Damaged` if one is not what was stored, or if there is a gap between them: in one batch, the records behind it
    would get wrong offsets. Those in MessagePack become Arrow columns without a `Record` for each: the event loop would
    have to wait for the interpreter while a thread makes these."""
    contents: list[pa.RecordBatch | _FewColumns] = []
    end = None
    for first, count, checksum, stored in rows:
        if end is not None and first != end:
            raise Damaged(where, f"offsets {end} to {first - 1} are missing")
        contents.append(_content(stored, checksum, partition_id, first, count, where))
        end = first + count
    batches: list[pa.RecordBatch] = []
    for is_arrow, group in groupby(contents, lambda content: isinstance(content, pa.RecordBatch)):
        same: list[Any] = list(group)
        batches += same if is_arrow else [_few_as_arrow(same)]
    return pa.concat_batches(batches)


def _content(
    stored: bytes, checksum: int, partition_id: int, first: int, count: int, where: str
) -> "pa.RecordBatch | _FewColumns":
    if _checksum(stored, partition_id, first) != checksum:
        raise Damaged(where, f"the batch at offset {first} fails its checksum")
    try:
        is_few = stored[0] == _MSGPACK
        content = _decoder.decode(stored) if is_few else pa.ipc.read_record_batch(pa.py_buffer(stored), SCHEMA)
    except (msgspec.DecodeError, ValueError) as error:
        raise Damaged(where, f"the batch at offset {first} is none: {error}") from error
    counts = {len(column) for column in content if column is not None} if is_few else {len(content)}
    if counts != {count}:
        found = " and ".join(map(str, sorted(counts)))
        raise Damaged(where, f"the batch at offset {first} has {found} records instead of {count}")
    return content


def _records(few: _FewColumns) -> list[Record]:
    ids, keys, values, headers, timestamps = few
    keyless, bare = repeat(None, len(ids)), repeat((), len(ids))
    rows = zip(
        ids, keyless if keys is None else keys, values, bare if headers is None else headers, timestamps, strict=True
    )
    return list(starmap(Record, rows))


def _few_as_arrow(parts: Sequence[_FewColumns]) -> pa.RecordBatch:
    keys = chain.from_iterable([None] * len(few.ids) if few.keys is None else few.keys for few in parts)
    headers = chain.from_iterable([()] * len(few.ids) if few.headers is None else few.headers for few in parts)
    columns: list[list[Any]] = [
        [id_ for few in parts for id_ in few.ids],
        list(keys),
        [value for few in parts for value in few.values],
        [pairs or None for pairs in headers],
        [timestamp for few in parts for timestamp in few.timestamps],
    ]
    arrays = [pa.array(column, field.type) for column, field in zip(columns, SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def arrow_batches(contents: Sequence[pa.RecordBatch | Sequence[Record]]) -> list[pa.RecordBatch]:
    """The records of several batches in Arrow; those in other form that follow each other become one batch."""
    batches: list[pa.RecordBatch] = []
    for is_arrow, group in groupby(contents, lambda content: isinstance(content, pa.RecordBatch)):
        same = list(group)
        batches += same if is_arrow else [from_records(list(chain.from_iterable(same)), 0)]
    return batches


def _checksum(stored: pa.Buffer | bytes, partition_id: int, first: int) -> int:
    return xxhash.xxh3_64_intdigest(stored, seed=(partition_id << 44 ^ first) % 2**64) - 2**63


@dataclass(slots=True)
class Read:
    """Collects the records of a read out of stored batches, which the caller adds in order until it is full."""

    partition: Partition
    span: Span
    offset: int
    max_records: int
    max_bytes: int
    _chunks: list[pa.RecordBatch | Sequence[Record]] = field(default_factory=list)
    _count: int = 0
    _size: int = 0

    @property
    def end(self) -> int:
        """The offset after the last record that was taken."""
        return self.offset + self._count

    def add(self, batch: LoadedBatch) -> bool:
        """Take what fits of a batch that reaches beyond the last one, or beyond `offset`. Returns whether more fits."""
        at = self.end
        if batch.first > at:
            raise Damaged(str(self.partition), f"offsets {at} to {batch.first - 1} are missing")
        part = cut(
            batch.content,
            batch.size,
            at - batch.first,
            self.max_records - self._count,
            self.max_bytes - self._size,
            at_least=0 if self._chunks else 1,
        )
        if len(part):
            self._chunks.append(part)
        self._count += len(part)
        self._size += batch.size * len(part) // len(batch)
        return self.end == batch.end and self._count < self.max_records and self._size < self.max_bytes

    def result(self) -> Batch:
        if not self._count and self.offset < self.span.end:
            raise Damaged(str(self.partition), f"offset {self.offset} is missing")
        content: pa.Table | Sequence[Record]
        if any(isinstance(chunk, pa.RecordBatch) for chunk in self._chunks):
            content = pa.Table.from_batches(arrow_batches(self._chunks), SCHEMA)
        else:
            content = self._chunks[0] if len(self._chunks) == 1 else list(chain.from_iterable(self._chunks))
        return Batch(self.partition, self.span.epoch, self.offset, content)


def first_since(batch: LoadedBatch, timestamp: int, at_least: int) -> int | None:
    """The lowest offset, `at_least` or above, of a record that is not older than `timestamp`; None if there is none."""
    (data,) = arrow_batches([batch.content])
    late = np.flatnonzero(data["timestamp"].to_numpy() >= timestamp)
    reached = late[late >= max(0, at_least - batch.first)]
    return batch.first + int(reached[0]) if len(reached) else None
