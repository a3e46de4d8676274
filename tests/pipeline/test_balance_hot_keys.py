"""Hot keys are counted exactly, and the list is complete down to the bound that it names."""

from collections import Counter
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 as everybody calls it

from shardyard.pipeline.balance import hot_keys, key_sample
from shardyard.pipeline.balance.count_blocks import BUCKET_BITS, CellCounts
from shardyard.pipeline.balance.counting import key_hash
from shardyard.pipeline.balance.hot_keys import (
    KEYS,
    HeavyBuckets,
    KeyLoad,
    count_keys,
    early_candidates,
    hottest,
    key_loads,
)
from shardyard.pipeline.balance.key_sample import SEVERAL, KeySample
from shardyard.pipeline.balance.loads import LOADS, loads_of_table
from shardyard.pipeline.balance.report import balance_report


def frame(spark: SparkSession, rows: list[tuple[Any, ...]]) -> DataFrame:
    return spark.createDataFrame(rows, LOADS)


def rows_of(keys: DataFrame) -> list[tuple[Any, ...]]:
    assert keys.schema.simpleString() == KEYS.simpleString()
    return sorted((r["topic"], bytes(r["key"]), r["records"], r["bytes"], r["partition"]) for r in keys.collect())


def buckets_of(loads: DataFrame) -> dict[bytes, int]:
    rows = loads.select("key", key_hash().alias("h")).distinct().collect()
    return {bytes(r["key"]): r["h"] % 2**BUCKET_BITS for r in rows if r["key"] is not None}


def test_the_heaviest_buckets_by_records_and_by_bytes_are_selected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hot_keys, "HEAVY_BUCKETS", 2)
    records, sizes = np.zeros(2**BUCKET_BITS, np.int64), np.zeros(2**BUCKET_BITS, np.int64)
    records[:3500] = 1
    records[[10, 20, 30]] = 50, 40, 30
    sizes[[20, 40, 50]] = 9, 8, 7
    assert HeavyBuckets.of(CellCounts(records, sizes), 1) == HeavyBuckets((10, 20, 40), 30, 7)
    assert HeavyBuckets.of(CellCounts(records, sizes), 0) == HeavyBuckets((), 50, 9)
    assert HeavyBuckets.of(CellCounts(records, sizes), 3) == HeavyBuckets((10, 20, 30, 40, 50), 1, 0)


def test_no_bucket_is_searched_if_all_are_about_equally_heavy() -> None:
    records = 150 + np.random.default_rng(1).integers(0, 50, 2**BUCKET_BITS)
    assert HeavyBuckets.of(CellCounts(records, 0 * records), 10) == HeavyBuckets((), 199, 0)
    records[7] = 400  # one of its keys may have as many records as the bound, 199
    assert 7 in HeavyBuckets.of(CellCounts(records, 0 * records), 10).buckets


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
    loads = frame(spark, rows)
    every = HeavyBuckets(tuple(sorted(set(buckets_of(loads).values()))), 0, 0)
    assert rows_of(count_keys(loads, {"a": every, "b": every})) == [
        ("a", b"not always known", 2, 0, None),
        ("a", b"one partition", 2, 15, 1),
        ("a", b"two partitions", 2, 2, None),
        ("b", b"one partition", 1, 7, None),
    ]


def test_only_keys_of_the_buckets_that_reach_the_bound_are_counted(spark: SparkSession) -> None:
    keys = [b"many"] * 5 + [b"large"] + [b"few"] * 2 + [b"elsewhere"] * 9
    loads = frame(spark, [("a", 0, key, 50 if key == b"large" else 1, None) for key in keys])
    buckets = buckets_of(loads)
    heavy = HeavyBuckets(tuple(buckets[key] for key in (b"many", b"large", b"few")), 3, 20)
    assert [row[1:4] for row in rows_of(count_keys(loads, {"a": heavy}))] == [(b"large", 1, 50), (b"many", 5, 5)]


def test_of_a_sample_the_keys_with_the_most_records_and_with_the_most_bytes_are_candidates() -> None:
    records, sizes = np.array([9, 1, 8, 1]), np.array([9, 900, 8, 0])
    keys = pa.array([b"many", b"large", b"neither", b"light"])
    partitions = np.array([0, SEVERAL, 2, 3], np.int32)
    sample = KeySample(0, BUCKET_BITS, np.arange(4), records, sizes, partitions, keys)
    assert key_loads(sample, 1) == [KeyLoad(b"many", 9, 9, 0), KeyLoad(b"large", 1, 900, None)]
    assert len(key_loads(sample, 9)) == 4
    assert key_loads(sample, 0) == key_loads(KeySample.empty(BUCKET_BITS), 5) == []


