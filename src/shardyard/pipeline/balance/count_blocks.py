"""The counts of a task, sent to the driver as blocks of cells and not as rows.

A task sends its sums, and blocks of the same cells are added. If each of the 2**20 buckets of each task were a row,
Spark would take longer to add them than for all the rest.
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
MAX_CELLS = 2**25
"""Cells of 16 bytes each that the driver collects: about 30 topics at a time, because each has 2**20 buckets."""

BLOCKS = StructType(
    [
        StructField("topic", StringType()),
        StructField("window", LongType()),
        StructField("counter", IntegerType()),
        StructField("block", IntegerType()),
        StructField("records", BinaryType()),
        StructField("bytes", BinaryType()),
    ]
)
"""Records and bytes of up to `BLOCK_CELLS` consecutive cells, as int64. The window is the number of windows since 1970,
and null for records without a timestamp, or if there are no windows."""

Counts = npt.NDArray[np.int64]


class CellCounts(NamedTuple):
    """Records and bytes in each cell."""

    records: Counts
    bytes: Counts

    def plus(self, other: "CellCounts") -> "CellCounts":
        return CellCounts(_add(self.records, other.records), _add(self.bytes, other.bytes))

    def padded(self, cells: int) -> "CellCounts":
        """With zeros behind, so that there are at least `cells` cells."""
        more = max(0, cells - len(self.records))
        return CellCounts(np.pad(self.records, (0, more)), np.pad(self.bytes, (0, more)))


def _add(one: Counts, other: Counts) -> Counts:
    longer, shorter = (one, other) if len(one) >= len(other) else (other, one)
    total = longer.copy()
    total[: len(shorter)] += shorter
    return total


class Block(NamedTuple):
    topic: str
    window: int | None
    counter: int
    block: int
    counts: CellCounts


def blocks_of(topic: str, window: int | None, counter: int, counts: CellCounts) -> Iterator[Block]:
    """The cells of one counter in blocks, without the blocks that are zero throughout."""
    for start in range(0, len(counts.records), BLOCK_CELLS):
        part = CellCounts(*(cells[start : start + BLOCK_CELLS] for cells in counts))
        if part.records.any():
            yield Block(topic, window, counter, start // BLOCK_CELLS, part)


def to_arrow(blocks: Iterable[Block]) -> Iterator[pa.RecordBatch]:
    pending: list[Block] = []
    size = 0
    for block in blocks:
        pending.append(block)
        size += block.counts.records.nbytes * 2
        if size > BATCH_BYTES:
            yield _to_batch(pending)
            pending, size = [], 0
    if pending:
        yield _to_batch(pending)


def _to_batch(blocks: list[Block]) -> pa.RecordBatch:
    schema = to_arrow_schema(BLOCKS)
    columns = zip(*((*block[:4], *(cells.tobytes() for cells in block.counts)) for block in blocks), strict=True)
    return pa.RecordBatch.from_arrays(
        [pa.array(c, f.type) for c, f in zip(columns, schema, strict=True)], schema=schema
    )


def _from_bytes(records: bytes, sizes: bytes) -> CellCounts:
    return CellCounts(np.frombuffer(records, np.int64), np.frombuffer(sizes, np.int64))


def sum_blocks(blocks: DataFrame) -> DataFrame:
    """`BLOCKS` in which every cell occurs once."""

    def add(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        sums: dict[tuple[Any, ...], CellCounts] = {}
        for batch in batches:
            for *key, records, sizes in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                counts, block = _from_bytes(records, sizes), tuple(key)
                sums[block] = sums[block].plus(counts) if block in sums else counts
        yield from to_arrow(Block._make((*block, counts)) for block, counts in sums.items())

    return blocks.repartition(*BLOCKS.names[:4]).mapInArrow(add, BLOCKS).select(*BLOCKS.names)


def collect_counts(blocks: DataFrame) -> dict[str, dict[int, dict[int | None, CellCounts]]]:
    """The counts in summed blocks: topic -> counter -> window -> counts."""
    found: dict[str, dict[int, dict[int | None, CellCounts]]] = {}
    cells = 0
    for topic, window, counter, block, records, sizes in blocks.toLocalIterator():
        part = _from_bytes(bytes(records), bytes(sizes))
        cells += len(part.records)
        if cells > MAX_CELLS:
            expected = "fewer windows, topics, schemes or partitions at a time: their product is too large to report"
            raise InvalidValue("cells to report", f"more than {MAX_CELLS}", expected)
        windows = found.setdefault(topic, {}).setdefault(counter, {})
        start = block * BLOCK_CELLS
        counts = windows.get(window, CellCounts(part.records[:0], part.bytes[:0])).padded(start + len(part.records))
        for to, more in zip(counts, part, strict=True):
            to[start : start + len(more)] += more
        windows[window] = counts
    return found
