"""One pass counts for all schemes, in the JVM and by Arrow functions. Batches, tasks and blocks make no difference."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession

from shardyard.model import InvalidCall, InvalidValue
from shardyard.pipeline.balance import count_blocks, key_sample
from shardyard.pipeline.balance import counting as balance_counting
from shardyard.pipeline.balance.count_blocks import (
    Block,
    CellCounts,
    TopicCounts,
    blocks_of,
    collect_counts,
    rows_of,
    sum_blocks,
    to_arrow,
)
from shardyard.pipeline.balance.counting import ACTUAL, BUCKETS, TOTAL, Counting, CountTable
from shardyard.pipeline.balance.key_sample import SEVERAL, UNKNOWN
from shardyard.pipeline.balance.loads import LOADS, TABLE, loads_of_table
from shardyard.pipeline.balance.scheme import Scheme, every_scheme
from shardyard.pipeline.jvm.functions import has_functions
from shardyard.pipeline.spark_errors import translate_spark_errors
from shardyard.placement import HASHES, partitioner_named

HOUR_US = 3_600_000_000
START = datetime(2026, 1, 1, tzinfo=UTC)


def frame(spark: SparkSession, rows: list[tuple[Any, ...]]) -> DataFrame:
    return spark.createDataFrame(rows, LOADS)


def as_lists(found: dict[str, TopicCounts]) -> dict[str, Any]:
    """topic -> counter -> window -> (records, bytes), without buckets if all keys were counted.

    Partitions that are empty in a window are left out if there are none with records after them.
    """

    def lists(counter: int, counts: CellCounts) -> tuple[list[int], ...]:
        end = len(np.trim_zeros(counts.records, "b")) if counter == ACTUAL else None
        return tuple(cells[:end].tolist() for cells in counts)

    return {
        topic: {
            counter: {window: lists(counter, counts) for window, counts in windows.items()}
            for counter, windows in of_topic.counters.items()
            if counter != BUCKETS or of_topic.sample.level
        }
        for topic, of_topic in found.items()
    }


def sampled(counts: TopicCounts) -> tuple[int, dict[bytes, tuple[int, ...]]]:
    """The level of the sample, and key -> (hash, records, bytes, partition)."""
    found = counts.sample
    columns = (found.hashes, found.records, found.bytes, found.partitions)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return found.level, dict(zip(found.keys.to_pylist(), rows, strict=True))


@pytest.fixture(params=["jvm", "arrow"])
def count(request: pytest.FixtureRequest) -> Callable[[Counting, DataFrame], dict[str, TopicCounts]]:
    """Counts a frame, in the JVM or by Arrow functions."""

    def counted(counting: Counting, loads: DataFrame) -> dict[str, TopicCounts]:
        assert has_functions(loads.sparkSession)
        return collect_counts(counting.in_jvm(loads) if request.param == "jvm" else counting.by_arrow(loads))

    return counted


Count = Callable[[Counting, DataFrame], dict[str, TopicCounts]]


@pytest.mark.parametrize("scheme", every_scheme(["modulus", "jump"], list(HASHES), [1, 12, 257]), ids=lambda s: s.name)
def test_a_scheme_places_hashes_as_its_partitioner_places_keys(scheme: Scheme) -> None:
    keys = pa.array([f"user-{i}" for i in range(100)] + ["", "ключ"])
    reference = partitioner_named(scheme.partitioner, scheme.partitions, scheme.hash)
    assert scheme.place(HASHES[scheme.hash].array(keys)).tolist() == reference.place_array(keys).to_pylist()


def test_jump_is_left_out_for_hashes_that_it_cannot_use() -> None:
    names = [s.name for s in every_scheme(["modulus", "jump"], ["fnv1a32", "xxh64", "xxh64"], [12, 16])]
    both = ["fnv1a32 modulus 12", "fnv1a32 modulus 16", "xxh64 modulus 12", "xxh64 modulus 16"]
    assert names == [*both, "xxh64 jump 12", "xxh64 jump 16"]
    assert [s.name for s in every_scheme(["modulus", "jump"], None, [3])] == ["fnv1a32 modulus 3", "xxh64 jump 3"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((["jump"], ["murmur2"], [3]), "fnv1a64 or xxh64 for jump"),
        ((["round_robin"], None, [3]), "round_robin does not place by key"),
        ((["ring"], None, [3]), "partitioner is 'ring'"),
        ((["modulus"], ["md5"], [3]), "hash is 'md5'"),
        ((["modulus"], None, [0]), "partitions is 0"),
        ((["modulus"], None, [1_000_001]), "at most 1000000 to compare"),
    ],
)
def test_invalid_schemes_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        every_scheme(*arguments)


def test_a_table_grows_with_groups_and_cells() -> None:
    table = CountTable()
    table.add(np.array([0, 0, 0]), np.array([1, 1, 0]), np.array([5, 6, 7]))
    table.add(np.array([2, 0]), np.array([3, 1]), None)
    assert table.records[:3].tolist() == [[1, 3, 0, 0], [0, 0, 0, 0], [0, 0, 0, 1]]
    assert table.bytes[:3].tolist() == [[7, 11, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]


def test_records_and_bytes_are_counted_per_partition_of_each_scheme_and_of_the_topic(
    spark: SparkSession, count: Count
) -> None:
    rows = [("a", 1, b"k", 10, None), ("a", 1, b"l", 20, None), ("a", None, b"k", 5, None), ("b", 0, b"k", None, None)]
    schemes = tuple(every_scheme(["modulus", "jump"], list(HASHES), [3, 7]))
    counts = count(Counting(schemes), frame(spark, rows))
    found = as_lists(counts)
    for number, scheme in enumerate(schemes):
        partitioner = partitioner_named(scheme.partitioner, scheme.partitions, scheme.hash)
        records, sizes = [0] * scheme.partitions, [0] * scheme.partitions
        for key, size in ((b"k", 10), (b"l", 20), (b"k", 5)):
            records[partitioner.place(key)] += 1
            sizes[partitioner.place(key)] += size
        assert found["a"][number] == {None: (records, sizes)}
    assert found["a"][ACTUAL] == {None: ([0, 2], [0, 30])}
    assert found["a"][TOTAL] == {None: ([0, 3], [0, 35])}
    assert found["b"][ACTUAL] == {None: ([1], [0])}
    level, keys = sampled(counts["a"])
    assert (level, {key: row[1:] for key, row in keys.items()}) == (0, {b"k": (2, 15, SEVERAL), b"l": (1, 20, 1)})


def test_the_counts_of_many_tasks_are_added(spark: SparkSession, count: Count) -> None:
    rows = [("a", n % 5, b"key-%d" % (n % 100), n, None) for n in range(1000)]
    counting = Counting((Scheme("modulus", "fnv1a32", 3), Scheme("jump", "xxh64", 7)))
    one, many = (count(counting, frame(spark, rows).repartition(tasks)) for tasks in (1, 12))
    assert as_lists(many) == as_lists(one)
    assert sampled(many["a"]) == sampled(one["a"])


def test_records_without_a_key_go_round_robin_and_into_no_sample(spark: SparkSession, count: Count) -> None:
    rows = [("a", None, None, 1, None), ("a", None, b"k", 5, None)] * 12
    counting = Counting((Scheme("modulus", "fnv1a32", 3),))
    counts = count(counting, frame(spark, rows).coalesce(1))
    keyed = Scheme("modulus", "fnv1a32", 3).place(HASHES["fnv1a32"].array(pa.array([b"k"])))[0]
    expected = [4 + 12 * (i == keyed) for i in range(3)]
    assert as_lists(counts)["a"] == {
        0: {None: (expected, [4 + 60 * (i == keyed) for i in range(3)])},
        TOTAL: {None: ([12, 12], [12, 60])},
    }
    assert list(sampled(counts["a"])[1]) == [b"k"]


def test_each_window_is_counted_separately_and_so_are_records_without_a_timestamp(
    spark: SparkSession, count: Count
) -> None:
    at = [
        START,
        START + timedelta(minutes=59),
        START + timedelta(hours=1),
        None,
        datetime(1969, 12, 31, 23, tzinfo=UTC),
    ]
    rows = [("a", 0, b"k", 1, when) for when in at]
    counts = count(Counting((), window_us=HOUR_US), frame(spark, rows))
    first = int(START.timestamp()) // 3600
    expected = {first: ([2], [2]), first + 1: ([1], [1]), None: ([1], [1]), -1: ([1], [1])}
    assert as_lists(counts)["a"][ACTUAL] == expected
    assert [row[1:] for row in sampled(counts["a"])[1].values()] == [(5, 5, 0)]


def test_of_many_keys_an_unbiased_part_is_sampled_and_all_are_counted_in_buckets(
    spark: SparkSession, count: Count, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_sample, "SAMPLE_KEYS", 100)
    loads = loads_of_table(
        spark.range(3000).selectExpr("concat('user-', id % 1000) AS k", "1 AS n"), key="k", bytes="n"
    )
    counts = count(Counting(()), loads)[TABLE]
    hashes = {bytes(r["key"]): r["h"] for r in loads.select("key", balance_counting.key_hash().alias("h")).collect()}
    level, keys = sampled(counts)
    expected = {key: h for key, h in hashes.items() if not (h % 2**64 >> count_blocks.BUCKET_BITS) % 2**level}
    assert keys == {key: (h, 3, 3, UNKNOWN) for key, h in expected.items()}
    assert 30 < len(keys) <= 100
    records, sizes = counts.counters[BUCKETS][None]
    assert records.tolist() == sizes.tolist()
    buckets = np.bincount([h % 2**count_blocks.BUCKET_BITS for h in hashes.values()], minlength=len(records))
    assert records.tolist() == (3 * buckets).tolist()


def test_long_keys_make_the_sample_smaller(spark: SparkSession, count: Count, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_sample, "SAMPLE_BYTES", 2000)
    loads = loads_of_table(spark.range(200).selectExpr("lpad(id, 100, 'x') AS k"), key="k")
    level, keys = sampled(count(Counting(()), loads)[TABLE])
    assert level >= 4
    assert 0 < len(keys) <= 20


def test_the_jvm_and_arrow_functions_count_the_same(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_sample, "SAMPLE_KEYS", 200)
    columns = [
        "CASE WHEN id % 7 < 5 THEN 'a' ELSE 'b' END AS topic",
        "CAST(IF(id % 11 = 0, NULL, id % 5) AS INT) AS partition",
        "CAST(repeat(id * id % 1300, CAST(id % 13 AS INT)) AS BINARY) AS key",
        "IF(id % 3 = 0, NULL, id % 100) AS bytes",
        "timestamp_seconds(id * 31) AS timestamp",
    ]
    loads = spark.range(0, 4000, 1, 3).selectExpr(*columns)
    counting = Counting(every_scheme(["modulus", "jump"], list(HASHES), [1, 12, 257]), window_us=HOUR_US)
    assert has_functions(spark)
    in_jvm, by_arrow = collect_counts(counting.in_jvm(loads)), collect_counts(counting.by_arrow(loads))
    assert as_lists(in_jvm) == as_lists(by_arrow)
    assert {topic: sampled(counts) for topic, counts in in_jvm.items()} == {
        topic: sampled(counts) for topic, counts in by_arrow.items()
    }
    assert all(counts.sample.level for counts in in_jvm.values())


@pytest.mark.parametrize(
    "number", ["id", "CAST(pow(100000, id * 7919 % 120000 / 120000) AS INT)"], ids=["distinct", "skewed"]
)
def test_the_columns_of_a_file_are_counted_like_any_rows(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: str
) -> None:
    monkeypatch.setattr(key_sample, "SAMPLE_KEYS", 200)
    columns = [f"concat('user-', {number}) AS k", "CAST(id % 50 AS SMALLINT) AS n", "CAST(id % 7 AS TINYINT) AS p"]
    rows = spark.range(0, 120_000, 1, 2).selectExpr(*columns)
    rows.selectExpr("IF(k LIKE '%99', NULL, k) AS k", "n", "p").write.parquet(str(tmp_path / "table"))
    table = spark.read.parquet(str(tmp_path / "table"))
    loads = loads_of_table(table, key="k", bytes="n", partition="p")
    counting = Counting(every_scheme(["modulus", "jump"], ["fnv1a32", "xxh64"], [12, 256]))
    assert has_functions(spark)
    in_jvm, by_arrow = collect_counts(counting.in_jvm(loads)), collect_counts(counting.by_arrow(loads))
    assert as_lists(in_jvm) == as_lists(by_arrow)
    assert sampled(in_jvm[TABLE]) == sampled(by_arrow[TABLE])
    records = {row["k"].encode(): row["count"] for row in table.dropna().groupBy("k").count().collect()}
    early = in_jvm[TABLE].early
    found = dict(zip(early.keys.to_pylist(), early.records.tolist(), strict=True))
    assert found == {key: records[key] for key in found}
    hottest = sorted(records, key=lambda key: -records[key])[:100]
    assert number == "id" or found.keys() >= set(hottest)


def test_a_table_without_rows_has_no_topics(spark: SparkSession, count: Count) -> None:
    loads = loads_of_table(spark.range(0).selectExpr("CAST(id AS STRING) AS k"), key="k")
    assert count(Counting((Scheme("modulus", "xxh64", 5),)), loads) == {}


def test_more_topics_than_spark_aggregates_in_memory_are_counted_separately(spark: SparkSession) -> None:
    columns = ["concat('t', id % 150) AS topic", "CAST(id % 3 AS INT) AS partition", "CAST(id AS STRING) AS key"]
    rows = spark.range(450).selectExpr(*columns, "id AS bytes", "CAST(NULL AS TIMESTAMP) AS timestamp")
    loads = rows.withColumn("key", rows["key"].cast("binary"))
    assert has_functions(spark)
    counts = collect_counts(Counting((Scheme("modulus", "xxh64", 5),)).in_jvm(loads))
    assert sorted(counts) == sorted(f"t{i}" for i in range(150))
    for i in range(150):
        assert {key: row[2] for key, row in sampled(counts[f"t{i}"])[1].items()} == {
            str(n).encode(): n for n in (i, i + 150, i + 300)
        }
        assert as_lists(counts)[f"t{i}"][ACTUAL] == {None: ([0] * (i % 3) + [3], [0] * (i % 3) + [3 * i + 450])}


def test_the_counts_do_not_depend_on_when_and_in_which_blocks_a_task_sends_them(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [(f"t{i % 3}", i % 40, b"user-%d" % (i % 50), i, START + timedelta(minutes=i)) for i in range(500)]
    counting = Counting((Scheme("modulus", "xxh64", 40),), window_us=HOUR_US)
    task = counting._task()
    arrow = pa.Table.from_pydict(
        {
            "topic": [r[0] for r in rows],
            "partition": pa.array([r[1] for r in rows], pa.int32()),
            "key": pa.array([r[2] for r in rows], pa.binary()),
            "bytes": [r[3] for r in rows],
            "hash": [hash(r[2]) for r in rows],
            "at": [int(r[4].timestamp() * 1e6) for r in rows],
        }
    )
    expected = as_lists(collect_counts(counting.by_arrow(frame(spark, rows))))
    monkeypatch.setattr(balance_counting, "FLUSH_CELLS", 100)
    monkeypatch.setattr(count_blocks, "BLOCK_CELLS", 16)
    monkeypatch.setattr(count_blocks, "BATCH_BYTES", 1000)
    parts = list(task(arrow.to_batches(max_chunksize=70)))
    assert len(parts) > 8
    pieces = spark.createDataFrame(pa.Table.from_batches(parts)).select(*count_blocks.BLOCKS.names)
    found = as_lists(collect_counts(rows_of(pieces)))
    assert {t: {n: w.keys() for n, w in of.items()} for t, of in found.items()} == {
        t: {n: w.keys() for n, w in of.items()} for t, of in expected.items()
    }
    for topic, counters in expected.items():
        for counter, windows in counters.items():
            for window, (records, sizes) in windows.items():
                rest = [0] * (
                    len(records) - len(found[topic][counter][window][0])
                )  # empty blocks at the end are left out
                assert [counts + rest for counts in found[topic][counter][window]] == [records, sizes]


def test_blocks_of_the_same_cells_are_added(spark: SparkSession) -> None:
    one = CellCounts(np.array([1, 2]), np.array([10, 20]))
    longer = CellCounts(np.array([1, 0, 5]), np.array([1, 0, 5]))
    parts = [Block("a", None, 0, 0, one), Block("a", 7, 0, 0, one), Block("a", None, 0, 0, longer)]
    batches = [batch for part in parts for batch in to_arrow([part])]
    found = spark.createDataFrame(pa.Table.from_batches(batches)).transform(sum_blocks)
    assert found.count() == 2
    assert as_lists(collect_counts(rows_of(found))) == {
        "a": {0: {None: ([2, 2, 5], [11, 20, 5]), 7: ([1, 2], [10, 20])}}
    }


def test_blocks_of_zeros_are_left_out() -> None:
    cells = np.zeros(3 * count_blocks.BLOCK_CELLS, np.int64)
    cells[-1] = 4
    (block,) = blocks_of("a", None, 5, CellCounts(cells, cells))
    assert (block.topic, block.counter, block.block, int(block.content.records.sum())) == ("a", 5, 2, 4)


def test_more_cells_than_the_driver_can_hold_are_refused(
    spark: SparkSession, count: Count, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(count_blocks, "MAX_CELLS", 5)
    counting = Counting((Scheme("modulus", "fnv1a32", 6),))
    with pytest.raises(InvalidCall, match="fewer windows, topics, schemes or partitions"), translate_spark_errors():
        count(counting, frame(spark, [("a", 0, b"k", 1, None)]))


def test_a_partition_that_cannot_be_is_refused(spark: SparkSession, count: Count) -> None:
    with (
        pytest.raises(InvalidCall, match=r"^partition is -1: expected a number from 0 to 999999$"),
        translate_spark_errors(),
    ):
        count(Counting(()), frame(spark, [("a", -1, b"k", 1, None)]))
