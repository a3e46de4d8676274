"""Counts on their way from tasks to the driver: blocks of cells, not rows.

A task hands over the sums of what it counted, and blocks of the same cells are added up. As rows, the 2**20 buckets of
each task would take Spark longer to add up than all the rest.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import BinaryType, IntegerType, LongType, StringType, StructField, StructType

from shardyard.model import InvalidValue

BLOCK_CELLS = 2**16
BATCH_BYTES = 16 * 1024 * 1024
MOST_CELLS = 2**25
"""That are brought to the driver, of 16 bytes each: some 30 topics at a time, since each has 2**20 buckets."""

BLOCKS = StructType(
    [
        StructField("topic", StringType()),
        StructField("window", LongType()),
        StructField("tally", IntegerType()),
        StructField("block", IntegerType()),
        StructField("records", BinaryType()),
        StructField("bytes", BinaryType()),
    ]
)
"""Records and bytes of up to `BLOCK_CELLS` cells in a row, as int64. The window is its number, counted from 1970; null
without windows, and for records without a timestamp."""

Counts = npt.NDArray[np.int64]


class Counted(NamedTuple):
    """Records and bytes per cell."""

    records: Counts
    bytes: Counts

    def plus(self, other: "Counted") -> "Counted":
        return Counted(_added(self.records, other.records), _added(self.bytes, other.bytes))

    def widened(self, cells: int) -> "Counted":
        """With at least so many cells."""
        more = max(0, cells - len(self.records))
        return Counted(np.pad(self.records, (0, more)), np.pad(self.bytes, (0, more)))


def _added(one: Counts, other: Counts) -> Counts:
    longer, shorter = (one, other) if len(one) >= len(other) else (other, one)
    total = longer.copy()
    total[: len(shorter)] += shorter
    return total


class Block(NamedTuple):
    topic: str
    window: int | None
    tally: int
    block: int
    counted: Counted


def blocks_of(topic: str, window: int | None, tally: int, counted: Counted) -> Iterator[Block]:
    """The cells of one tally in blocks, without those where nothing was counted."""
    for start in range(0, len(counted.records), BLOCK_CELLS):
        part = Counted(*(counts[start : start + BLOCK_CELLS] for counts in counted))
        if part.records.any():
            yield Block(topic, window, tally, start // BLOCK_CELLS, part)


def to_arrow(found: Iterable[Block]) -> Iterator[pa.RecordBatch]:
    held: list[Block] = []
    size = 0
    for block in found:
        held.append(block)
        size += block.counted.records.nbytes * 2
        if size > BATCH_BYTES:
            yield _batch(held)
            held, size = [], 0
    if held:
        yield _batch(held)


def _batch(held: list[Block]) -> pa.RecordBatch:
    schema = to_arrow_schema(BLOCKS)
    columns = zip(*((*block[:4], *(counts.tobytes() for counts in block.counted)) for block in held), strict=True)
    return pa.RecordBatch.from_arrays(
        [pa.array(c, f.type) for c, f in zip(columns, schema, strict=True)], schema=schema
    )


def _counted(records: bytes, sizes: bytes) -> Counted:
    return Counted(np.frombuffer(records, np.int64), np.frombuffer(sizes, np.int64))


def summed(blocks: DataFrame) -> DataFrame:
    """`BLOCKS` in which no cell comes twice."""

    def add(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        sums: dict[tuple[Any, ...], Counted] = {}
        for batch in batches:
            for *key, records, sizes in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                found, place = _counted(records, sizes), tuple(key)
                sums[place] = sums[place].plus(found) if place in sums else found
        yield from to_arrow(Block._make((*place, counted)) for place, counted in sums.items())

    return blocks.repartition(*BLOCKS.names[:4]).mapInArrow(add, BLOCKS).select(*BLOCKS.names)


def collected(blocks: DataFrame) -> dict[str, dict[int, dict[int | None, Counted]]]:
    """Summed blocks, put together: topic -> tally -> window -> counts."""
    found: dict[str, dict[int, dict[int | None, Counted]]] = {}
    cells = 0
    for topic, window, tally, block, records, sizes in blocks.toLocalIterator():
        part = _counted(bytes(records), bytes(sizes))
        cells += len(part.records)
        if cells > MOST_CELLS:
            few = "fewer windows, topics, schemes or partitions at a time: their product is too large to report"
            raise InvalidValue("cells to report", f"more than {MOST_CELLS}", few)
        windows = found.setdefault(topic, {}).setdefault(tally, {})
        start = block * BLOCK_CELLS
        held = windows.get(window, Counted(part.records[:0], part.bytes[:0])).widened(start + len(part.records))
        for to, more in zip(held, part, strict=True):
            to[start : start + len(more)] += more
        windows[window] = held
    return found