def test_the_hottest_are_in_order_and_reach_the_bound() -> None:
    keys = [KeyLoad(b"x", 2, 0, 0), KeyLoad(b"w", 2, 7, 0), KeyLoad(b"y", 3, 0, 0), KeyLoad(b"z", 1, 0, 0)]
    assert [key.key for key in hottest(keys, "records", 9, 2)] == [b"y", b"w", b"x"]
    assert [key.key for key in hottest(keys, "records", 1, 0)] == [b"y"]
    assert [key.key for key in hottest(keys, "bytes", 9, 0)] == [b"w"]


def test_early_keys_are_the_candidates_only_if_they_have_as_much_as_any_other_key_can_have() -> None:
    records, sizes = np.ones(2**BUCKET_BITS, np.int64), np.ones(2**BUCKET_BITS, np.int64)
    hashes = np.array([7, 7 + 2**BUCKET_BITS, 8])
    records[[7, 8]], sizes[[7, 8]] = (90, 50), (900, 500)
    of_keys = np.array([50, 30, 45]), np.array([500, 300, 450])
    early = KeySample(0, 0, hashes, *of_keys, np.zeros(3, np.int32), pa.array([b"x", b"y", b"z"]))
    # Bucket 7 has 10 records and 100 bytes of other keys, bucket 8 has 5 and 50.
    found = early_candidates(early, CellCounts(records, sizes), 2)
    assert found is not None
    assert (sorted(found.keys), found.others_records, found.others_bytes) == (
        [KeyLoad(b"x", 50, 500, 0), KeyLoad(b"y", 30, 300, 0), KeyLoad(b"z", 45, 450, 0)],
        10,
        100,
    )
    assert early_candidates(early, CellCounts(records, sizes), 3) is None
    sizes[9] = 301
    assert early_candidates(early, CellCounts(records, sizes), 2) is None
    assert early_candidates(early, CellCounts(records, sizes), 1) is not None


def test_keys_that_are_much_hotter_than_the_others_need_no_second_pass(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_sample, "SAMPLE_KEYS", 256)
    monkeypatch.setattr(hot_keys, "count_keys", None)
    key = "IF(id % 2 = 0, CAST(sqrt(id % 1000) AS INT), id)"
    rows = spark.range(0, 60_000, 1, 3).selectExpr(f"CAST({key} AS STRING) AS k", "id % 9 AS size")
    (topic,) = balance_report(loads_of_table(rows, key="k", bytes="size"), hot=4).topics
    assert not topic.key_check.exact
    totals = rows.groupBy("k").agg(F.count("k").alias("n"), F.sum("size").alias("b"))
    exact = {row["k"].encode(): (row["n"], row["b"]) for row in totals.collect()}
    for unit in range(2):
        hottest_keys = sorted(exact, key=lambda k: (-exact[k][unit], k))[:4]
        assert set(hottest_keys) <= {hot.key for hot in topic.hot_keys.keys}
    assert all(exact[hot.key] == (hot.records, hot.bytes) for hot in topic.hot_keys.keys)


@pytest.mark.parametrize("hot", [0, 1, 10, 500])
def test_of_flat_data_every_listed_key_has_as_many_records_as_any_that_is_not_listed(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch, hot: int
) -> None:
    monkeypatch.setattr(key_sample, "SAMPLE_KEYS", 256)
    monkeypatch.setattr(hot_keys, "HEAVY_BUCKETS", 40)
    random = np.random.default_rng(5)
    numbers = np.concatenate([random.integers(0, 3000, 20_000), np.repeat(random.integers(0, 3000, 3), 30)])
    table = spark.createDataFrame(pa.table({"id": numbers, "size": random.integers(1, 9, len(numbers))}))
    (topic,) = balance_report(loads_of_table(table, key="id", bytes="size"), hot=hot).topics
    assert not topic.key_check.exact
    exact = Counter(numbers.tolist())
    listed = {int.from_bytes(key.key, "little"): key.records for key in topic.hot_keys.keys}
    assert all(exact[key] == records for key, records in listed.items())
    others = max(count for key, count in exact.items() if key not in listed)
    assert others <= topic.hot_keys.others_records
    by_records = sorted((count for key, count in exact.items() if count > topic.hot_keys.others_records), reverse=True)
    assert sorted(listed.values(), reverse=True)[: len(by_records)] == by_records
    assert (len(listed) > 0) == (hot > 0)
