"""Audits of histories written by hand, and of many random ones."""

import json
import math
import random
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

import pytest
from pyspark.sql import DataFrame, SparkSession

from shardyard.model import InvalidValue
from shardyard.pipeline.audit.audit import (
    DELIVERED,
    SENT,
    audit,
    delivered_from_table,
    delivered_from_topic,
    duplicated,
    latency,
    lost,
    out_of_order,
    sent_from_topic,
    unexpected,
)
from shardyard.pipeline.audit.report import AuditReport, Latency
from shardyard.pipeline.source.columns import COLUMNS

START = datetime(2026, 1, 31, tzinfo=UTC)


class Entry(NamedTuple):
    id: str
    key: bytes | None
    partition: int | None
    position: int | None
    ms: float | None = None
    """After `START`."""


def frame(spark: SparkSession, entries: Iterable[Entry]) -> DataFrame:
    rows = [(*e[:4], None if e.ms is None else START + timedelta(milliseconds=e.ms)) for e in entries]
    return spark.createDataFrame(rows, SENT)


def entries_for(ids: str, key: bytes | None = b"k", partition: int | None = 0) -> list[Entry]:
    """One record for each letter, at positions 0, 1, 2 and so on of a partition."""
    return [Entry(id_, key, partition, position) for position, id_ in enumerate(ids)]


def reordered(spark: SparkSession, sent: list[Entry], delivered: list[Entry]) -> set[tuple[str, str]]:
    rows = out_of_order(frame(spark, sent), frame(spark, delivered)).collect()
    return {(row["id"], row["after"]) for row in rows}


def test_lost_is_what_was_sent_and_never_delivered(spark: SparkSession) -> None:
    found = lost(frame(spark, entries_for("abcd")), frame(spark, entries_for("dxa")))
    assert found.schema == SENT
    assert {(row["id"], bytes(row["key"]), row["partition"], row["position"]) for row in found.collect()} == {
        ("b", b"k", 0, 1),
        ("c", b"k", 0, 2),
    }


def test_records_sent_at_the_end_of_the_audit_or_later_do_not_count_as_lost(spark: SparkSession) -> None:
    sent = frame(spark, [Entry("a", None, 0, 0, 10), Entry("b", None, 0, 1, 20), Entry("c", None, 0, 2)])
    until = START + timedelta(milliseconds=20)
    assert {row["id"] for row in lost(sent, frame(spark, []), until).collect()} == {"a", "c"}
    report = audit(sent, frame(spark, entries_for("abb")), until=until, exactly_once=True)
    assert (report.sent, report.delivered, report.duplicated, report.unexpected) == (2, 1, 0, 0)


def test_duplicated_says_how_often_each_record_was_delivered(spark: SparkSession) -> None:
    found = duplicated(frame(spark, [*entries_for("abacaa"), *entries_for("c", partition=1)]))
    assert {(row["id"], row["times"]) for row in found.collect()} == {("a", 4), ("c", 2)}


def test_unexpected_is_what_was_delivered_and_never_sent(spark: SparkSession) -> None:
    found = unexpected(frame(spark, entries_for("ab")), frame(spark, entries_for("axyx", partition=3)))
    assert found.schema == DELIVERED
    assert {(row["id"], row["partition"], row["position"]) for row in found.collect()} == {("x", 3, 1), ("y", 3, 2)}


@pytest.mark.parametrize(
    ("delivered", "expected"),
    [
        ("abcd", set()),
        ("bacd", {("a", "b")}),
        ("dabc", {("a", "d"), ("b", "d"), ("c", "d")}),  # the neighbours b and c are in order, but not with d
        ("acbd", {("b", "c")}),
        ("abcabcd", set()),  # a redelivery is not out of order: the first delivery counts
        ("bdbac", {("a", "d"), ("c", "d")}),
        ("bd", set()),
        ("xbxa", {("a", "b")}),
    ],
)
def test_records_of_a_key_are_out_of_order_after_any_that_was_sent_later(
    spark: SparkSession, delivered: str, expected: set[tuple[str, str]]
) -> None:
    assert reordered(spark, entries_for("abcd"), entries_for(delivered)) == expected


def test_there_is_no_order_between_keys_or_between_partitions(spark: SparkSession) -> None:
    assert reordered(spark, [*entries_for("a"), Entry("b", b"other", 0, 1)], entries_for("ba")) == set()
    assert reordered(spark, [Entry("a", b"k", 0, 5), Entry("b", b"k", 1, 6)], entries_for("ba")) == set()
    assert reordered(spark, entries_for("ab"), [Entry("b", b"k", 1, 0), Entry("a", b"k", 0, 7)]) == set()


