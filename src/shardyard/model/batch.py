"""Records as Arrow batches, and back."""

from collections.abc import Iterable, Sequence
from itertools import repeat, starmap
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from msgspec import Struct
from msgspec.structs import force_setattr

from shardyard.model import Headers, Partition, Record

SCHEMA = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary(), nullable=False),
        pa.field("headers", pa.map_(pa.string(), pa.binary())),
        pa.field("timestamp", pa.int64(), nullable=False),
    ]
)
"""The Arrow columns of a record. The timestamp is in milliseconds since 1970, UTC; no headers are null."""


class Batch(Struct, frozen=True):
    """The records of a partition with offsets from `first` up to, but not including, `end`: all that there are.

    Offsets ascend, and may have gaps. A batch can be empty and still have an `end` beyond `first`: then there is no
    record between them.
    """

    partition: Partition
    epoch: int
    first: int
    """Where the read began. The first record may have a higher offset."""
    content: pa.Table | Sequence[Record]
    """The records, in the form in which they were stored. Use `data` or `records`."""
    places: npt.NDArray[np.int64] | None = None
    """The offset of each record; None if they are consecutive from `first` on."""
    stop: int | None = None
    """The offset to read from next; None if it follows that of the last record, or is `first` if there is none."""

    def __len__(self) -> int:
        return len(self.content)

    @property
    def data(self) -> pa.Table:
        """Columns as in `SCHEMA`, in any number of chunks."""
        if not isinstance(self.content, pa.Table):
            table = pa.Table.from_batches([from_records(self.content, 0)])
            force_setattr(self, "content", table)  # the same records, for the next time
        return self.content

    @property
    def end(self) -> int:
        """The offset to read from next."""
        if self.stop is not None:
            return self.stop
        if self.places is None or not len(self.places):
            return self.first + len(self)
        return int(self.places[-1]) + 1

    def emptied(self) -> "Batch":
        """A batch without records that begins and ends at `first`."""
        return Batch(self.partition, self.epoch, self.first, ())

    def before(self, offset: int) -> "Batch":
        """The part of this batch below `offset`."""
        if offset >= self.end:
            return self
        count = int(np.searchsorted(self.offset_array(), offset))
        places = None if self.places is None else self.places[:count]
        content = sliced(self.content, 0, count)
        return Batch(self.partition, self.epoch, self.first, content, places, max(self.first, offset))

    @property
    def size(self) -> int:
        """About how many bytes its records take."""
        if isinstance(self.content, pa.Table):
            return int(self.content.nbytes)
        return sum(len(record.value) + len(record.key or b"") for record in self.content)

    def headers(self) -> list[Headers] | None:
        """The headers of each record; None if no record has any."""
        if not isinstance(self.content, pa.Table):
            return [record.headers for record in self.content] if any(r.headers for r in self.content) else None
        column = self.content["headers"]
        if column.null_count == len(column):
            return None
        return [tuple(pairs or ()) for pairs in column.to_pylist()]

    def offsets(self) -> Sequence[int]:
        """The offset of each record."""
        return range(self.first, self.first + len(self)) if self.places is None else self.places.tolist()

    def offset_array(self) -> npt.NDArray[np.int64]:
        """The offset of each record, as an array."""
        return np.arange(self.first, self.first + len(self)) if self.places is None else self.places

    def records(self) -> list[Record]:
        """The records as Python objects."""
        if isinstance(self.content, pa.Table):
            return [record for chunk in self.content.to_batches() for record in to_records(chunk)]
        return list(self.content)


def joined(contents: Sequence[pa.Table | Sequence[Record]]) -> pa.Table:
    """The contents of several batches in their order, those that are not in Arrow converted together."""
    batches: list[pa.RecordBatch] = []
    plain: list[Record] = []
    for content in (*contents, pa.Table.from_batches([], SCHEMA)):
        if not isinstance(content, pa.Table):
            plain += content
            continue
        if plain:
            batches.append(from_records(plain, 0))
            plain = []
        batches += content.to_batches()
    return pa.Table.from_batches(batches, SCHEMA)


Content = TypeVar("Content", bound=pa.Table | pa.RecordBatch | Sequence[Record])


def sliced(content: Content, start: int, count: int) -> Content:
    """So many records from `start` on, or as many as there are."""
    if isinstance(content, pa.Table | pa.RecordBatch):
        return content.slice(start, count)  # type: ignore[no-any-return]
    return content[start : start + count]  # type: ignore[return-value]


def cut(content: Content, size: int, start: int, max_records: int, max_bytes: int, *, at_least: int) -> Content:
    """The records of a batch of `size` bytes from `start` on that fit the limits, as if all were equally large."""
    fitting = max_bytes * len(content) // size
    return sliced(content, start, min(max_records, max(fitting, at_least)))


def to_records(data: pa.RecordBatch) -> list[Record]:
    """The rows of an Arrow batch as records."""
    ids, keys, values, headers, timestamps = (data.column(i) for i in range(5))
    bare: Iterable[Headers] = repeat((), len(data))
    if headers.null_count < len(data):
        bare = (tuple(pairs or ()) for pairs in headers.to_pylist())
    rows = zip(ids.to_pylist(), keys.to_pylist(), values.to_pylist(), bare, timestamps.to_pylist(), strict=True)
    return list(starmap(Record, rows))


def from_records(records: Sequence[Record], now: int) -> pa.RecordBatch:
    """Records that were validated before, as an Arrow batch. Those with the timestamp 0 get `now`, in milliseconds."""
    headers = (
        pa.array([r.headers or None for r in records], SCHEMA.field("headers").type)
        if any(r.headers for r in records)
        else pa.nulls(len(records), SCHEMA.field("headers").type)
    )
    return pa.RecordBatch.from_arrays(
        [
            pa.array([r.id for r in records], pa.string()),
            pa.array([r.key for r in records], pa.binary()),
            pa.array([r.value for r in records], pa.binary()),
            headers,
            pa.array([r.timestamp or now for r in records], pa.int64()),
        ],
        schema=SCHEMA,
    )
