"""Checksums tell whether two frames hold the same records."""

from datetime import datetime
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from shardyard.pipeline.reshard.checksum import Checksum, checksum
from shardyard.pipeline.source.columns import COLUMNS

AT = datetime(2026, 1, 31, 12)  # noqa: DTZ001 as Spark gives it


def frame(spark: SparkSession, *rows: tuple[int, int, str, str | None, str]) -> DataFrame:
    """(partition, offset, id, key, value) each."""
    full: list[tuple[Any, ...]] = [
        ("t", p, offset, 7, AT, id_, None if key is None else key.encode(), value.encode(), [("tag", b"x")])
        for p, offset, id_, key, value in rows
    ]
    return spark.createDataFrame(full, COLUMNS)


@pytest.fixture(scope="module")
def before(spark: SparkSession) -> Checksum:
    return checksum(
        frame(spark, (0, 0, "a", "k", "1"), (0, 1, "b", "k", "2"), (1, 0, "c", "l", "3"), (1, 1, "d", None, "4"))
    )


def test_partitions_and_offsets_do_not_matter_as_long_as_each_key_is_in_order(
    spark: SparkSession, before: Checksum
) -> None:
    moved = frame(spark, (2, 7, "b", "k", "2"), (2, 5, "a", "k", "1"), (0, 0, "d", None, "4"), (0, 9, "c", "l", "3"))
    assert checksum(moved) == before
    assert before.count == 4


@pytest.mark.parametrize(
    "rows",
    [
        [(0, 1, "a", "k", "1"), (0, 0, "b", "k", "2"), (1, 0, "c", "l", "3"), (1, 1, "d", None, "4")],
        [(0, 0, "a", "k", "1"), (0, 1, "b", "k", "2"), (1, 0, "c", "l", "3"), (1, 1, "d", None, "5")],
        [(0, 0, "a", "k", "1"), (0, 1, "b", "k", "2"), (1, 0, "c", "l", "3"), (1, 1, "d", "", "4")],
        [(0, 0, "a", "k", "1"), (0, 1, "b", "k", "2"), (1, 0, "c", "l", "3")],
        [
            (0, 0, "a", "k", "1"),
            (0, 1, "b", "k", "2"),
            (1, 0, "c", "l", "3"),
            (1, 1, "d", None, "4"),
            (1, 2, "d", None, "4"),
        ],
    ],
    ids=["another order", "another value", "another key", "one missing", "one twice"],
)
def test_any_other_difference_changes_the_checksum(
    spark: SparkSession, before: Checksum, rows: list[tuple[int, int, str, str | None, str]]
) -> None:
    assert checksum(frame(spark, *rows)) != before


def test_a_checksum_counts_the_records_of_each_partition(before: Checksum) -> None:
    assert before.by_partition == {0: 2, 1: 2}


def test_an_empty_frame_has_a_checksum(spark: SparkSession) -> None:
    assert checksum(spark.createDataFrame([], COLUMNS)) == Checksum(0, 0)