def test_without_a_key_or_a_position_there_is_no_order(spark: SparkSession) -> None:
    assert reordered(spark, entries_for("ab", key=None), entries_for("ba")) == set()
    assert reordered(spark, entries_for("ab"), [Entry("b", b"k", 0, None), Entry("a", b"k", 0, 1)]) == set()


def test_an_id_that_equals_a_key_does_not_disturb_its_order(spark: SparkSession) -> None:
    sent = [Entry("k", None, 0, 9), *entries_for("ab")]
    assert reordered(spark, sent, [Entry("k", None, 0, 0), Entry("a", b"k", 0, 1), Entry("b", b"k", 0, 2)]) == set()


def test_deliveries_at_the_same_position_are_not_compared(spark: SparkSession) -> None:
    assert reordered(
        spark, entries_for("abc"), [Entry("c", b"k", 0, 1), Entry("b", b"k", 0, 1), Entry("a", b"k", 0, 2)]
    ) == {("a", "c")}


def test_deliveries_without_partitions_have_one_order(spark: SparkSession) -> None:
    sent = [*entries_for("ab"), *entries_for("cd", key=b"l", partition=1)]
    assert reordered(spark, sent, entries_for("dbac", partition=None)) == {("a", "b"), ("c", "d")}


def test_of_deliveries_in_several_partitions_the_earliest_counts(spark: SparkSession) -> None:
    sent = entries_for("ab")
    moved = [Entry("b", b"k", 0, 9, 1), Entry("a", b"k", 1, 5, 2), Entry("a", b"k", 0, 10, 3)]
    assert reordered(spark, sent, moved) == set()  # a was first delivered in partition 1, where b never was
    moved[1] = moved[1]._replace(ms=4)
    assert reordered(spark, sent, moved) == {("a", "b")}


def test_a_record_that_was_sent_twice_counts_from_the_first_time(spark: SparkSession) -> None:
    sent = entries_for("abca")
    assert reordered(spark, sent, entries_for("abca")) == set()
    report = audit(frame(spark, sent), frame(spark, entries_for("abc")))
    assert (report.sent, report.delivered, report.lost, report.out_of_order) == (4, 3, 0, 0)


def test_latency_is_from_sent_to_first_delivered(spark: SparkSession) -> None:
    sent = [Entry(str(n), None, 0, n, n) for n in range(1000)]
    first = [Entry(str(n), None, 0, n, n + 1 + n % 100) for n in range(999)]  # 1 to 100 ms, ten times each but for 100
    again = [Entry("5", None, 0, 2000, 9000), Entry("x", None, 0, 2001, 9000), Entry("999", None, 0, 2002)]
    row = latency(frame(spark, sent), frame(spark, [*first, *again])).collect()[0]
    assert row.asDict() == {
        "records": 999,
        "p50_ms": 50.0,
        "p90_ms": 90.0,
        "p99_ms": 99.0,
        "p999_ms": 100.0,
        "max_ms": 100.0,
    }


def test_an_audit_counts_everything_and_shows_examples(spark: SparkSession) -> None:
    sent = [Entry(id_, b"k", 0, n, 10 * n) for n, id_ in enumerate("abcdef")]
    given = [Entry(id_, b"k", 0, n, 10 * n + 25) for n, id_ in enumerate("badxxd")]
    report = audit(frame(spark, sent), frame(spark, given))
    assert report == AuditReport(
        exactly_once=False,
        sent=6,
        delivered=6,
        lost=3,
        duplicated=2,
        unexpected=1,
        out_of_order=1,
        ordered=3,
        latency=Latency(records=3, p50_ms=15.0, p90_ms=35.0, p99_ms=35.0, p999_ms=35.0, max_ms=35.0),
        examples={
            "lost": tuple(
                {"id": i, "key": b"k", "partition": 0, "position": p} for i, p in [("c", 2), ("e", 4), ("f", 5)]
            ),
            "duplicated": ({"id": "x", "key": b"k", "times": 2}, {"id": "d", "key": b"k", "times": 2}),
            "unexpected": ({"id": "x", "key": b"k", "partition": 0, "position": 3},),
            "out_of_order": ({"key": b"k", "id": "a", "after": "b"},),
        },
    )
    assert audit(frame(spark, sent), frame(spark, given), examples=2).examples["lost"] == report.examples["lost"][:2]
    assert not any(audit(frame(spark, sent), frame(spark, given), examples=0).examples.values())


def test_an_audit_without_records_finds_nothing(spark: SparkSession) -> None:
    report = audit(frame(spark, []), frame(spark, []))
    assert report.sentence() == "0 sent, 0 delivered: 0 lost, 0 twice, no order known: at least once holds"
    assert report.latency is None
    assert json.loads(json.dumps(report.to_json())) == report.to_json()


