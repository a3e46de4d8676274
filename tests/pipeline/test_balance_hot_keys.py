"""Hot keys are counted exactly, the number of keys is estimated, and keys are sampled."""

from typing import Any

import numpy as np
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 as everybody calls it

from shardyard.pipeline.balance import hot_keys
from shardyard.pipeline.balance.count_blocks import CellCounts, collect_counts
from shardyard.pipeline.balance.counting import BUCKET_BITS, BUCKETS, THINNED, THINNED_BITS, Counting, key_hash
from shardyard.pipeline.balance.hot_keys import KEYS, KeySelection, as_loads, count_keys, distinct_keys, hottest_keys
from shardyard.pipeline.balance.loads import LOADS

ALL = KeySelection((), 1, 0, 0)


def frame(spark: SparkSession, rows: list[tuple[Any, ...]]) -> DataFrame:
    return spark.createDataFrame(rows, LOADS)


def rows_of(keys: DataFrame) -> list[tuple[Any, ...]]:
    assert keys.schema.simpleString() == KEYS.simpleString()
    return sorted(
        (r["topic"], bytes(r["key"]), r["records"], r["bytes"], r["partition"], r["sampled"]) for r in keys.collect()
    )


@pytest.mark.parametrize("keys", [0, 1, 1000, 500_000, 3_000_000])
def test_few_keys_are_estimated_from_the_empty_buckets(keys: int) -> None:
    cells = 2**BUCKET_BITS
    buckets = np.bincount(np.random.default_rng(1).integers(0, cells, keys), minlength=cells)
    assert distinct_keys(buckets, np.zeros(0, np.int64)) == pytest.approx(keys, rel=0.01, abs=0.01)


def test_many_keys_are_estimated_from_the_thinned_buckets() -> None:
    full = np.ones(2**BUCKET_BITS, np.int64)
    cells = 2**THINNED_BITS
    thinned = np.bincount(np.random.default_rng(1).integers(0, cells, 100_000), minlength=cells)
    assert distinct_keys(full, thinned) == pytest.approx(1024 * 100_000, rel=0.02)
    assert distinct_keys(full, np.ones(cells, np.int64)) > 7e8  # too many to estimate: at least this many


def test_few_keys_are_all_selected() -> None:
    buckets = np.zeros(2**BUCKET_BITS, np.int64)
    buckets[7] = 5
    assert KeySelection.of(CellCounts(buckets, buckets), np.zeros(0, np.int64)) == ALL


def test_of_many_keys_those_of_the_heaviest_buckets_are_selected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hot_keys, "SAMPLE_KEYS", 1000)
    monkeypatch.setattr(hot_keys, "HEAVY_BUCKETS", 2)
    records, sizes = np.zeros(2**BUCKET_BITS, np.int64), np.zeros(2**BUCKET_BITS, np.int64)
    records[:3500] = 1
    records[[10, 20, 30]] = 50, 40, 30
    sizes[[20, 40, 50]] = 9, 8, 7
    assert KeySelection.of(CellCounts(records, sizes), np.zeros(0, np.int64)) == KeySelection((10, 20, 40), 4, 30, 7)


def test_keys_are_counted_exactly_with_their_partition_if_they_have_only_one(spark: SparkSession) -> None:
    rows = [
        ("a", 1, b"one partition", 10, None),
        ("a", 1, b"one partition", 5, None),
        ("a", 1, b"two partitions", 1, None),
        ("a", 2, b"two partitions", 1, None),
        ("a", 1, b"not always known", None, None),
        ("a", None, b"not always known", None, None),
        ("a", 1, None, 99, None),
        ("b", None, b"one partition", 7, None),
        ("c", 0, b"not selected", 7, None),
    ]
    assert rows_of(count_keys(frame(spark, rows), {"a": ALL, "b": ALL})) == [
        ("a", b"not always known", 2, 0, None, 1),
        ("a", b"one partition", 2, 15, 1, 1),
        ("a", b"two partitions", 2, 2, None, 1),
        ("b", b"one partition", 1, 7, None, 1),
    ]


def test_only_the_keys_of_the_buckets_and_of_the_sample_are_counted(spark: SparkSession) -> None:
    loads = frame(spark, [("a", 0, b"user-%d" % (i % 2000), 1, None) for i in range(6000)])
    hashes = {bytes(r["key"]): r["h"] for r in loads.select("key", key_hash().alias("h")).distinct().collect()}
    bucket = hashes[b"user-7"] % 2**BUCKET_BITS
    sampled = {key for key, h in hashes.items() if (h % 2**64 >> BUCKET_BITS) % 10 == 0}
    found = rows_of(count_keys(loads, {"a": KeySelection((bucket,), 10, 0, 0)}))
    heavy = {key for key, h in hashes.items() if h % 2**BUCKET_BITS == bucket}
    assert {row[1] for row in found} == sampled | heavy
    assert {row[1] for row in found if row[5]} == sampled
    assert {row[2] for row in found} == {3}
    assert 150 < len(sampled) < 250


def test_the_hottest_are_those_with_the_most_records_and_those_with_the_most_bytes(spark: SparkSession) -> None:
    rows = [
        ("a", b"many", 9, 9, 0, 1),
        ("a", b"large", 1, 900, 0, 1),
        ("a", b"neither", 8, 8, 0, 1),
        ("b", b"x", 2, 0, 0, 1),
        ("b", b"w", 2, 0, 0, 1),
    ]
    assert [row[:2] for row in rows_of(hottest_keys(spark.createDataFrame(rows, KEYS), 1))] == [
        ("a", b"large"),
        ("a", b"many"),
        ("b", b"w"),
    ]


def test_the_sampled_keys_are_loads_of_one_record_each(spark: SparkSession) -> None:
    rows = [("a", b"k", 9, 90, 3, 1), ("a", b"l", 8, 80, None, 1), ("a", b"m", 7, 70, 1, 0)]
    found = as_loads(spark.createDataFrame(rows, KEYS))
    assert found.schema.simpleString() == LOADS.simpleString()
    assert sorted((bytes(r["key"]), r["partition"], r["bytes"]) for r in found.collect()) == [
        (b"k", 3, None),
        (b"l", None, None),
    ]


def test_a_hot_key_among_many_is_found_while_few_keys_are_counted(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hot_keys, "SAMPLE_KEYS", 500)
    monkeypatch.setattr(hot_keys, "HEAVY_BUCKETS", 20)
    cold = spark.range(20_000).select(F.concat(F.lit("user-"), "id").cast("binary").alias("key"))
    hot = spark.range(50).select(F.lit("hot").cast("binary").alias("key"))
    null = F.lit(None)
    loads = cold.union(hot).select(
        F.lit("a").alias("topic"), null.cast("int").alias("partition"), "key", null.cast("long").alias("bytes")
    )
    counters = collect_counts(Counting(()).counts(loads))["a"]
    selection = KeySelection.of(counters[BUCKETS][None], counters[THINNED][None].records)
    keys = count_keys(loads, {"a": selection})
    assert selection.one_in == pytest.approx(40, abs=2)
    assert selection.others_records < 50
    assert keys.count() < 1000
    assert [row[1:3] for row in rows_of(hottest_keys(keys, 1))] == [(b"hot", 50)]
