"""Exact counts of the hottest keys in bounded memory, an estimate of the number of keys, and an unbiased sample.

The first pass (`counting`) counted records and bytes per bucket of key hashes. A hot key makes its bucket heavy, so the
second pass counts exactly the keys of the heaviest buckets, and those of the sample. It runs without Python.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812 as everybody calls it
from pyspark.sql.types import BinaryType, IntegerType, LongType, StringType, StructField, StructType

from shardyard.pipeline.balance.count_blocks import CellCounts, Counts
from shardyard.pipeline.balance.counting import BUCKET_BITS, THIN, THINNED_BITS, key_hash

HEAVY_BUCKETS = 512
"""How many buckets count as heavy by records, and how many by bytes."""
SAMPLE_KEYS = 1_000_000
"""Up to this number of distinct keys, all are counted."""
MAX_KEYS_PER_BUCKET = 5.0
"""With more keys per bucket, too few buckets are empty for an estimate."""

KEYS = StructType(
    [
        StructField("topic", StringType()),
        StructField("key", BinaryType()),
        StructField("records", LongType()),
        StructField("bytes", LongType()),
        StructField("partition", IntegerType()),
        StructField("sampled", IntegerType()),
    ]
)
"""One row for each key. The partition is null if it is unknown or not the same for all records; sampled is 1 or 0."""


def distinct_keys(buckets: Counts, thinned: Counts) -> float:
    """An estimate of the number of distinct keys by linear counting, from the number of empty buckets."""
    few = _linear_count(buckets, 2**BUCKET_BITS)
    if few is not None and few <= MAX_KEYS_PER_BUCKET * 2**BUCKET_BITS:
        return few
    many = _linear_count(thinned, 2**THINNED_BITS)
    return THIN * (many if many is not None else 2**THINNED_BITS * math.log(2**THINNED_BITS))


def _linear_count(counts: Counts, cells: int) -> float | None:
    empty = cells - int(np.count_nonzero(counts))
    return cells * math.log(cells / empty) if empty else None


@dataclass(frozen=True, slots=True)
class KeySelection:
    """Which keys of a topic are counted exactly."""

    buckets: tuple[int, ...]
    one_in: int
    """One key in this many is sampled; 1 for all."""
    others_records: int
    """An upper bound of the records of any key outside of the buckets."""
    others_bytes: int
    """An upper bound of the bytes of any key outside of the buckets."""

    @classmethod
    def of(cls, buckets: CellCounts, thinned: Counts) -> "KeySelection":
        one_in = max(1, math.ceil(distinct_keys(buckets.records, thinned) / SAMPLE_KEYS))
        if one_in == 1:
            return cls((), 1, 0, 0)
        heavy = {
            int(bucket)
            for counts in buckets
            for bucket in np.argpartition(counts, -HEAVY_BUCKETS)[-HEAVY_BUCKETS:]
            if counts[bucket]
        }
        others = np.ones(len(buckets.records), bool)
        others[sorted(heavy)] = False
        records, sizes = (int(counts[others].max(initial=0)) for counts in buckets)
        return cls(tuple(sorted(heavy)), one_in, records, sizes)

    def is_heavy(self) -> Column:
        if self.one_in == 1:
            return F.lit(True)
        return key_hash().bitwiseAND(F.lit(2**BUCKET_BITS - 1)).isin(list(self.buckets))

    def is_sampled(self) -> Column:
        """Uses other bits of the hash than the buckets do, so that hot keys are not preferred."""
        return F.shiftrightunsigned(key_hash(), BUCKET_BITS) % self.one_in == 0


def count_keys(loads: DataFrame, selections: Mapping[str, KeySelection]) -> DataFrame:
    """The records and bytes of each selected key, by topic, as `KEYS`."""
    selected = sampled = F.lit(False)
    for topic, selection in sorted(selections.items()):
        of_topic = F.col("topic") == topic
        selected |= of_topic & (selection.is_heavy() | selection.is_sampled())
        sampled |= of_topic & selection.is_sampled()
    same = F.min("partition").eqNullSafe(F.max("partition")) & (F.count("partition") == F.count(F.lit(1)))
    return (
        loads.filter(F.col("key").isNotNull() & selected)
        .groupBy("topic", "key")
        .agg(
            F.count(F.lit(1)).alias("records"),
            F.coalesce(F.sum("bytes"), F.lit(0)).cast("long").alias("bytes"),
            F.when(same, F.min("partition")).alias("partition"),
        )
        .withColumn("sampled", sampled.cast("int"))
        .select(*(F.col(field.name).cast(field.dataType) for field in KEYS))
    )


def hottest_keys(keys: DataFrame, count: int) -> DataFrame:
    """For each topic in `KEYS`, the `count` keys with the most records and the `count` keys with the most bytes."""

    def top(column: str) -> DataFrame:
        rank = F.row_number().over(Window.partitionBy("topic").orderBy(F.desc(column), "key"))
        return keys.filter(F.col(column) > 0).withColumn("rank", rank).filter(F.col("rank") <= count).drop("rank")

    return top("records").union(top("bytes")).distinct().select(*KEYS.names)


def as_loads(keys: DataFrame) -> DataFrame:
    """The sampled keys as loads of one record each, so that counting records counts keys."""
    unknown = {"bytes": F.lit(None).cast("long"), "timestamp": F.lit(None).cast("timestamp")}
    return keys.filter("sampled = 1").withColumns(unknown).select("topic", "partition", "key", "bytes", "timestamp")