OK = AuditReport(False, 1_000_000, 1_000_012, 0, 12, 0, 0, 900_000, None, {})


@pytest.mark.parametrize(
    ("report", "broken", "sentence"),
    [
        (OK, [], "1,000,000 sent, 1,000,012 delivered: 0 lost, 12 twice, 0 out of order: at least once holds"),
        (
            replace(OK, exactly_once=True),
            ["duplicated"],
            "1,000,000 sent, 1,000,012 delivered: 0 lost, 12 twice, 0 out of order: broken (duplicated)",
        ),
        (
            replace(OK, exactly_once=True, duplicated=0, delivered=1_000_000),
            [],
            "1,000,000 sent, 1,000,000 delivered: 0 lost, 0 twice, 0 out of order: exactly once holds",
        ),
        (
            replace(OK, lost=1234, out_of_order=5),
            ["lost", "out of order"],
            "1,000,000 sent, 1,000,012 delivered: 1,234 lost, 12 twice, 5 out of order: broken (lost, out of order)",
        ),
        (
            replace(OK, unexpected=3, ordered=0),
            [],
            "1,000,000 sent, 1,000,012 delivered: 0 lost, 12 twice, no order known, 3 never sent: at least once holds",
        ),
    ],
)
def test_a_report_names_the_broken_guarantees_in_a_list_and_in_a_sentence(
    report: AuditReport, broken: list[str], sentence: str
) -> None:
    assert report.broken == broken
    assert report.ok == (not broken)
    assert report.sentence() == sentence


def test_a_report_as_json_has_keys_as_strings() -> None:
    shown = replace(OK, examples={"lost": ({"id": "a", "key": b"caf\xc3\xa9\xff"}, {"id": "b", "key": None})})
    plain = shown.to_json()
    assert plain["examples"] == {"lost": [{"id": "a", "key": "café\\xff"}, {"id": "b", "key": None}]}
    assert (plain["guarantee"], plain["ok"], plain["sent"], plain["latency"]) == (
        "at least once",
        True,
        1_000_000,
        None,
    )


def test_records_of_topics_are_used_as_the_data_source_reads_them(spark: SparkSession) -> None:
    topic = spark.createDataFrame([("orders", 3, 17, 1, START, "a", b"k", b"v", None)], COLUMNS)
    for records in (sent_from_topic(topic), delivered_from_topic(topic)):
        assert records.schema == SENT
        row = records.collect()[0]
        assert (row["id"], bytes(row["key"]), row["partition"], row["position"]) == ("a", b"k", 3, 17)
        assert row["at"].astimezone(UTC) == START


def test_the_columns_of_a_table_are_given_by_name(spark: SparkSession) -> None:
    table = spark.createDataFrame([(7, "k", START, 2)], "order_id long, customer string, stored timestamp, shard int")
    plain = delivered_from_table(table, id="order_id", order="shard")
    assert plain.schema == DELIVERED
    assert tuple(plain.collect()[0]) == ("7", None, None, 2, None)
    full = delivered_from_table(
        table, id="order_id", key="customer", partition="shard", order="stored", at="stored"
    ).collect()[0]
    assert (bytes(full["key"]), full["partition"]) == (b"k", 2)
    assert full["position"] == int(START.timestamp()) * 1_000_000
    assert delivered_from_table(table, id="order_id", order=None).collect()[0]["position"] is None


def test_wrong_columns_are_refused_before_a_job_starts(spark: SparkSession) -> None:
    table = spark.createDataFrame([], "n long, text string")
    with pytest.raises(InvalidValue, match="column is 'id': expected one of n, text"):
        sent_from_topic(table)
    with pytest.raises(InvalidValue, match="column is 'sequence': expected one of n, text"):
        delivered_from_table(table, id="text", order="sequence")
    with pytest.raises(InvalidValue, match="type of column 'text' is 'string': expected tinyint or"):
        delivered_from_table(table, id="text", order="text")
    with pytest.raises(InvalidValue, match="column is 'id': expected one of n, text"):
        audit(table, frame(spark, []))
    with pytest.raises(InvalidValue, match="examples is -1"):
        audit(frame(spark, []), frame(spark, []), examples=-1)
    with pytest.raises(InvalidValue, match="expected a time with a time zone"):
        audit(frame(spark, []), frame(spark, []), until=datetime(2026, 1, 31))  # noqa: DTZ001 the mistake under test


# Random histories: many small ones in one frame, each with ids of its own, against a model that compares all pairs.


