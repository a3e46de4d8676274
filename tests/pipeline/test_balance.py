"""The balance report: loads under each scheme, hot keys, members, and the verdict."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from shardyard.model import InvalidValue
from shardyard.pipeline.balance import key_sample
from shardyard.pipeline.balance.figures import TopicBalance
from shardyard.pipeline.balance.loads import LOADS
from shardyard.pipeline.balance.report import Scheme, balance_report, loads_of_table, window_us
from shardyard.placement import Modulus, balance

START = datetime(2026, 1, 1, tzinfo=UTC)
FNV = Scheme("modulus", "fnv1a32", 4)
JUMP = Scheme("jump", "xxh64", 3)


def frame(spark: SparkSession, rows: list[tuple[Any, ...]]) -> DataFrame:
    return spark.createDataFrame(rows, LOADS)


@pytest.fixture(scope="module")
def chat(spark: SparkSession) -> TopicBalance:
    """100 records: 60 of the key room-1, with 10 bytes each, and 40 keys with 5 bytes each, on 4 partitions."""
    rows = [("chat", 1, b"room-1", 10, START)] * 60
    rows += [("chat", i % 4, b"user-%d" % i, 5, START + timedelta(hours=i % 2)) for i in range(40)]
    report = balance_report(
        frame(spark, rows), [FNV, JUMP], window="1 hour", assignors=["sticky", "even"], members=[2, 5], hot=2
    )
    (topic,) = report.topics
    return topic


def test_records_and_bytes_are_measured_where_they_are_and_under_each_scheme(chat: TopicBalance) -> None:
    assert (chat.topic, chat.records, chat.bytes, chat.keyless) == ("chat", 100, 800, 0)
    assert [(s.scheme, s.partitions) for s in chat.schemes] == [
        ("actual", 4),
        ("fnv1a32 modulus 4", 4),
        ("xxh64 jump 3", 3),
    ]
    actual, fnv, _ = chat.schemes
    assert actual.records.counts == (10, 70, 10, 10)
    assert actual.bytes is not None
    assert actual.bytes.counts == (50, 650, 50, 50)
    assert (actual.bytes.fullest, actual.bytes.fullest_share) == (1, 650 / 800)
    assert actual.bytes.balance == balance([50, 650, 50, 50])
    partition = Modulus("fnv1a32", 4).place
    expected = [0] * 4
    for key in [b"room-1"] * 60 + [b"user-%d" % i for i in range(40)]:
        expected[partition(key)] += 1
    assert fnv.records.counts == tuple(expected)


def test_each_window_is_measured_separately(chat: TopicBalance) -> None:
    assert [window.start for window in chat.windows] == [START, START + timedelta(hours=1)]
    first, second = (window.schemes[0] for window in chat.windows)
    assert first.records.counts == (10, 60, 10, 0)
    assert second.records.counts == (0, 10, 0, 10)


def test_a_hot_key_has_its_share_of_the_topic_and_of_its_partition(chat: TopicBalance) -> None:
    hottest, next_one = chat.hot_keys.keys
    assert (hottest.key, hottest.records, hottest.bytes) == (b"room-1", 60, 600)
    assert (hottest.share_of_records, hottest.share_of_bytes) == (0.6, 0.75)
    actual, fnv, jump = hottest.places
    assert (actual.scheme, actual.partition) == ("actual", 1)
    assert (actual.share_of_records, actual.share_of_bytes) == (60 / 70, 600 / 650)
    assert fnv.partition == Modulus("fnv1a32", 4).place(b"room-1")
    assert jump.scheme == "xxh64 jump 3"
    assert (next_one.key, next_one.records) == (b"user-0", 1)
    assert (chat.hot_keys.others_records, chat.hot_keys.others_bytes) == (1, 5)


def test_distinct_keys_are_counted_however_many_records_they_have(chat: TopicBalance) -> None:
    check = chat.key_check
    assert (check.counted, check.one_in, check.distinct, check.exact) == (41, 1, 41, True)
    assert check.schemes[0].keys.counts == (10, 11, 10, 10)
    assert check.schemes[0].keys.balance == balance([10, 11, 10, 10])
    assert sum(check.schemes[1].keys.counts) == 41


def test_members_have_the_load_of_their_partitions(chat: TopicBalance) -> None:
    rows = {(m.assignor, m.members, m.scheme): m for m in chat.members}
    assert len(rows) == 2 * 2 * 3
    two, five = rows["even", 2, "actual"], rows["sticky", 5, "actual"]
    assert (two.idle, two.records.counts) == (0, (10 + 10, 70 + 10))
    assert two.bytes is not None
    assert two.bytes.counts == (100, 700)
    assert (five.idle, sorted(five.records.counts)) == (1, [0, 10, 10, 10, 70])


def test_the_sentence_is_about_the_partitions_that_the_records_are_in(chat: TopicBalance) -> None:
    assert chat.sentence == (
        "partition 1 carries 81 % of the bytes, 92 % of it the key `room-1`: splitting the key helps (without it the "
        "fullest partition would carry 25 %), more partitions do not (the key alone is 75 %)"
    )


def test_the_report_is_plain_data(spark: SparkSession) -> None:
    report = balance_report(frame(spark, [("a", 0, b"\xff", 3, START)]), [FNV], window="1 day", members=[1])
    plain = report.to_json()
    assert json.loads(json.dumps(plain)) == plain
    (topic,) = plain["topics"]
    assert topic["hot_keys"]["keys"][0]["key"] == "0xff"
    assert topic["windows"][0]["start"] == "2026-01-01T00:00:00+00:00"
    assert topic["schemes"][0]["records"]["counts"] == [1]
    assert topic["schemes"][0]["records"]["balance"]["max_over_mean"] == 1.0


def test_topics_are_measured_separately_and_empty_partitions_count_if_their_number_is_given(
    spark: SparkSession,
) -> None:
    rows = [("a", 0, b"k", 1, None), ("a", 0, b"l", 1, None), ("b", 1, b"k", 1, None)]
    report = balance_report(frame(spark, rows), partitions={"a": 4})
    a, b = report.topics
    assert (a.topic, a.schemes[0].records.counts) == ("a", (2, 0, 0, 0))
    assert (b.topic, b.schemes[0].records.counts) == ("b", (0, 1))
    assert [key.key for key in b.hot_keys.keys] == [b"k"]
    assert a.sentence == "2 keys fill at most 2 of 4 partitions, at least 2 stay empty: more partitions do not help"


def test_parquet_files_that_shardyard_did_not_write_can_be_measured(spark: SparkSession, tmp_path: Path) -> None:
    path = str(tmp_path / "orders")
    spark.range(100).selectExpr("id % 10 AS customer", "'x' AS note").write.parquet(path)
    loads = loads_of_table(spark.read.parquet(path), key="customer")
    (topic,) = balance_report(loads, [Scheme("modulus", "fnv1a32", 4)]).topics
    expected = [0] * 4
    for customer in range(10):
        expected[Modulus("fnv1a32", 4).place(customer)] += 10
    assert topic.schemes[0].records.counts == tuple(expected)
    assert (topic.topic, topic.bytes, topic.schemes[0].bytes, topic.key_check.distinct) == ("table", None, None, 10)
    assert [key.bytes for key in topic.hot_keys.keys] == [None] * 10


def test_records_without_keys_and_an_empty_frame_can_be_measured(spark: SparkSession) -> None:
    assert balance_report(frame(spark, []), [FNV]).topics == ()
    (topic,) = balance_report(frame(spark, [("a", None, None, 5, None)] * 8).coalesce(1), [FNV]).topics
    assert (topic.keyless, topic.hot_keys.keys, topic.key_check.distinct) == (8, (), 0)
    assert topic.schemes[0].records.counts == (2, 2, 2, 2)
    assert topic.sentence.startswith("even: with `fnv1a32 modulus 4`, partition 0 carries 25 % of the bytes")


def test_very_many_keys_are_sampled_and_the_report_says_so(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_sample, "SAMPLE_KEYS", 1000)
    loads = loads_of_table(spark.range(20_000), key="id")
    (topic,) = balance_report(loads, [FNV], hot=1).topics
    check = topic.key_check
    assert (check.one_in, check.exact) == (32, False)
    assert check.distinct == check.counted * 32 == pytest.approx(20_000, rel=0.15)
    assert sum(check.schemes[0].keys.counts) == check.counted
    assert topic.schemes[0].records.total == 20_000
    assert topic.hot_keys.others_records >= 1


@pytest.mark.parametrize(
    ("given", "micros"), [("1 hour", 3_600_000_000), ("15 minutes", 900_000_000), ("30seconds", 30_000_000)]
)
def test_a_window_is_a_length_of_time(given: str, micros: int) -> None:
    assert window_us(given) == micros


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": "0 hours"}, "window is '0 hours': expected a number of seconds, minutes, hours or days"),
        ({"window": "soon"}, "window is 'soon'"),
        ({"assignors": ["random"]}, "assignor is 'random': expected one of sticky"),
        ({"members": [0]}, "members is 0: expected a whole number of at least 1"),
        ({"members": [100_001]}, "members is 100001: expected at most 100000"),
        ({"partitions": {"a": 0}}, "partitions of 'a' is 0: expected a whole number of at least 1"),
        ({"hot": -1}, "hot is -1"),
        ({"hot": 10_001}, "hot is 10001: expected at most 10000"),
    ],
)
def test_an_invalid_call_is_refused_before_a_job_starts(
    spark: SparkSession, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidValue, match=message):
        balance_report(frame(spark, []), [FNV], **options)


def test_a_frame_that_is_not_loads_is_refused(spark: SparkSession) -> None:
    with pytest.raises(
        InvalidValue, match="columns is 'id': expected those of loads; topic, partition, key, bytes, time"
    ):
        balance_report(spark.range(1), [FNV])
