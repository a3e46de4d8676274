"""Hot keys, exactly and in bounded memory; how many keys there are; and a fair sample of them.

The first pass counted records and bytes per bucket of key hashes (`tally`). Only the keys of the heaviest
buckets can be hot; the second pass, all of it inside Spark's engine, counts these exactly, and with them the sample.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812 as everybody calls it
from pyspark.sql.types import BinaryType, IntegerType, LongType, StringType, StructField, StructType

from shardyard.pipeline.balance.count_blocks import Counted, Counts
from shardyard.pipeline.balance.counting import BUCKET_BITS, THIN, THINNED_BITS, key_hash

HEAVY_BUCKETS = 512
"""By records, and as many by bytes."""
SAMPLE_KEYS = 1_000_000
"""Up to so many different keys are all counted."""
MOST_PER_CELL = 5.0
"""Keys to a bucket beyond which counting the empty ones tells too little."""

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
"""One row for each key. The partition is null if it is not known or not the same for all records; sampled is 1 or 0."""


def distinct_keys(buckets: Counts, thinned: Counts) -> float:
    """About how many different keys fell into the buckets, by linear counting: from how many are empty."""
    few = _linear_count(buckets, 2**BUCKET_BITS)
    if few is not None and few <= MOST_PER_CELL * 2**BUCKET_BITS:
        return few
    many = _linear_count(thinned, 2**THINNED_BITS)
    return THIN * (many if many is not None else 2**THINNED_BITS * math.log(2**THINNED_BITS))


def _linear_count(counts: Counts, cells: int) -> float | None:
    empty = cells - int(np.count_nonzero(counts))
    return cells * math.log(cells / empty) if empty else None


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which keys of a topic to count exactly."""

    buckets: tuple[int, ...]
    one_in: int
    """One key in so many is sampled; 1 for all."""
    left_records: int
    """No key outside of the buckets has more records ..."""
    left_bytes: int
    """... or bytes."""

    @classmethod
    def of(cls, buckets: Counted, thinned: Counts) -> "Wanted":
        one_in = max(1, math.ceil(distinct_keys(buckets.records, thinned) / SAMPLE_KEYS))
        if one_in == 1:
            return cls((), 1, 0, 0)
        heavy = {
            int(bucket)
            for counts in buckets
            for bucket in np.argpartition(counts, -HEAVY_BUCKETS)[-HEAVY_BUCKETS:]
            if counts[bucket]
        }
        left = np.ones(len(buckets.records), bool)
        left[sorted(heavy)] = False
        rest = [int(counts[left].max(initial=0)) for counts in buckets]
        return cls(tuple(sorted(heavy)), one_in, rest[0], rest[1])

    def heavy(self) -> Column:
        if self.one_in == 1:
            return F.lit(True)
        return key_hash().bitwiseAND(F.lit(2**BUCKET_BITS - 1)).isin(list(self.buckets))

    def sampled(self) -> Column:
        """By other bits of the hash than the bucket's, so that hot or not makes no difference."""
        return F.shiftrightunsigned(key_hash(), BUCKET_BITS) % self.one_in == 0


def counted_keys(loads: DataFrame, wanted: Mapping[str, Wanted]) -> DataFrame:
    """The wanted keys and what each has, as `KEYS`."""
    no = F.lit(False)
    chosen = sampled = no
    for topic, of in sorted(wanted.items()):
        here = F.col("topic") == topic
        chosen |= here & (of.heavy() | of.sampled())
        sampled |= here & of.sampled()
    one = F.min("partition").eqNullSafe(F.max("partition")) & (F.count("partition") == F.count(F.lit(1)))
    return (
        loads.filter(F.col("key").isNotNull() & chosen)
        .groupBy("topic", "key")
        .agg(
            F.count(F.lit(1)).alias("records"),
            F.coalesce(F.sum("bytes"), F.lit(0)).cast("long").alias("bytes"),
            F.when(one, F.min("partition")).alias("partition"),
        )
        .withColumn("sampled", sampled.cast("int"))
        .select(*(F.col(field.name).cast(field.dataType) for field in KEYS))
    )


def hottest(keys: DataFrame, count: int) -> DataFrame:
    """Of `KEYS`, for each topic, the `count` keys with the most records and those with the most bytes."""

    def first(column: str) -> DataFrame:
        rank = F.row_number().over(Window.partitionBy("topic").orderBy(F.desc(column), "key"))
        return keys.filter(F.col(column) > 0).withColumn("rank", rank).filter(F.col("rank") <= count).drop("rank")

    return first("records").union(first("bytes")).distinct().select(*KEYS.names)


def as_loads(keys: DataFrame) -> DataFrame:
    """The sampled keys as loads of one record each: counting these counts keys."""
    nothing = {"bytes": F.lit(None).cast("long"), "timestamp": F.lit(None).cast("timestamp")}
    return keys.filter("sampled = 1").withColumns(nothing).select("topic", "partition", "key", "bytes", "timestamp")