def make_history(rng: random.Random, name: str) -> tuple[list[Entry], list[Entry]]:
    keys = [f"{name}-{k}".encode() for k in range(rng.randint(1, 2))] + [None] * rng.randint(0, 1)
    sent = [Entry(f"{name}-{n}", rng.choice(keys), rng.randrange(2), n, n) for n in range(rng.randint(0, 8))]
    sent += [
        e._replace(partition=rng.randrange(2), position=20 + n, ms=20 + n)
        for n, e in enumerate(sent)
        if rng.random() < 0.1
    ]
    partitions: list[int | None] = rng.choice([[0], [0, 1], [None]])
    deliveries = [e for e in sent for _ in range(rng.choice([0, 1, 1, 1, 1, 2]))]
    deliveries += [Entry(f"{name}-x{n}", rng.choice(keys), 0, 0) for n in range(rng.choice([0, 0, 0, 2]))]
    deliveries.sort(key=lambda e: (e.position or 0) + rng.choice([0, 0, 0, 5]))
    same = rng.choice([1, 1, 2])  # how many deliveries share a position
    times = rng.sample(range(100), len(deliveries))
    delivered = [
        e._replace(partition=rng.choice(partitions), position=n // same, ms=times[n]) for n, e in enumerate(deliveries)
    ]
    return sent, delivered


def first_of(entries: list[Entry]) -> dict[str, Entry]:
    by_id = defaultdict(list)
    for e in entries:
        by_id[e.id].append(e)
    return {
        id_: min(found, key=lambda e: (e.position if len({f.partition for f in found}) == 1 else e.ms) or 0)
        for id_, found in by_id.items()
    }


def earliest(entries: list[Entry]) -> dict[str, float]:
    times: dict[str, float] = {}
    for e in entries:
        if e.ms is not None:
            times[e.id] = min(e.ms, times.get(e.id, e.ms))
    return times


def expected_reordered(sent: list[Entry], delivered: list[Entry]) -> dict[str, str]:
    first_sent, first_delivered = first_of(sent), first_of(delivered)
    both = first_sent.keys() & first_delivered.keys()
    found = {}
    for a in both:
        overtaking = [
            b
            for b in both
            if (first_sent[a].key, first_sent[a].partition, first_delivered[a].partition)
            == (first_sent[b].key, first_sent[b].partition, first_delivered[b].partition)
            and first_sent[a].key is not None
            and (first_sent[a].position or 0) < (first_sent[b].position or 0)
            and (first_delivered[a].position or 0) > (first_delivered[b].position or 0)
        ]
        if overtaking:
            found[a] = max(overtaking, key=lambda b: first_sent[b].position or 0)
    return found


def test_random_histories_give_the_same_results_as_the_model(spark: SparkSession) -> None:
    rng = random.Random(1)
    sent, delivered = list[Entry](), list[Entry]()
    reordered_ids: dict[str, str] = {}
    for n in range(1500):
        one_sent, one_delivered = make_history(rng, f"h{n}")
        sent += one_sent
        delivered += one_delivered
        reordered_ids |= expected_reordered(one_sent, one_delivered)
    rng.shuffle(sent)
    rng.shuffle(delivered)
    sent_ids, delivered_ids = {e.id for e in sent}, {e.id for e in delivered}
    times = {id_: n for id_, n in Counter(e.id for e in delivered).items() if n > 1}
    a, b = frame(spark, sent).cache(), frame(spark, delivered).cache()
    assert {row["id"] for row in lost(a, b).collect()} == sent_ids - delivered_ids
    assert {row["id"] for row in unexpected(a, b).collect()} == delivered_ids - sent_ids
    assert {row["id"]: row["times"] for row in duplicated(b).collect()} == times
    assert {row["id"]: row["after"] for row in out_of_order(a, b).collect()} == reordered_ids
    report = audit(a, b)
    assert (report.sent, report.delivered) == (len(sent), len(delivered))
    assert (report.lost, report.unexpected) == (len(sent_ids - delivered_ids), len(delivered_ids - sent_ids))
    assert (report.duplicated, report.out_of_order) == (len(times), len(reordered_ids))
    assert min(report.lost, report.unexpected, report.duplicated, report.out_of_order) > 100, (
        "too few findings to compare"
    )
    delivered_at = earliest(delivered)
    took = sorted(delivered_at[id_] - sent_at for id_, sent_at in earliest(sent).items() if id_ in delivered_ids)
    assert report.latency is not None
    assert (report.latency.records, report.latency.max_ms) == (len(took), took[-1])
    assert report.latency.p50_ms == took[math.ceil(len(took) * 0.5) - 1]
    a.unpersist()
    b.unpersist()
