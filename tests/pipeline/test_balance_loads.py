"""Loads of topics, and of tables that Shardyard did not write."""

from datetime import UTC, date, datetime
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from shardyard.model import InvalidValue
from shardyard.pipeline.balance.loads import LOADS, loads_of_table, loads_of_topic
from shardyard.pipeline.source.columns import COLUMNS
from shardyard.placement import key_bytes

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def values(loads: DataFrame, column: str) -> list[Any]:
    assert loads.schema.simpleString() == LOADS.simpleString()
    found = [row[column] for row in loads.collect()]
    return [bytes(value) if isinstance(value, bytearray) else value for value in found]


def test_the_bytes_of_a_record_are_those_of_key_value_and_headers(spark: SparkSession) -> None:
    rows = [
        ("orders", 3, 0, 0, NOON, "a", b"key", b"value", [("n", b"123"), ("é", None)]),
        ("orders", 3, 1, 0, NOON, "b", None, b"", None),
    ]
    loads = loads_of_topic(spark.createDataFrame(rows, COLUMNS))
    assert values(loads, "bytes") == [3 + 5 + 1 + 3 + 2, 0]
    assert values(loads, "key") == [b"key", None]
    assert values(loads, "partition") == [3, 3]
    assert values(loads, "topic") == ["orders", "orders"]
    assert values(loads, "timestamp")[0].timestamp() == NOON.timestamp()


def test_a_topic_may_be_read_without_headers_and_timestamps(spark: SparkSession) -> None:
    frame = spark.createDataFrame([("t", 0, b"k", b"v")], "topic string, partition int, key binary, value binary")
    assert values(loads_of_topic(frame), "bytes") == [2]
    with pytest.raises(InvalidValue, match=r"column is 'value': expected one of the columns topic, partition, key$"):
        loads_of_topic(frame.drop("value"))


@pytest.mark.parametrize("kind", ["byte", "short", "int", "long"])
def test_an_integer_key_has_the_bytes_that_placement_hashes(spark: SparkSession, kind: str) -> None:
    numbers = [0, 1, -1, 127, -128, *([2**40 + 5, 2**63 - 1, -(2**63)] if kind == "long" else [])]
    frame = spark.createDataFrame([(n,) for n in [*numbers, None]], f"id {kind}")
    assert values(loads_of_table(frame, key="id"), "key") == [*(key_bytes(n) for n in numbers), None]


def test_string_and_binary_keys_have_their_own_bytes(spark: SparkSession) -> None:
    frame = spark.createDataFrame([("ключ", b"\x00\xff")], "s string, b binary")
    assert values(loads_of_table(frame, key="s"), "key") == ["ключ".encode()]
    assert values(loads_of_table(frame, key="b"), "key") == [b"\x00\xff"]


def test_columns_that_are_not_named_are_unknown(spark: SparkSession) -> None:
    loads = loads_of_table(spark.createDataFrame([("a",)], "k string"), key="k")
    assert [values(loads, name) for name in ("topic", "partition", "bytes", "timestamp")] == [
        ["table"],
        [None],
        [None],
        [None],
    ]


def test_all_columns_of_a_table_can_be_named(spark: SparkSession) -> None:
    row = ("a", "é!", 7, NOON, date(2026, 1, 1), 5, "t", None)
    frame = spark.createDataFrame(
        [row], "k string, text string, `a.size` int, at timestamp, day date, p short, topic string, none string"
    )
    loads = loads_of_table(frame, key="k", bytes="a.size", timestamp="at", partition="p", topic="topic")
    (found,) = loads.collect()
    assert (found["topic"], found["partition"], found["bytes"]) == ("t", 5, 7)
    assert found["timestamp"].timestamp() == NOON.timestamp()
    assert values(loads_of_table(frame, key="k", bytes="text"), "bytes") == [3]  # the length of its UTF-8
    assert values(loads_of_table(frame, key="k", topic="none"), "topic") == [""]
    (day,) = values(loads_of_table(frame, key="k", timestamp="day"), "timestamp")
    assert day.timestamp() == datetime(2026, 1, 1, tzinfo=UTC).timestamp()


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"key": "id"}, "key is 'id': expected one of the columns k, x, s"),
        ({"key": "k", "bytes": "size"}, "bytes is 'size': expected one of the columns k, x, s"),
        ({"key": "k", "topic": "t"}, "topic is 't'"),
        ({"key": "x"}, "type of key column 'x' is 'double': expected binary, string or an integer"),
        ({"key": "k", "bytes": "x"}, "type of bytes column 'x' is 'double'"),
        ({"key": "k", "partition": "s"}, "type of partition column 's' is 'string': expected an integer"),
        ({"key": "k", "timestamp": "s"}, "type of timestamp column 's' is 'string': expected timestamp or date"),
    ],
)
def test_unsuitable_columns_are_refused_at_once(spark: SparkSession, columns: dict[str, str], message: str) -> None:
    frame = spark.createDataFrame([], "k string, x double, s string")
    with pytest.raises(InvalidValue, match=message):
        loads_of_table(frame, **columns)
