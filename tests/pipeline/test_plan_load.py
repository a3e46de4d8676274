"""A load measured with Spark."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from shardyard.model import InvalidValue
from shardyard.pipeline.plan.load import load_of, partition_totals, sample_keys
from shardyard.pipeline.plan.report import make_plan

SCHEMA = "topic string, partition int, key binary, bytes long, timestamp timestamp"
NOON = datetime(2026, 11, 15, 12, tzinfo=UTC)
Row = tuple[str, int | None, bytes | None, int, datetime | None]
ROWS: list[Row] = [
    ("orders", 0, b"a", 10, NOON),
    ("orders", 0, b"a", 20, NOON + timedelta(seconds=1)),
    ("orders", 2, b"b", 30, NOON + timedelta(seconds=2)),
    ("orders", 2, None, 40, NOON + timedelta(seconds=2)),
]


def frame(spark: SparkSession, rows: list[Row]) -> DataFrame:
    return spark.createDataFrame(rows, SCHEMA)


def test_totals_are_counted_per_partition_and_for_all_partitions(spark: SparkSession) -> None:
    rows = frame(spark, ROWS).transform(partition_totals).orderBy("everything", "partition").collect()
    assert [tuple(row) for row in rows] == [
        (False, 0, 2, 30, 30, 1, "orders", "orders", 1.0),
        (False, 2, 2, 70, 30, 1, "orders", "orders", 0.0),
        (True, None, 4, 100, 60, 2, "orders", "orders", 2.0),
    ]


def test_a_key_is_in_the_sample_with_all_of_its_bytes_or_not_at_all(spark: SparkSession) -> None:
    rows: list[Row] = [("t", i % 3, b"k%d" % (i % 1000), 1 + i % 1000, None) for i in range(3000)]
    found = {bytes(r["key"]): r["bytes"] for r in frame(spark, rows).transform(sample_keys, 10).collect()}
    assert 60 < len(found) < 140
    assert all(size == 3 * (1 + int(key[1:])) for key, size in found.items())
    assert list(found) == sorted(found)


def test_a_sample_of_one_in_one_has_every_key(spark: SparkSession) -> None:
    found = frame(spark, ROWS).transform(sample_keys, 1).collect()
    assert [(bytes(r["key"]), r["bytes"]) for r in found] == [(b"a", 30), (b"b", 30)]


def test_a_load_has_records_bytes_rate_and_keys(spark: SparkSession) -> None:
    load = load_of(frame(spark, ROWS), sample=100)
    assert (load.records, load.bytes, load.records_per_second) == (4, 100, 2.0)
    assert (load.partition_records, load.partition_bytes) == ((2, 0, 2), (30, 0, 70))
    assert load.keys is not None
    assert load.keys.keys.to_pylist() == [b"a", b"b"]
    assert load.keys.bytes.tolist() == [30, 30]
    report = make_plan(load, partitions=[3], members=[1], assignors=["sticky"])
    assert report.partition_counts[0].bytes_max == 70


def test_the_largest_key_is_known_if_all_keys_are_in_the_sample(spark: SparkSession) -> None:
    loads = frame(spark, [("t", 0, b"hot", 900, None), ("t", 1, b"a", 50, None), ("t", 1, b"b", 50, None)])
    assert load_of(loads, 10).largest_key == ("hot", 0.9)
    assert load_of(loads, 1).largest_key is None


def test_the_sample_is_scaled_to_all_bytes_with_a_key(spark: SparkSession) -> None:
    rows: list[Row] = [("t", 0, b"key-%d" % i, 7, None) for i in range(5000)] + [("t", 0, None, 1000, None)]
    load = load_of(frame(spark, rows), sample=500)
    assert load.keys is not None
    assert 350 < len(load.keys.keys) < 650
    assert load.keys.bytes.sum() == pytest.approx(35_000)
    assert load.bytes == 36_000


def test_partitions_at_the_end_may_be_empty(spark: SparkSession) -> None:
    assert load_of(frame(spark, ROWS), 100, partitions=5).partition_bytes == (30, 0, 70, 0, 0)
    with pytest.raises(InvalidValue, match="partitions is 2: expected at least 3: there are records in partition 2"):
        load_of(frame(spark, ROWS), 100, partitions=2)


def test_without_partitions_timestamps_and_keys_only_totals_are_known(spark: SparkSession) -> None:
    load = load_of(frame(spark, [("t", None, None, 5, None), ("t", None, None, 6, None)]), 100)
    assert (load.records, load.bytes, load.partition_bytes) == (2, 11, ())
    assert (load.records_per_second, load.keys) == (None, None)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "records is 0: expected at least one"),
        ([*ROWS, ("bills", 0, b"a", 1, None)], "topics is 'bills, orders': expected one: filter the loads"),
        ([*ROWS, ("orders", None, b"a", 1, None)], "partition is missing: expected known for all records, or for none"),
        ([("orders", -1, b"a", 1, None)], "partition is -1: expected from 0 to 99999"),
    ],
)
def test_loads_of_more_or_less_than_one_topic_are_refused(spark: SparkSession, rows: list[Any], message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        load_of(frame(spark, rows), 100)


def test_an_invalid_call_is_refused_before_a_job_starts(spark: SparkSession) -> None:
    with pytest.raises(InvalidValue, match="partitions is 0: expected a whole number of at least 1"):
        load_of(frame(spark, ROWS), 100, partitions=0)
    with pytest.raises(InvalidValue, match="sample is 0: expected a whole number of at least 1"):
        load_of(frame(spark, ROWS), 0)
    with pytest.raises(InvalidValue, match="sample is 500001: expected at most 500000 keys"):
        load_of(frame(spark, ROWS), 500_001)
    with pytest.raises(
        InvalidValue, match="columns is 'topic, partition, key, timestamp': expected 'bytes' among them"
    ):
        load_of(frame(spark, ROWS).drop("bytes"), 100)
