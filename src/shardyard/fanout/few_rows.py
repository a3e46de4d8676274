"""The rows of a small step as Python objects: for few rows, each call of Arrow takes more time than all of them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from shardyard.fanout.forwarding import FEW_ROWS, MAX_KEY_BYTES, MAX_VALUE_BYTES
from shardyard.fanout.source import InFlight
from shardyard.fanout.step import Rows, StepRows
from shardyard.model import Record
from shardyard.model.limits import ANY_SIZE, Validated, validate
from shardyard.wire.channels import source_prefix
from shardyard.wire.inbox import POST_KEY


@dataclass(frozen=True, slots=True)
class FewRows:
    """The same as `StepRows`, for a worker of the mode `partitioned`."""

    step: Sequence[InFlight]
    records: list[Record]
    keys: list[bytes]
    offsets: Rows
    bounds: Rows
    good: npt.NDArray[np.bool_]
    oldest: int

    @classmethod
    def of(cls, step: Sequence[InFlight]) -> "FewRows":
        """The rows of each batch from its `start` to its `stop`."""
        records: list[Record] = []
        offsets: list[int] = []
        bounds = [0]
        for each in step:
            records += each.batch.content[each.start : each.stop]
            offsets += each.batch.offsets()[each.start : each.stop]
            bounds.append(len(records))
        keys = [record.key or b"" for record in records]
        good = [
            0 < len(key) <= MAX_KEY_BYTES and len(record.value) <= MAX_VALUE_BYTES
            for key, record in zip(keys, records, strict=True)
        ]
        oldest = min((record.timestamp for record in records), default=2**62)
        return cls(step, records, keys, np.array(offsets, np.int64), np.array(bounds), np.array(good, bool), oldest)

    def __len__(self) -> int:
        return len(self.records)

    def batches(self) -> Iterator[tuple[InFlight, slice]]:
        """Each batch, and its rows."""
        bounds = self.bounds.tolist()
        for in_flight, start, stop in zip(self.step, bounds[:-1], bounds[1:], strict=True):
            yield in_flight, slice(start, stop)

    def channels(self, rows: "slice | Rows") -> list[bytes]:
        """The channels of these rows."""
        return self.keys[rows] if isinstance(rows, slice) else [self.keys[row] for row in rows.tolist()]

    def channel(self, row: int) -> bytes:
        """The channel of one row."""
        return self.keys[row]

    def good_channels(self) -> list[bytes]:
        """The channels of all rows that are events of one."""
        return self.keys if self.good.all() else [self.keys[row] for row in np.flatnonzero(self.good).tolist()]

    def sources(self) -> npt.NDArray[np.int64]:
        """The number of each row's batch."""
        return np.repeat(np.arange(len(self.step)), np.diff(self.bounds))

    def posts(self, rows: Rows, members: Rows, now: int) -> Validated:
        """These rows as records of `inbox`, with the time `now` in milliseconds. `members`: for each row of the step,
        the offset up to which the members of its channel are known."""
        prefixes = [
            source_prefix(in_flight.partition.topic, in_flight.partition.index, in_flight.batch.epoch)
            for in_flight in self.step
        ]
        keys, records = self.keys, self.records
        columns = (rows, self.sources()[rows], self.offsets[rows], members[rows])
        posts = tuple(
            Record(f"{prefixes[source]}{offset}.{known}", POST_KEY + keys[row], records[row].value, (), now)
            for row, source, offset, known in zip(*(column.tolist() for column in columns), strict=True)
        )
        return validate(posts, ANY_SIZE, now)


def rows_of(step: Sequence[InFlight]) -> "FewRows | StepRows":
    """The rows of a step of the mode `partitioned`."""
    is_small = sum(in_flight.stop - in_flight.start for in_flight in step) <= FEW_ROWS
    if is_small and not any(isinstance(in_flight.batch.content, pa.Table) for in_flight in step):
        return FewRows.of(step)
    return StepRows.of(step)
