"""Sent against delivered: what is lost, what came twice, what came out of order, and how long it took.

The guarantees that are held against the records:

    lost            a record that was acknowledged is delivered
    out of order    records of one key are delivered in the order in which they were sent
    duplicated      only if exactly once is asked for: no record is delivered twice
    unexpected      only if exactly once is asked for: nothing is delivered that was not sent

A record is known by its id. Sent or delivered several times, the first time counts: the lowest position; the earliest
time if it was in several partitions, whose positions can't be compared.

Order is compared where there is one: between records with the same key, sent to the same partition and delivered in the
same one. A key that was sent to several partitions has no order across them.
"""

from datetime import datetime

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812 as everybody calls it
from pyspark.sql.types import (
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from shardyard.model import InvalidValue, whole_number
from shardyard.pipeline.audit.report import COUNTS, AuditReport, Latency

SENT = StructType(
    [
        StructField("id", StringType()),
        StructField("key", BinaryType()),
        StructField("partition", IntegerType()),
        StructField("position", LongType()),
        StructField("at", TimestampType()),
    ]
)
"""What was sent: where in which partition, and when. Without a key, a record has no order."""
DELIVERED = SENT
"""What was delivered: `position` is the order of delivery within `partition`; over all, if `partition` is null. Without
a position, a record has no order. `at` may be null."""

PERCENTILES = {"p50_ms": 0.5, "p90_ms": 0.9, "p99_ms": 0.99, "p999_ms": 0.999}
ACCURACY = 100_000
"""A percentile's rank is right to one part in this many; what is given is a latency that occurred."""

_INTEGERS = ("tinyint", "smallint", "int", "bigint")


def sent_from_topic(records: DataFrame) -> DataFrame:
    """`SENT`, from the records of one topic as the data source `shardyard` reads them."""
    _require(records, "id", "key", "partition", "offset", "timestamp")
    return records.select(
        "id", "key", "partition", F.col("offset").alias("position"), F.col("timestamp").alias("at")
    ).to(SENT)


def delivered_from_topic(records: DataFrame) -> DataFrame:
    """`DELIVERED`, from a topic that what was delivered went to, with the ids it had."""
    return sent_from_topic(records)


def delivered_from_table(
    table: DataFrame,
    *,
    id: str,  # noqa: A002 the word of the product
    order: str | None,
    key: str | None = None,
    partition: str | None = None,
    at: str | None = None,
) -> DataFrame:
    """`DELIVERED`, from columns of a table with a row for each delivery.

    `order` is a whole number or a time that grows with each delivery: within `partition`, or over all if there is none.
    Rows with the same are not compared. Without it the order is not known, and not judged.
    """
    return table.select(
        _taken(table, "id", id, StringType(), ("string", "binary", *_INTEGERS)),
        _taken(table, "key", key, BinaryType(), ("string", "binary")),
        _taken(table, "partition", partition, IntegerType(), _INTEGERS),
        _taken(table, "position", order, LongType(), (*_INTEGERS, "timestamp")),
        _taken(table, "at", at, TimestampType(), ("timestamp",)),
    ).to(DELIVERED)


def _taken(table: DataFrame, name: str, column: str | None, kind: DataType, types: tuple[str, ...]) -> Column:
    if column is None:
        return F.lit(None).cast(kind).alias(name)
    _require(table, column)
    found = table.schema[column].dataType.simpleString()
    if found not in types:
        raise InvalidValue(f"type of column {column!r}", found, " or ".join(types))
    value = F.unix_micros(column) if kind == LongType() and found == "timestamp" else F.col(column)
    return value.cast(kind).alias(name)


def _require(frame: DataFrame, *columns: str) -> None:
    for column in columns:
        if column not in frame.columns:
            raise InvalidValue("column", column, "one of " + ", ".join(frame.columns))


def matched(sent: DataFrame, delivered: DataFrame, until: datetime | None = None) -> DataFrame:
    """A row for each record that was sent or delivered: how it was sent first, and how it was delivered first.

    `times` and `deliveries` say how often; nulls stand for what did not happen. Records sent at `until` or later are
    left out with their deliveries.
    """
    if until is not None and until.tzinfo is None:
        raise InvalidValue("until", until, "a time with its zone")
    first_sent = sent.transform(_first).withColumnRenamed("key", "sent_key")
    first_delivered = delivered.transform(_first).toDF(
        "id", "delivered_key", "deliveries", "place", "turn", "delivered_at"
    )
    rows = first_sent.join(first_delivered, "id", "full")
    if until is not None:
        rows = rows.where(F.col("at").isNull() | (F.col("at") < F.lit(until)))
    return rows.select(
        "id",
        F.when(F.col("times").isNotNull(), F.col("sent_key")).otherwise(F.col("delivered_key")).alias("key"),
        *("partition", "position", "at", F.coalesce("times", F.lit(0)).alias("times")),
        *("place", "turn", "delivered_at", F.coalesce("deliveries", F.lit(0)).alias("deliveries")),
    )


def _first(records: DataFrame) -> DataFrame:
    """A row for each id: its first time, and how many there were."""
    for field in SENT:
        _require(records, field.name)
    together = F.min("partition").eqNullSafe(F.max("partition"))
    return (
        records.to(SENT)
        .repartition(
            "id"
        )  # before, not by, the aggregation: hardly any id comes twice, so there is little to add up early
        .groupBy("id")
        .agg(
            F.any_value("key").alias("key"),
            F.count("*").alias("times"),
            F.when(together, F.min("partition")).otherwise(F.min_by("partition", "at")).alias("partition"),
            F.when(together, F.min("position")).otherwise(F.min_by("position", "at")).alias("position"),
            F.min("at").alias("at"),
        )
    )


def lost(sent: DataFrame, delivered: DataFrame, until: datetime | None = None) -> DataFrame:
    """`SENT` of the records that were never delivered."""
    return matched(sent, delivered, until).where(_verdicts()["lost"]).select(*SENT.names)


def duplicated(delivered: DataFrame) -> DataFrame:
    """`id` and `times` of the records that were delivered more than once."""
    return delivered.transform(_first).where(F.col("times") > 1).select("id", "times")


def unexpected(sent: DataFrame, delivered: DataFrame) -> DataFrame:
    """`DELIVERED` of the records that were never sent, each as it came first."""
    rows = matched(sent, delivered).where(_verdicts()["unexpected"])
    return rows.select("id", "key", "place", "turn", "delivered_at").toDF(*DELIVERED.names)


def out_of_order(sent: DataFrame, delivered: DataFrame, until: datetime | None = None) -> DataFrame:
    """`key`, `id` and `after`: the record was sent before `after`, and delivered after it.

    `after` is the last sent of all that were delivered earlier. Records without a key have no order.
    """
    rows = matched(sent, delivered, until).transform(_in_line).where(_verdicts()["out_of_order"])
    return rows.select("key", "id", F.col("ahead.id").alias("after"))


def latency(sent: DataFrame, delivered: DataFrame, until: datetime | None = None) -> DataFrame:
    """One row: `records` of which both times are known; percentiles and maximum of sent to first delivered, in ms."""
    return matched(sent, delivered, until).agg(*_latency())


def audit(
    sent: DataFrame,
    delivered: DataFrame,
    *,
    exactly_once: bool = False,
    until: datetime | None = None,
    examples: int = 5,
) -> AuditReport:
    """All of the above at once, with at most `examples` of each: two shuffles and one job, whatever is found."""
    most = whole_number("examples", examples, at_least=0)
    verdicts = _verdicts()
    found = (
        matched(sent, delivered, until)
        .transform(_in_line)
        .agg(
            F.coalesce(F.sum("times"), F.lit(0)).alias("sent"),
            F.coalesce(F.sum("deliveries"), F.lit(0)).alias("delivered"),
            F.count_if(_ordered()).alias("ordered"),
            *(F.count_if(verdict).alias(name) for name, verdict in verdicts.items()),
            F.struct(*_latency()).alias("latency"),
            F.struct(*(_examples(name, verdict, max(most, 1)) for name, verdict in verdicts.items())).alias("examples"),
        )
        .collect()[0]
    )
    times = found["latency"]
    return AuditReport(
        exactly_once=exactly_once,
        **{name: found[name] for name in ("sent", "delivered", "ordered", *COUNTS)},
        latency=Latency(**times.asDict()) if times["records"] else None,
        examples={name: tuple(row.asDict() for row in (found["examples"][name] or [])[:most]) for name in COUNTS},
    )


def _in_line(rows: DataFrame) -> DataFrame:
    """Of `matched` rows: beside each, the last sent one (`position`, `id`) of those delivered up to it, as `ahead`."""
    line = F.when(_ordered(), F.col("key")).otherwise(F.col("id").cast("binary"))  # else all without a key stand in one
    turns = Window.partitionBy(line, "partition", "place").orderBy(
        "turn", "position"
    )  # in order, where turns are equal
    so_far = turns.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    return rows.withColumn("ahead", F.max(F.when(_ordered(), F.struct("position", "id"))).over(so_far))


def _ordered() -> Column:
    return F.col("key").isNotNull() & F.col("position").isNotNull() & F.col("turn").isNotNull()


def _verdicts() -> dict[str, Column]:
    """On rows of `matched`, and of `_in_line` for the last; by the names of `COUNTS`."""
    return {
        "lost": F.col("deliveries") == 0,
        "duplicated": F.col("deliveries") > 1,
        "unexpected": F.col("times") == 0,
        "out_of_order": _ordered() & (F.col("ahead.position") > F.col("position")),
    }


def _latency() -> list[Column]:
    took = (F.unix_micros("delivered_at") - F.unix_micros("at")) / 1000
    ranks = F.percentile_approx(took, list(PERCENTILES.values()), ACCURACY)
    named = [ranks[i].alias(name) for i, name in enumerate(PERCENTILES)]
    return [F.count(took).alias("records"), *named, F.max(took).alias("max_ms")]


def _examples(name: str, verdict: Column, most: int) -> Column:
    shown = {
        "lost": ("id", "key", "partition", "position"),
        "duplicated": ("id", "key", F.col("deliveries").alias("times")),
        "unexpected": ("id", "key", F.col("place").alias("partition"), F.col("turn").alias("position")),
        "out_of_order": ("key", "id", F.col("ahead.id").alias("after")),
    }[name]
    first = F.struct("partition", "position", "place", "turn", "id")
    return F.min_by(F.struct(*shown), F.when(verdict, first), most).alias(name)
