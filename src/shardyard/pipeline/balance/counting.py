"""Counting records and bytes in one pass: per partition of every scheme, and per bucket of key hashes."""

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
from shardyard.pipeline.balance.count_blocks import BLOCKS, Block, Counted, Counts, blocks_of, summed, to_arrow
from shardyard.pipeline.balance.loads import TABLE
from shardyard.pipeline.balance.scheme import MOST_PARTITIONS, Scheme
from shardyard.placement import hash_named

ACTUAL, TOTAL, BUCKETS, THINNED = -1, -2, -3, -4
"""What is counted besides the schemes, which are numbered from 0: records where they are; those without a key (cell 0)
and with one (cell 1); those with a key by its hash, and again for one key in `THIN`, both over all windows."""
BY_TOPIC = (BUCKETS, THINNED)

BUCKET_BITS = 20
THIN = 1024
THINNED_BITS = 16
FLUSH_CELLS = 2**24
"""That a task holds at once, of 16 bytes each."""


def key_hash() -> Column:
    """The hash behind buckets and samples: Spark's xxHash64, of seed 42, so independent of every scheme's."""
    return F.xxhash64("key")


@dataclass(frozen=True, slots=True)
class Counting:
    """What one pass counts."""

    schemes: tuple[Scheme, ...]
    window_us: int | None = None
    """Microseconds; None for no windows."""
    buckets: bool = True

    def counts(self, loads: DataFrame) -> DataFrame:
        """The counts of all loads, as `BLOCKS` in which no cell comes twice."""
        # A constant name becomes a constant null here, which a million rows carry to Python at no cost.
        topic = F.nullif(F.col("topic"), F.lit(TABLE)).alias("topic")
        sent = [topic, *(F.col(name) for name in ("partition", "key", "bytes"))]
        if self.window_us is not None:
            sent.append(F.unix_micros("timestamp").alias("at"))
        if self.buckets:
            sent.append(key_hash().alias("hash"))
        return loads.select(*sent).mapInArrow(self._task(), BLOCKS).transform(summed)

    def _task(self) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
        def count(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            tallies = _Tallies(self)
            turn = 0
            for batch in batches:
                for part in self._parts(batch):
                    tallies.count(part, turn)
                    turn += len(part)
                    if tallies.cells > FLUSH_CELLS:
                        yield from to_arrow(tallies.blocks())
                        tallies = _Tallies(self)
            yield from to_arrow(tallies.blocks())

        return count

    def _parts(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """As many rows at once as may each be in a window of their own without taking too many cells."""
        most = len(batch)
        if self.window_us is not None:
            most = max(1, FLUSH_CELLS // max(1, sum(scheme.partitions for scheme in self.schemes)))
        return (batch.slice(at, most) for at in range(0, len(batch), most))


class Tally:
    """Records and bytes per group and cell: two tables that grow with both."""

    def __init__(self, cells: int = 0) -> None:
        self.records: Counts = np.zeros((0, cells), np.int64)
        self.bytes: Counts = np.zeros((0, cells), np.int64)

    def add(self, groups: Counts, cells: npt.NDArray[Any], sizes: Counts | None) -> None:
        if not len(cells):
            return
        self._hold(int(groups.max()) + 1, int(cells.max()) + 1)
        at = groups * self.records.shape[1] + cells
        np.add.at(self.records.reshape(-1), at, 1)
        if sizes is not None:
            np.add.at(self.bytes.reshape(-1), at, sizes)

    def _hold(self, groups: int, cells: int) -> None:
        rows, columns = self.records.shape
        if groups > rows or cells > columns:
            wanted = groups + groups // 2 if groups > rows else rows
            more = ((0, wanted - rows), (0, max(0, cells - columns)))
            self.records, self.bytes = np.pad(self.records, more), np.pad(self.bytes, more)


class _Tallies:
    """All that a task has counted since it last handed it over."""

    def __init__(self, counting: Counting) -> None:
        self._counting = counting
        self._topics: dict[tuple[str, int | None], int] = {}
        self._groups: dict[tuple[str, int | None], int] = {}
        self._tallies = {i: Tally(scheme.partitions) for i, scheme in enumerate(counting.schemes)}
        self._tallies |= {ACTUAL: Tally(), TOTAL: Tally(2)}
        if counting.buckets:
            self._tallies |= {BUCKETS: Tally(2**BUCKET_BITS), THINNED: Tally(2**THINNED_BITS)}

    @property
    def cells(self) -> int:
        return sum(tally.records.size for tally in self._tallies.values())

    def count(self, batch: pa.RecordBatch, turn: int) -> None:
        """`turn`: how many records came before; those without a key are dealt in turn, as a producer does."""
        names, local = _topics(batch["topic"])
        by_topic = groups = _numbered(local, names, [None], self._topics)
        if self._counting.window_us is not None:
            numbers, windows = _windows(batch["at"], self._counting.window_us)
            groups = _numbered(local * len(windows) + numbers, names, windows, self._groups)
        keys = batch["key"]
        keyed = pc.is_valid(keys).to_numpy(zero_copy_only=False)
        sizes = None
        if batch["bytes"].null_count < len(batch):
            sizes = pc.fill_null(batch["bytes"], 0).to_numpy()
        self._tallies[TOTAL].add(groups, keyed.astype(np.int64), sizes)

        schemes = self._counting.schemes
        hashes = {name: hash_named(name).array(keys) for name in {scheme.hash for scheme in schemes}}
        for i, scheme in enumerate(schemes):
            places = scheme.places(hashes[scheme.hash])
            if keys.null_count:
                places = np.where(keyed, places, (turn + np.arange(len(batch))) % scheme.partitions)
            self._tallies[i].add(groups, places, sizes)
        self._count_actual(batch["partition"], groups, sizes)
        if self._counting.buckets:
            at = np.flatnonzero(keyed) if keys.null_count else slice(None)
            self._count_buckets(batch["hash"].to_numpy()[at], by_topic[at], None if sizes is None else sizes[at])

    def _count_actual(self, partition: pa.Array, groups: Counts, sizes: Counts | None) -> None:
        if partition.null_count == len(partition):
            return
        known = np.flatnonzero(pc.is_valid(partition).to_numpy(zero_copy_only=False))
        places = pc.fill_null(partition, 0).to_numpy().astype(np.int64)[known]
        for worst in (int(places.min()), int(places.max())):
            if not 0 <= worst < MOST_PARTITIONS:
                raise InvalidValue("partition", worst, f"a number from 0 to {MOST_PARTITIONS - 1}")
        self._tallies[ACTUAL].add(groups[known], places, None if sizes is None else sizes[known])

    def _count_buckets(self, hashes: Counts, groups: Counts, sizes: Counts | None) -> None:
        self._tallies[BUCKETS].add(groups, hashes & (2**BUCKET_BITS - 1), sizes)
        rest = hashes >> BUCKET_BITS
        thin = np.flatnonzero((rest & (THIN - 1)) == 0)
        self._tallies[THINNED].add(groups[thin], (rest[thin] // THIN) & (2**THINNED_BITS - 1), None)

    def blocks(self) -> Iterator[Block]:
        windowed = self._topics if self._counting.window_us is None else self._groups
        for number, tally in self._tallies.items():
            groups = self._topics if number in BY_TOPIC else windowed
            for (topic, window), group in groups.items():
                if group < len(tally.records):
                    yield from blocks_of(topic, window, number, Counted(tally.records[group], tally.bytes[group]))


def _topics(column: pa.Array) -> tuple[list[str], Counts]:
    """The names, and the number of each row's."""
    if column.null_count == len(column):
        return [TABLE], np.zeros(len(column), np.int64)
    encoded = pc.fill_null(column, TABLE).dictionary_encode()
    return encoded.dictionary.to_pylist(), encoded.indices.to_numpy().astype(np.int64)


def _numbered(
    local: Counts, topics: Sequence[str], windows: Sequence[int | None], known: dict[tuple[str, int | None], int]
) -> Counts:
    """The number of each row's topic and window in `known`, which learns new ones.

    `local` is the topic times the number of windows, plus the window.
    """
    pairs = len(topics) * len(windows)
    numbers = np.zeros(pairs, np.int64)
    for pair in np.flatnonzero(np.bincount(local, minlength=pairs)).tolist():
        group = (topics[pair // len(windows)], windows[pair % len(windows)])
        numbers[pair] = known.setdefault(group, len(known))
    return numbers[local]


def _windows(at: pa.Array, window_us: int) -> tuple[Counts, list[int | None]]:
    """For each row a number, and which window each number stands for: None is that of rows without a timestamp."""
    numbers = pc.fill_null(at, 0).to_numpy() // window_us
    if not at.null_count and numbers.min() == numbers.max():
        return np.zeros(len(at), np.int64), [int(numbers[0])]
    unique, inverse = np.unique(numbers, return_inverse=True)
    missing = pc.is_null(at).to_numpy(zero_copy_only=False)
    return np.where(missing, len(unique), inverse), [*unique.tolist(), None]
