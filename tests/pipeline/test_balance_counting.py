"""One pass counts for all schemes. The result does not depend on batches, tasks or blocks."""

from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession

from shardyard.model import InvalidValue
from shardyard.pipeline.balance import count_blocks
from shardyard.pipeline.balance import counting as balance_counting
from shardyard.pipeline.balance.count_blocks import Block, CellCounts, blocks_of, collect_counts, sum_blocks, to_arrow
from shardyard.pipeline.balance.counting import ACTUAL, BUCKETS, THINNED, TOTAL, Counting, CountTable
from shardyard.pipeline.balance.loads import LOADS
from shardyard.pipeline.balance.scheme import Scheme, every_scheme
from shardyard.placement import HASHES, partitioner_named

HOUR_US = 3_600_000_000
START = datetime(2026, 1, 1, tzinfo=UTC)


def frame(spark: SparkSession, rows: list[tuple[Any, ...]]) -> DataFrame:
    return spark.createDataFrame(rows, LOADS)


def as_lists(found: dict[str, Any]) -> dict[str, Any]:
    """topic -> counter -> window -> (records, bytes)"""
    return {
        topic: {
            counter: {window: tuple(c.tolist() for c in counts) for window, counts in windows.items()}
            for counter, windows in counters.items()
        }
        for topic, counters in found.items()
    }


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


def test_records_and_bytes_are_counted_per_partition_of_each_scheme_and_of_the_topic(spark: SparkSession) -> None:
    rows = [("a", 1, b"k", 10, None), ("a", 1, b"l", 20, None), ("a", None, b"k", 5, None), ("b", 0, b"k", None, None)]
    schemes = (Scheme("modulus", "fnv1a32", 3), Scheme("jump", "xxh64", 2))
    found = as_lists(collect_counts(Counting(schemes).counts(frame(spark, rows))))
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
    records, sizes = found["a"][BUCKETS][None]
    assert sorted(n for n in records if n) == [1, 2]
    assert sorted(n for n in sizes if n) == [15, 20]


def test_records_without_a_key_go_round_robin_and_into_no_bucket(spark: SparkSession) -> None:
    rows = [("a", None, None, 1, None)] * 12
    counting = Counting((Scheme("modulus", "fnv1a32", 3),))
    found = as_lists(collect_counts(counting.counts(frame(spark, rows).coalesce(1))))["a"]
    assert found == {0: {None: ([4, 4, 4], [4, 4, 4])}, TOTAL: {None: ([12, 0], [12, 0])}}


def test_each_window_is_counted_separately_and_so_are_records_without_a_timestamp(spark: SparkSession) -> None:
    at = [
        START,
        START + timedelta(minutes=59),
        START + timedelta(hours=1),
        None,
        datetime(1969, 12, 31, 23, tzinfo=UTC),
    ]
    rows = [("a", 0, b"k", 1, when) for when in at]
    counting = Counting((), window_us=HOUR_US)
    found = as_lists(collect_counts(counting.counts(frame(spark, rows))))["a"]
    first = int(START.timestamp()) // 3600
    assert found[ACTUAL] == {first: ([2], [2]), first + 1: ([1], [1]), None: ([1], [1]), -1: ([1], [1])}
    assert list(found[BUCKETS]) == [None]
    assert sum(found[BUCKETS][None][0]) == 5


def test_the_counts_do_not_depend_on_when_and_in_which_blocks_a_task_sends_them(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [(f"t{i % 3}", i % 40, b"user-%d" % (i % 50), i, START + timedelta(minutes=i)) for i in range(500)]
    counting = Counting((Scheme("modulus", "xxh64", 40),), window_us=HOUR_US, buckets=False)
    task = counting._task()
    arrow = pa.Table.from_pydict(
        {
            "topic": [r[0] for r in rows],
            "partition": pa.array([r[1] for r in rows], pa.int32()),
            "key": pa.array([r[2] for r in rows], pa.binary()),
            "bytes": [r[3] for r in rows],
            "at": [int(r[4].timestamp() * 1e6) for r in rows],
        }
    )
    expected = as_lists(collect_counts(counting.counts(frame(spark, rows))))
    monkeypatch.setattr(balance_counting, "FLUSH_CELLS", 100)
    monkeypatch.setattr(count_blocks, "BLOCK_CELLS", 16)
    monkeypatch.setattr(count_blocks, "BATCH_BYTES", 1000)
    parts = list(task(arrow.to_batches(max_chunksize=70)))
    assert len(parts) > 8
    pieces = spark.createDataFrame(pa.Table.from_batches(parts)).select(*count_blocks.BLOCKS.names)
    found = as_lists(collect_counts(pieces))
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
    assert as_lists(collect_counts(found)) == {"a": {0: {None: ([2, 2, 5], [11, 20, 5]), 7: ([1, 2], [10, 20])}}}


def test_blocks_of_zeros_are_left_out() -> None:
    cells = np.zeros(3 * count_blocks.BLOCK_CELLS, np.int64)
    cells[-1] = 4
    (block,) = blocks_of("a", None, 5, CellCounts(cells, cells))
    assert (block.topic, block.counter, block.block, int(block.counts.records.sum())) == ("a", 5, 2, 4)


def test_more_cells_than_the_driver_can_hold_are_refused(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(count_blocks, "MAX_CELLS", 5)
    counts = Counting((Scheme("modulus", "fnv1a32", 6),), buckets=False).counts(frame(spark, [("a", 0, b"k", 1, None)]))
    with pytest.raises(InvalidValue, match="fewer windows, topics, schemes or partitions"):
        collect_counts(counts)


def test_one_key_in_1024_is_counted_in_the_thinned_buckets(spark: SparkSession) -> None:
    rows = [("a", None, b"user-%d" % i, None, None) for i in range(4096)]
    found = collect_counts(Counting(()).counts(frame(spark, rows)))["a"]
    assert 0 < int(found[THINNED][None].records.sum()) < 20
    assert int(found[BUCKETS][None].records.sum()) == 4096
