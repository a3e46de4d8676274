"""Records as Arrow batches, and back."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat, starmap

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from shardyard.model import Headers, Partition, Record
from shardyard.model.plain_batch import quick_record

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


@dataclass(frozen=True, slots=True)
class Batch:
    """The records of a partition with offsets from `first` up to, but not including, `end`: all that there are.

    Offsets ascend, and may have gaps. A batch can be empty and still have an `end` beyond `first`: then there is no
    record between them.
    """

    partition: Partition
    epoch: int
    first: int
    """Where the read began. The first record may have a higher offset."""
    data: pa.Table
    """Columns as in `SCHEMA`, in as many chunks as were stored."""
    places: npt.NDArray[np.int64] | None = None
    """The offset of each record; None if they are consecutive from `first` on."""
    stop: int | None = None
    """The offset to read from next; None if it follows that of the last record, or is `first` if there is none."""

    def __len__(self) -> int:
        return int(self.data.num_rows)

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
        return Batch(self.partition, self.epoch, self.first, self.data.slice(0, 0))

    def before(self, offset: int) -> "Batch":
        """The part of this batch below `offset`."""
        if offset >= self.end:
            return self
        count = int(np.searchsorted(self.offset_array(), offset))
        places = None if self.places is None else self.places[:count]
        return Batch(self.partition, self.epoch, self.first, self.data.slice(0, count), places, max(self.first, offset))

    def offsets(self) -> Sequence[int]:
        """The offset of each record."""
        return range(self.first, self.first + len(self)) if self.places is None else self.places.tolist()

    def offset_array(self) -> npt.NDArray[np.int64]:
        """The offset of each record, as an array."""
        return np.arange(self.first, self.first + len(self)) if self.places is None else self.places

    def records(self) -> list[Record]:
        """The records as Python objects."""
        return [record for chunk in self.data.to_batches() for record in to_records(chunk)]


def cut(
    data: pa.RecordBatch, size: int, start: int, max_records: int, max_bytes: int, *, at_least: int
) -> pa.RecordBatch:
    """The rows of a batch of `size` bytes from `start` on that fit the limits, as if all rows were equally large."""
    fitting = max_bytes * len(data) // size
    return data.slice(start, min(max_records, max(fitting, at_least)))


def to_records(data: pa.RecordBatch) -> list[Record]:
    """The rows of an Arrow batch as records."""
    ids, keys, values, headers, timestamps = (data.column(i) for i in range(5))
    bare: Iterable[Headers] = repeat((), len(data))
    if headers.null_count < len(data):
        bare = (tuple(pairs or ()) for pairs in headers.to_pylist())
    rows = zip(ids.to_pylist(), keys.to_pylist(), values.to_pylist(), bare, timestamps.to_pylist(), strict=True)
    return list(starmap(quick_record, rows))


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
