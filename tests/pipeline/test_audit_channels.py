"""The audit of channels finds what coordinators and workers must not do."""

from datetime import UTC, datetime

import pytest
from pyspark.sql import DataFrame, SparkSession

from shardyard.pipeline.audit.channels import ChannelAudit, audit_channels
from shardyard.placement import Jump
from shardyard.wire.channels import DELIVERED

COLUMNS = (
    "partition int, offset long, epoch long, timestamp timestamp, id string, key binary, "
    "headers array<struct<name string, value binary>>"
)
NOW = datetime(2026, 1, 31, tzinfo=UTC)
Row = tuple[int, int, str, str, list[tuple[str, bytes]]]
"""Partition, offset, id, key, headers."""
HOME = Jump("xxh64", 256).place("ch")


def frame(spark: SparkSession, rows: list[Row]) -> DataFrame:
    made = [(p, offset, 1, NOW, id_, key.encode(), headers) for p, offset, id_, key, headers in rows]
    return spark.createDataFrame(made, COLUMNS)


def run(spark: SparkSession, *topics: list[Row], replicated: bool = False) -> ChannelAudit:
    return audit_channels(*(frame(spark, rows) for rows in topics), replicated=replicated)


EVENTS: list[Row] = [(0, n, f"e{n}", "ch", []) for n in range(3)] + [(1, 0, "a", "ch", [(DELIVERED, b"run")])]
FANOUT: list[Row] = [(HOME, n, f"events.0.1.{n}", "ch", []) for n in range(3)]
INBOX: list[Row] = [
    *((q, n, f"fanout.{HOME}.1.{n}.9", "\0ch", []) for q in (0, 1) for n in range(3)),
    (0, 3, "bulk.1.1.0.9", "\0ch", []),
    (0, 4, "123", "ann", []),
]


@pytest.mark.timeout(300)  # on a busy machine, Spark's start and its first jobs take long
def test_events_that_are_forwarded_once_and_in_order_pass_and_split_ones_too(spark: SparkSession) -> None:
    split: Row = ((HOME + 128) % 256, 0, "events.0.1.1", "ch", [("split", b"")])
    result = run(spark, EVENTS, [*FANOUT, split], INBOX)
    assert result.ok
    assert result.forwarded is not None
    assert (result.forwarded.sent, result.forwarded.delivered, result.posted.delivered) == (3, 3, 7)


@pytest.mark.timeout(300)
def test_what_is_lost_doubled_from_nowhere_or_out_of_order_is_found(spark: SparkSession) -> None:
    fanout = [FANOUT[1], (HOME, 4, "events.0.1.0", "ch", []), (HOME, 5, "events.0.1.0", "ch", [])]
    inbox: list[Row] = [
        (0, 0, f"fanout.{HOME}.1.4.9", "\0ch", []),
        (0, 1, f"fanout.{HOME}.1.1.9", "\0ch", []),
        (1, 0, f"fanout.{HOME}.1.5.9", "\0ch", []),
        (1, 1, f"fanout.{HOME}.1.5.9", "\0ch", []),
        (1, 2, "fanout.3.1.77.9", "\0ch", []),
    ]
    result = run(spark, EVENTS, fanout, inbox)
    assert not result.ok
    assert result.forwarded is not None
    assert (result.forwarded.lost, result.forwarded.duplicated, result.forwarded.out_of_order) == (1, 1, 1)
    posted = result.posted
    assert (posted.duplicated, posted.unexpected, posted.out_of_order, posted.lost) == (1, 1, 1, 0)


@pytest.mark.timeout(300)
def test_posts_of_a_replicated_table_are_compared_with_events(spark: SparkSession) -> None:
    inbox: list[Row] = [(0, at, f"events.0.1.{n}.9", "\0ch", []) for at, n in enumerate((0, 2, 1))]
    result = run(spark, EVENTS, [], inbox, replicated=True)
    assert result.forwarded is None
    assert (result.posted.out_of_order, result.posted.unexpected) == (1, 0)
