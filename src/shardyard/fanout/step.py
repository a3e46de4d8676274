"""The rows of all batches of a worker's step, in columns over all of them: each call of Arrow or NumPy has its price,
and a step has some rows of many partitions."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from shardyard.fanout.forwarding import few_or_many, record_batch, usable
from shardyard.fanout.source import InFlight
from shardyard.model.batch import joined, sliced
from shardyard.model.limits import ANY_SIZE, Validated, validate
from shardyard.wire.channels import source_prefix
from shardyard.wire.inbox import POST_KEY

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepRows:
    """Events of several partitions, those of a partition in their order."""

    step: Sequence[InFlight]
    keys: pa.Array
    values: pa.Array
    headers: pa.ChunkedArray
    offsets: Rows
    bounds: Rows
    """The rows of batch number i of the step are those from `bounds[i]` up to, but not including, `bounds[i + 1]`."""
    good: npt.NDArray[np.bool_]
    """Which of them are events of a channel."""
    oldest: int
    """The earliest timestamp, in milliseconds."""

    @classmethod
    def of(cls, step: Sequence[InFlight]) -> "StepRows":
        """The rows of each batch from its `start` to its `stop`."""
        data = joined(
            [sliced(in_flight.batch.content, in_flight.start, in_flight.stop - in_flight.start) for in_flight in step]
        )
        offsets = [each.batch.offset_array()[each.start : each.stop] for each in step]
        keys, values = data["key"].combine_chunks(), data["value"].combine_chunks()
        bounds = np.concatenate([[0], np.cumsum([len(rows) for rows in offsets])])
        oldest = int(data["timestamp"].to_numpy().min(initial=2**62))
        good = usable(keys, values)
        return cls(step, keys.fill_null(b""), values, data["headers"], np.concatenate(offsets), bounds, good, oldest)

    def __len__(self) -> int:
        return len(self.offsets)

    def batches(self) -> Iterator[tuple[InFlight, slice]]:
        """Each batch, and its rows."""
        for in_flight, start, stop in zip(self.step, self.bounds[:-1].tolist(), self.bounds[1:].tolist(), strict=True):
            yield in_flight, slice(start, stop)

    def channels(self, rows: "slice | Rows") -> pa.Array:
        """The channels of these rows."""
        if isinstance(rows, slice):
            return self.keys.slice(rows.start, rows.stop - rows.start)
        return self.keys.take(pa.array(rows))

    def channel(self, row: int) -> bytes:
        """The channel of one row."""
        return self.keys[row].as_py()  # type: ignore[no-any-return]

    def good_channels(self) -> pa.Array:
        """The channels of all rows that are events of one."""
        return self.keys if self.good.all() else self.keys.filter(pa.array(self.good))

    def sources(self) -> npt.NDArray[np.int64]:
        """The number of each row's batch."""
        return np.repeat(np.arange(len(self.step)), np.diff(self.bounds))

    def posts(self, rows: Rows, members: Rows, now: int) -> Validated:
        """These rows as records of `inbox`, with the time `now` in milliseconds. `members`: for each row of the step,
        the offset up to which the members of its channel are known."""
        keys, values, offsets = self.keys, self.values, self.offsets
        sources = self.sources()
        if len(rows) < len(self):
            picked = pa.array(rows)
            keys, values = keys.take(picked), values.take(picked)
            offsets, sources, members = offsets[rows], sources[rows], members[rows]
        prefixes = [
            source_prefix(in_flight.partition.topic, in_flight.partition.index, in_flight.batch.epoch)
            for in_flight in self.step
        ]
        numbers = (pa.array(column).cast(pa.string()) for column in (offsets, members))
        ids = pc.binary_join_element_wise(pa.array(prefixes).take(pa.array(sources)), next(numbers), "")
        ids = pc.binary_join_element_wise(ids, next(numbers), ".")
        post_keys = pc.binary_join_element_wise(pa.scalar(POST_KEY), keys, pa.scalar(b""))
        return few_or_many(validate(record_batch(ids, post_keys, values), ANY_SIZE, now))
