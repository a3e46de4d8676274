"""Counts records and bytes in one pass: per partition of every scheme, per bucket of key hashes, and per sampled key.

`LoadCounter.java` does it inside Spark's JVM, and the rest of this module by Arrow functions, for Spark Connect. Both
give the same counts.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 as everybody calls it

from shardyard.model import InvalidValue
from shardyard.pipeline.balance import count_blocks, key_sample
from shardyard.pipeline.balance.count_blocks import (
    BLOCKS,
    BUCKET_BITS,
    SAMPLE,
    Block,
    BlockRow,
    CellCounts,
    Counts,
    blocks_of,
    rows_of,
    sum_blocks,
    to_arrow,
)
from shardyard.pipeline.balance.key_sample import UNKNOWN, KeySample
from shardyard.pipeline.balance.loads import TABLE
from shardyard.pipeline.balance.scheme import MAX_PARTITIONS, Scheme
from shardyard.pipeline.jvm.functions import call, constant_columns, count_table, has_functions
from shardyard.placement import hash_named

ACTUAL, TOTAL, BUCKETS = -1, -2, -3
"""Counters besides those of the schemes, which are numbered from 0.

`ACTUAL` counts records by the partition they are in; `TOTAL` those without a key (cell 0) and with one (cell 1);
`BUCKETS` those with a key by its hash, in all windows together, and only if the sample does not have all keys.
"""
FLUSH_CELLS = 2**24
"""Cells of 16 bytes each that a task of Arrow functions holds before it sends them."""


def key_hash() -> Column:
    """The hash for buckets and samples: Spark's xxHash64 with seed 42, which is independent of the schemes' hashes."""
    return F.xxhash64("key")


@dataclass(frozen=True, slots=True)
class Counting:
    """What one pass over the data counts."""

    schemes: tuple[Scheme, ...]
    window_us: int | None = None
    """The length of a window in microseconds; None for no windows."""

    def counts(self, loads: DataFrame) -> Iterable[BlockRow]:
        """The counts of all loads, as rows of `BLOCKS` in which every cell occurs once."""
        return self.in_jvm(loads) if has_functions(loads.sparkSession) else self.by_arrow(loads)

    def in_jvm(self, loads: DataFrame) -> Iterable[BlockRow]:
        """The counts, without handing any row to Python."""
        constants = constant_columns(loads)
        known = [name for name in ("bytes", "partition") if constants.get(name, "") is not None]
        columns = {name: F.col(name) for name in ("key", *known)}
        if self.window_us is not None:
            columns["at"] = F.unix_micros("timestamp")
        function = self._function(columns)
        if "topic" in constants:
            topic = str(constants["topic"])
            return ((topic, *block) for block in count_table(loads.select(*columns.values()), function))
        grouped = loads.groupBy("topic").agg(call(function, *columns.values()).alias("blocks"))
        return rows_of(grouped.select("topic", F.inline("blocks")).select(*BLOCKS.names))

    def _function(self, columns: Iterable[str]) -> str:
        """The name of the function that counts, which says what to count."""
        schemes = [f"{s.hash}:{s.partitioner}:{s.partitions}:{hash_named(s.hash).modulus_mask}" for s in self.schemes]
        rules = {
            "columns": ",".join(columns),
            "window": self.window_us or 0,
            "bucket_bits": BUCKET_BITS,
            "sample_keys": key_sample.SAMPLE_KEYS,
            "sample_bytes": key_sample.SAMPLE_BYTES,
            "block_cells": count_blocks.BLOCK_CELLS,
            "max_cells": count_blocks.MAX_CELLS,
            "max_partitions": MAX_PARTITIONS,
            "schemes": ",".join(schemes),
        }
        return "count_loads " + " ".join(f"{name}={value}" for name, value in rules.items())

    def by_arrow(self, loads: DataFrame) -> Iterable[BlockRow]:
        """The same counts by Arrow functions."""
        # A constant topic becomes a constant null: Spark hands that to Python at no cost.
        topic = F.nullif(F.col("topic"), F.lit(TABLE)).alias("topic")
        columns = [topic, *(F.col(name) for name in ("partition", "key", "bytes")), key_hash().alias("hash")]
        if self.window_us is not None:
            columns.append(F.unix_micros("timestamp").alias("at"))
        return rows_of(loads.select(*columns).mapInArrow(self._task(), BLOCKS).transform(sum_blocks))

    def _task(self) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
        def count(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            counters = _Counters(self)
            keyless = 0
            for batch in batches:
                for part in self._parts(batch):
                    counters.count(part, keyless)
                    keyless += part["key"].null_count
                    if counters.cells > FLUSH_CELLS:
                        yield from to_arrow(counters.blocks())
                        counters = _Counters(self)
            yield from to_arrow(counters.blocks())

        return count

    def _parts(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """The batch in slices that do not need too many cells, even if each row is in a window of its own."""
        rows = len(batch)
        if self.window_us is not None:
            rows = max(1, FLUSH_CELLS // max(1, sum(scheme.partitions for scheme in self.schemes)))
        return (batch.slice(at, rows) for at in range(0, len(batch), rows))


class CountTable:
    """Records and bytes per group and cell, in two tables that grow as needed. A group is a topic and a window."""

    def __init__(self, cells: int = 0) -> None:
        self.records: Counts = np.zeros((0, cells), np.int64)
        self.bytes: Counts = np.zeros((0, cells), np.int64)

    def add(self, groups: Counts, cells: npt.NDArray[Any], sizes: Counts | None) -> None:
        if not len(cells):
            return
        self._grow(int(groups.max()) + 1, int(cells.max()) + 1)
        at = groups * self.records.shape[1] + cells
        np.add.at(self.records.reshape(-1), at, 1)
        if sizes is not None:
            np.add.at(self.bytes.reshape(-1), at, sizes)

    def _grow(self, groups: int, cells: int) -> None:
        rows, columns = self.records.shape
        if groups > rows or cells > columns:
            new_rows = groups + groups // 2 if groups > rows else rows
            padding = ((0, new_rows - rows), (0, max(0, cells - columns)))
            self.records, self.bytes = np.pad(self.records, padding), np.pad(self.bytes, padding)


class _Counters:
    """What a task has counted since it last sent its counts."""

    def __init__(self, counting: Counting) -> None:
        self._counting = counting
        self._topics: dict[tuple[str, int | None], int] = {}
        self._groups: dict[tuple[str, int | None], int] = {}
        self._tables = {i: CountTable(scheme.partitions) for i, scheme in enumerate(counting.schemes)}
        self._tables |= {ACTUAL: CountTable(), TOTAL: CountTable(2), BUCKETS: CountTable(2**BUCKET_BITS)}
        self._samples: dict[str, TaskSample] = {}

    @property
    def cells(self) -> int:
        return sum(table.records.size for table in self._tables.values())

    def count(self, batch: pa.RecordBatch, keyless: int) -> None:
        """Count a batch. Records without a key go round-robin, as a producer sends them, after `keyless` others."""
        names, topics = _topics(batch["topic"])
        groups = _group_numbers(topics, names, [None], self._topics)
        if self._counting.window_us is not None:
            numbers, windows = _windows(batch["at"], self._counting.window_us)
            groups = _group_numbers(topics * len(windows) + numbers, names, windows, self._groups)
        keys = batch["key"]
        keyed = pc.is_valid(keys).to_numpy(zero_copy_only=False)
        sizes = None
        if batch["bytes"].null_count < len(batch):
            sizes = pc.fill_null(batch["bytes"], 0).to_numpy()
        self._tables[TOTAL].add(groups, keyed.astype(np.int64), sizes)

        schemes = self._counting.schemes
        hashes = {name: hash_named(name).array(keys) for name in {scheme.hash for scheme in schemes}}
        for i, scheme in enumerate(schemes):
            partitions = scheme.place(hashes[scheme.hash])
            if keys.null_count:
                turns = keyless + np.cumsum(~keyed) - 1
                partitions = np.where(keyed, partitions, turns % scheme.partitions)
            self._tables[i].add(groups, partitions, sizes)
        self._count_actual(batch["partition"], groups, sizes)
        self._count_keys(batch.filter(pc.is_valid(keys)) if keys.null_count else batch)

    def _count_actual(self, partition: pa.Array, groups: Counts, sizes: Counts | None) -> None:
        if partition.null_count == len(partition):
            return
        known = np.flatnonzero(pc.is_valid(partition).to_numpy(zero_copy_only=False))
        partitions = pc.fill_null(partition, 0).to_numpy().astype(np.int64)[known]
        for extreme in (int(partitions.min()), int(partitions.max())):
            if not 0 <= extreme < MAX_PARTITIONS:
                raise InvalidValue("partition", extreme, f"a number from 0 to {MAX_PARTITIONS - 1}")
        self._tables[ACTUAL].add(groups[known], partitions, None if sizes is None else sizes[known])

    def _count_keys(self, batch: pa.RecordBatch) -> None:
        """Count keys in buckets, and those of the sample."""
        if not len(batch):
            return
        names, topics = _topics(batch["topic"])
        hashes = batch["hash"].to_numpy()
        sizes = pc.fill_null(batch["bytes"], 0).to_numpy()
        groups = _group_numbers(topics, names, [None], self._topics)
        self._tables[BUCKETS].add(groups, hashes & (2**BUCKET_BITS - 1), sizes)
        partitions = pc.fill_null(batch["partition"], UNKNOWN).to_numpy().astype(np.int32)
        for number, name in enumerate(names):
            sample = self._samples.setdefault(name, TaskSample())
            at = np.flatnonzero((topics == number) & sample.found.is_sampled(hashes))
            sample.add(hashes[at], sizes[at], partitions[at], batch["key"].take(pa.array(at)))

    def blocks(self) -> Iterator[Block]:
        windowed = self._topics if self._counting.window_us is None else self._groups
        for counter, table in self._tables.items():
            groups = self._topics if counter == BUCKETS else windowed
            for (topic, window), group in groups.items():
                if group < len(table.records):
                    yield from blocks_of(topic, window, counter, CellCounts(table.records[group], table.bytes[group]))
        for topic, sample in self._samples.items():
            yield Block(topic, None, SAMPLE, 0, sample.all())


class TaskSample:
    """The sample of a topic in a task. Records are added to it some time after they were counted, many at once."""

    def __init__(self) -> None:
        self.found = KeySample.empty(BUCKET_BITS)
        self._added: list[KeySample] = []

    def add(self, hashes: Counts, sizes: Counts, partitions: npt.NDArray[np.int32], keys: pa.Array) -> None:
        one = np.ones(len(hashes), np.int64)
        self._added.append(KeySample(self.found.level, BUCKET_BITS, hashes, one, sizes, partitions, keys))
        if sum(len(part) for part in self._added) > key_sample.SAMPLE_KEYS:
            self.all()

    def all(self) -> KeySample:
        """The sample with all records that were added."""
        for part in self._added:
            self.found = self.found.plus(part)
        self._added = []
        return self.found


def _topics(column: pa.Array) -> tuple[list[str], Counts]:
    """The distinct topics, and for each row the index of its topic."""
    if column.null_count == len(column):
        return [TABLE], np.zeros(len(column), np.int64)
    encoded = pc.fill_null(column, TABLE).dictionary_encode()
    return encoded.dictionary.to_pylist(), encoded.indices.to_numpy().astype(np.int64)


def _group_numbers(
    rows: Counts, topics: Sequence[str], windows: Sequence[int | None], known: dict[tuple[str, int | None], int]
) -> Counts:
    """For each row the number of its group, which is a topic and a window. New groups are added to `known`.

    `rows` says which group a row belongs to: index of the topic times the number of windows, plus index of the window.
    """
    pairs = len(topics) * len(windows)
    numbers = np.zeros(pairs, np.int64)
    for pair in np.flatnonzero(np.bincount(rows, minlength=pairs)).tolist():
        group = (topics[pair // len(windows)], windows[pair % len(windows)])
        numbers[pair] = known.setdefault(group, len(known))
    return numbers[rows]


def _windows(at: pa.Array, window_us: int) -> tuple[Counts, list[int | None]]:
    """For each row the index of its window, and the distinct windows: None is that of rows without a timestamp."""
    numbers = pc.fill_null(at, 0).to_numpy() // window_us
    if not at.null_count and numbers.min() == numbers.max():
        return np.zeros(len(at), np.int64), [int(numbers[0])]
    unique, inverse = np.unique(numbers, return_inverse=True)
    missing = pc.is_null(at).to_numpy(zero_copy_only=False)
    return np.where(missing, len(unique), inverse), [*unique.tolist(), None]
