"""The keys with the most records, and those with the most bytes, in bounded memory.

The first pass (`counting`) has the counts of all keys if these are few. Otherwise it has counted records and bytes per
bucket of key hashes, and the keys that came first. No other key has more than what is left of its bucket without these,
so if some of them have more than that, they are the hot ones. If not, a second pass counts the keys of the heaviest
buckets, since a hot key makes its bucket heavy. No other key has more than the heaviest of the other buckets. Either
way there is a bound, and only keys that reach it are reported.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 as everybody calls it
from pyspark.sql.types import BinaryType, IntegerType, LongType, StringType, StructField, StructType

from shardyard.pipeline.balance.count_blocks import BUCKET_BITS, CellCounts, TopicCounts
from shardyard.pipeline.balance.counting import BUCKETS, key_hash
from shardyard.pipeline.balance.key_sample import KeySample

HEAVY_BUCKETS = 200
"""How many buckets count as heavy by records, and how many by bytes; more, if more hot keys are asked for. Up to 400
together, Spark compiles the test into a switch."""

KEYS = StructType(
    [
        StructField("topic", StringType()),
        StructField("key", BinaryType()),
        StructField("records", LongType()),
        StructField("bytes", LongType()),
        StructField("partition", IntegerType()),
    ]
)
"""One row for each key. The partition is null if it is unknown or not the same for all records."""


class KeyLoad(NamedTuple):
    """A key with all of its records and bytes. The partition is None if it is unknown or not the same for all."""

    key: bytes
    records: int
    bytes: int
    partition: int | None


class Candidates(NamedTuple):
    """The keys of a topic among which the hot ones are."""

    keys: Sequence[KeyLoad]
    others_records: int
    """No other key has more records than this."""
    others_bytes: int
    """No other key has more bytes than this."""


def find_candidates(loads: DataFrame, counts: Mapping[str, TopicCounts], hot: int) -> dict[str, Candidates]:
    """The candidates for the `hot` hottest keys of each topic. Reads the loads again only if the counts do not tell."""
    found: dict[str, Candidates] = {}
    heavy: dict[str, HeavyBuckets] = {}
    for topic, of_topic in counts.items():
        if not of_topic.sample.level:
            found[topic] = Candidates(key_loads(of_topic.sample, hot + 1), 0, 0)
            continue
        buckets = of_topic.counters[BUCKETS][None]
        heaviest = HeavyBuckets.of(buckets, hot)
        early = early_candidates(of_topic.early, buckets, hot) if heaviest.buckets else None
        if early is None:
            heavy[topic] = heaviest
        else:
            found[topic] = early
    searched = {topic: heaviest for topic, heaviest in heavy.items() if heaviest.buckets}
    rows = count_keys(loads, searched).collect() if searched else []
    for topic, heaviest in heavy.items():
        keys = [KeyLoad(bytes(r["key"]), r["records"], r["bytes"], r["partition"]) for r in rows if r["topic"] == topic]
        found[topic] = Candidates(keys, heaviest.others_records, heaviest.others_bytes)
    return found


def early_candidates(early: KeySample, buckets: CellCounts, hot: int) -> Candidates | None:
    """The early keys, if more than `hot` of them have as many records as any other key can have, and as many bytes:
    the others in the same bucket have the rest of what the bucket has. None if not."""
    others = []
    for cells, of_keys in zip(buckets, (early.records, early.bytes), strict=True):
        rest = cells.copy()
        np.subtract.at(rest, early.hashes & (2**BUCKET_BITS - 1), of_keys)
        others.append(int(rest.max(initial=0)))
        if np.count_nonzero(of_keys >= others[-1]) <= hot:
            return None
    return Candidates(key_loads(early, hot + 1), *others)


@dataclass(frozen=True, slots=True)
class HeavyBuckets:
    """The buckets of a topic whose keys are counted exactly."""

    buckets: tuple[int, ...]
    others_records: int
    """No key outside of the buckets has more records than this."""
    others_bytes: int
    """No key outside of the buckets has more bytes than this."""

    @classmethod
    def of(cls, buckets: CellCounts, hot: int) -> Self:
        """The heaviest buckets, so many that the `hot` hottest keys are likely to be in them.

        There are none if no keys are asked for, or if all buckets are about equally heavy: then no key is hot.
        """
        count = min(max(HEAVY_BUCKETS, hot), len(buckets.records)) if hot else 0
        heavy = {
            int(bucket)
            for counts in buckets
            for bucket in np.argpartition(counts, -count or -1)[len(counts) - count :]
            if counts[bucket]
        }
        others = np.ones(len(buckets.records), bool)
        others[sorted(heavy)] = False
        bounds = [int(counts[others].max(initial=0)) for counts in buckets]
        highest = [int(counts.max(initial=0)) for counts in buckets]
        usual = [counts.sum() / len(counts) for counts in buckets]
        if all(high - rest <= bound for high, rest, bound in zip(highest, usual, bounds, strict=True)):
            return cls((), *highest)  # without its other keys, not even the heaviest bucket would reach the bound
        return cls(tuple(sorted(heavy)), *bounds)

    def has_key(self) -> Column:
        """Whether a key is in one of the buckets."""
        bucket = key_hash().bitwiseAND(F.lit(2**BUCKET_BITS - 1)).cast("int")
        return bucket.isin(list(self.buckets))

    def is_reached(self) -> Column:
        """Whether a key in `KEYS` has as many records or bytes as any other key may have."""
        by_bytes = (F.col("bytes") > 0) & (F.col("bytes") >= self.others_bytes)
        return (F.col("records") >= self.others_records) | by_bytes


def count_keys(loads: DataFrame, heavy: Mapping[str, HeavyBuckets]) -> DataFrame:
    """The keys of each topic's heavy buckets that reach the bound, with their records and bytes, as `KEYS`."""
    selected = reached = F.lit(False)
    for topic, buckets in sorted(heavy.items()):
        of_topic = F.col("topic") == topic
        selected |= of_topic & buckets.has_key()
        reached |= of_topic & buckets.is_reached()
    same = F.min("partition").eqNullSafe(F.max("partition")) & (F.count("partition") == F.count(F.lit(1)))
    return (
        loads.filter(F.col("key").isNotNull() & selected)
        .groupBy("topic", "key")
        .agg(
            F.count(F.lit(1)).alias("records"),
            F.coalesce(F.sum("bytes"), F.lit(0)).cast("long").alias("bytes"),
            F.when(same, F.min("partition")).alias("partition"),
        )
        .filter(reached)
        .select(*(F.col(field.name).cast(field.dataType) for field in KEYS))
    )


def key_loads(sample: KeySample, at_least: int) -> list[KeyLoad]:
    """The keys of a sample that are among its `at_least` hottest, by records or by bytes, and all that are as hot."""
    hot = np.zeros(len(sample), bool)
    for counts in (sample.records, sample.bytes):
        if at_least and len(counts):
            smallest = np.partition(counts, -min(at_least, len(counts)))[-min(at_least, len(counts))]
            hot |= counts >= max(int(smallest), 1)
    return [
        KeyLoad(sample.keys[i].as_py(), int(sample.records[i]), int(sample.bytes[i]), at if at >= 0 else None)
        for i in np.flatnonzero(hot).tolist()
        for at in [int(sample.partitions[i])]
    ]


def hottest(keys: Sequence[KeyLoad], unit: str, count: int, at_least: int) -> list[KeyLoad]:
    """Up to `count` keys with the most `records` or `bytes`, the most first, of those that have `at_least` as many."""
    reached = [key for key in keys if getattr(key, unit) >= max(at_least, 1)]
    return sorted(reached, key=lambda key: (-getattr(key, unit), key.key))[:count]
