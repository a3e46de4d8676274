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
from shardyard.pipeline.balance.key_sample import KeySample, Packed

BLOCK_CELLS = 2**16
BATCH_BYTES = 16 * 1024 * 1024
MAX_CELLS = 2**25
"""Cells of 16 bytes each that the driver collects: about 250 topics at a time, because each has 2**17 buckets."""
BUCKET_BITS = 17
"""The bits of a key's hash that select its bucket. More buckets would not fit into the cache of a processor."""
SAMPLE, EARLY = -4, -5
"""The counters whose only block is a packed `KeySample`, instead of counts: see `TopicCounts`."""

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
"""Records and bytes of up to `BLOCK_CELLS` consecutive cells, as int64, or a packed sample. The window is the number of
windows since 1970, and null for records without a timestamp, or if there are no windows."""

BlockRow = tuple[str, int | None, int, int, bytes, bytes]
"""A row of `BLOCKS`."""
Counts = npt.NDArray[np.int64]


class CellCounts(NamedTuple):
    """Records and bytes in each cell."""

    records: Counts
    bytes: Counts

    def plus(self, other: "CellCounts") -> "CellCounts":
        return CellCounts(_add(self.records, other.records), _add(self.bytes, other.bytes))

    @property
    def packed(self) -> Packed:
        return self.records.tobytes(), self.bytes.tobytes()

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
    content: CellCounts | KeySample
    """A sample only if the counter is `SAMPLE` or `EARLY`."""


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
        size += 16 * len(block.content.records)
        if size > BATCH_BYTES:
            yield _to_batch(pending)
            pending, size = [], 0
    if pending:
        yield _to_batch(pending)


def _to_batch(blocks: list[Block]) -> pa.RecordBatch:
    schema = to_arrow_schema(BLOCKS)
    columns = zip(*((*block[:4], *block.content.packed) for block in blocks), strict=True)
    return pa.RecordBatch.from_arrays(
        [pa.array(c, f.type) for c, f in zip(columns, schema, strict=True)], schema=schema
    )


def _unpack(counter: int, records: bytes, sizes: bytes) -> CellCounts | KeySample:
    if counter in (SAMPLE, EARLY):
        return KeySample.unpack(records, BUCKET_BITS)
    return CellCounts(np.frombuffer(records, np.int64), np.frombuffer(sizes, np.int64))


def sum_blocks(blocks: DataFrame) -> DataFrame:
    """`BLOCKS` in which every cell occurs once."""

    def add(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        sums: dict[tuple[Any, ...], Any] = {}
        for batch in batches:
            for *key, records, sizes in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                content, block = _unpack(key[2], records, sizes), tuple(key)
                sums[block] = sums[block].plus(content) if block in sums else content
        yield from to_arrow(Block._make((*block, content)) for block, content in sums.items())

    return blocks.repartition(*BLOCKS.names[:4]).mapInArrow(add, BLOCKS).select(*BLOCKS.names)


Windows = dict[int | None, CellCounts]
"""The counts of each window; None for the records without a timestamp, or if there are no windows."""


class TopicCounts(NamedTuple):
    """The counts of a topic: those of each counter, and the sample of its keys."""

    counters: dict[int, Windows]
    sample: KeySample
    early: KeySample
    """Other keys with all of their records, if the sample does not have all keys: those that came first in all tasks.
    Keys that occur often are likely to be among them. Only counting in the JVM finds them."""


def rows_of(blocks: DataFrame) -> Iterable[BlockRow]:
    """The rows of `BLOCKS`, a few at a time."""
    return blocks.toLocalIterator()


def collect_counts(blocks: Iterable[BlockRow]) -> dict[str, TopicCounts]:
    """The counts of each topic in summed blocks."""
    found: dict[str, TopicCounts] = {}
    cells = 0
    for topic, window, counter, block, records, sizes in blocks:
        of_topic = found.setdefault(topic, TopicCounts({}, *2 * [KeySample.empty(BUCKET_BITS)]))
        part = _unpack(counter, bytes(records), bytes(sizes))
        if isinstance(part, KeySample):
            if counter == EARLY:
                found[topic] = of_topic._replace(early=part)
            else:
                found[topic] = of_topic._replace(sample=of_topic.sample.plus(part))
            continue
        cells += len(part.records)
        if cells > MAX_CELLS:
            expected = "fewer windows, topics, schemes or partitions at a time: their product is too large to report"
            raise InvalidValue("cells to report", f"more than {MAX_CELLS}", expected)
        windows = of_topic.counters.setdefault(counter, {})
        start = block * BLOCK_CELLS
        counts = windows.get(window, CellCounts(part.records[:0], part.bytes[:0])).padded(start + len(part.records))
        for to, more in zip(counts, part, strict=True):
            to[start : start + len(more)] += more
        windows[window] = counts
    return found
