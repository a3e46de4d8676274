"""Batches that were read, for those who work without Arrow."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from shardyard.model.extras import require
from shardyard.model.words import Partition, Record

if TYPE_CHECKING:
    import pyarrow as pa


class ReadBatch(Protocol):
    """What a consumer needs of a batch, whether it is a `Batch`, as logs return them, or a `PlainBatch`."""

    @property
    def partition(self) -> Partition: ...
    @property
    def epoch(self) -> int: ...
    @property
    def first(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def data(self) -> "pa.Table": ...
    def __len__(self) -> int: ...
    def records(self) -> list[Record]: ...
    def offsets(self) -> Sequence[int]: ...


@dataclass(frozen=True, slots=True)
class PlainBatch:
    """A `Batch` whose records are Python objects. Nothing of it needs Arrow, except `data`."""

    partition: Partition
    epoch: int
    first: int
    end: int
    rows: list[Record]
    places: list[int] | None = None
    """The offset of each record; None if they are consecutive from `first` on."""

    def __len__(self) -> int:
        return len(self.rows)

    def records(self) -> list[Record]:
        return self.rows

    def offsets(self) -> Sequence[int]:
        return range(self.first, self.first + len(self.rows)) if self.places is None else self.places

    @property
    def data(self) -> "pa.Table":
        """The records as an Arrow table."""
        require("server", "a batch as an Arrow table", "numpy", "pyarrow")
        import pyarrow as pa  # noqa: PLC0415 most programs use the records

        from shardyard.model.batch import from_records  # noqa: PLC0415 likewise

        return pa.Table.from_batches([from_records(self.rows, 0)])
