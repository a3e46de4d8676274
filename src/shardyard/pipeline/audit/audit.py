"""Compares what was sent with what was delivered: lost, duplicated and reordered records, and the latency.

The guarantees that are checked, by the name of what breaks them:

    lost            a record that was acknowledged is delivered
    out of order    records of one key are delivered in the order in which they were sent
    duplicated      with exactly-once only: no record is delivered twice
    unexpected      with exactly-once only: no record is delivered that was not sent

Records are matched by id. If one was sent or delivered several times, its first occurrence counts: the one with the
lowest position, or the earliest one if the occurrences are in several partitions, whose positions can't be compared.

Order is defined between records with the same key that were sent to the same partition and delivered in the same
partition. A key that was sent to several partitions has no order across them. Positions are only compared, so offsets
with gaps will do.
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
"""A record that was sent: its partition, its position in it, and the time. A record without a key has no order."""
DELIVERED = SENT
"""A delivery: `position` is its place in the order of deliveries of `partition`, or of all deliveries if that is null.
A delivery without a position has no order. `at` may be null."""

PERCENTILES = {"p50_ms": 0.5, "p90_ms": 0.9, "p99_ms": 0.99, "p999_ms": 0.999}
ACCURACY = 100_000
"""The rank of a percentile is exact to one part in this many. Its value is always a latency that occurred."""

_INTEGERS = ("tinyint", "smallint", "int", "bigint")


def sent_from_topic(records: DataFrame) -> DataFrame:
    """The records of one topic, as the data source `shardyard` reads them, as `SENT`."""
    _require(records, "id", "key", "partition", "offset", "timestamp")
    return records.select(
        "id", "key", "partition", F.col("offset").alias("position"), F.col("timestamp").alias("at")
    ).to(SENT)


def delivered_from_topic(records: DataFrame) -> DataFrame:
    """The records of a topic that consumers write what they received to, with the original ids, as `DELIVERED`."""
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
    """A table with one row per delivery as `DELIVERED`; the arguments name its columns.

    `order` is an integer or a timestamp that grows with each delivery of a partition, or with each delivery at all if
    no `partition` is named. Rows with equal values are not compared. Without `order`, the order is not checked.
    """
    return table.select(
        _column(table, "id", id, StringType(), ("string", "binary", *_INTEGERS)),
        _column(table, "key", key, BinaryType(), ("string", "binary")),
        _column(table, "partition", partition, IntegerType(), _INTEGERS),
        _column(table, "position", order, LongType(), (*_INTEGERS, "timestamp")),
        _column(table, "at", at, TimestampType(), ("timestamp",)),
    ).to(DELIVERED)


def _column(table: DataFrame, name: str, column: str | None, kind: DataType, types: tuple[str, ...]) -> Column:
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


def match(sent: DataFrame, delivered: DataFrame, until: datetime | None = None) -> DataFrame:
    """One row for each record that was sent or delivered, with its first sending and its first delivery.

    `times` and `deliveries` say how often it was sent and delivered; the columns of what did not happen are null.
    Records that were sent at `until` or later are left out, and so are their deliveries.
    """
    if until is not None and until.tzinfo is None:
        raise InvalidValue("until", until, "a time with a time zone")
    first_sent = sent.transform(_first_occurrences).withColumnRenamed("key", "sent_key")
    first_delivered = delivered.transform(_first_occurrences).toDF(
        "id", "delivered_key", "deliveries", "delivered_partition", "delivered_position", "delivered_at"
    )
    rows = first_sent.join(first_delivered, "id", "full")
    if until is not None:
        rows = rows.where(F.col("at").isNull() | (F.col("at") < F.lit(until)))
    return rows.select(
        "id",
        F.when(F.col("times").isNotNull(), F.col("sent_key")).otherwise(F.col("delivered_key")).alias("key"),
        *("partition", "position", "at", F.coalesce("times", F.lit(0)).alias("times")),
        *("delivered_partition", "delivered_position", "delivered_at"),
        F.coalesce("deliveries", F.lit(0)).alias("deliveries"),
    )


def _first_occurrences(records: DataFrame) -> DataFrame:
    """One row for each id: its first occurrence, and how many there are."""
    for field in SENT:
        _require(records, field.name)
    same_partition = F.min("partition").eqNullSafe(F.max("partition"))
    return (
        records.to(SENT)
        .repartition("id")  # hardly any id occurs twice, so aggregating before the shuffle would gain nothing
        .groupBy("id")
        .agg(
            F.any_value("key").alias("key"),
            F.count("*").alias("times"),
            F.when(same_partition, F.min("partition")).otherwise(F.min_by("partition", "at")).alias("partition"),
            F.when(same_partition, F.min("position")).otherwise(F.min_by("position", "at")).alias("position"),
            F.min("at").alias("at"),
        )
    )


def lost(sent: DataFrame, delivered: DataFrame, until: datetime | None = None) -> DataFrame:
    """The records that were never delivered, as `SENT`."""
    return match(sent, delivered, until).where(_conditions()["lost"]).select(*SENT.names)


def duplicated(delivered: DataFrame) -> DataFrame:
    """`id` and `times` of the records that were delivered more than once."""
    return delivered.transform(_first_occurrences).where(F.col("times") > 1).select("id", "times")


def unexpected(sent: DataFrame, delivered: DataFrame) -> DataFrame:
    """The first deliveries of records that were never sent, as `DELIVERED`."""
    rows = match(sent, delivered).where(_conditions()["unexpected"])
    columns = ("id", "key", "delivered_partition", "delivered_position", "delivered_at")
    return rows.select(*columns).toDF(*DELIVERED.names)


def out_of_order(sent: DataFrame, delivered: DataFrame, until: datetime | None = None) -> DataFrame:
    """`key`, `id` and `after` of each record that was delivered after `after`, although it was sent before it.

    `after` is, of all records that were delivered earlier, the one that was sent last. Records without a key have no
    order.
    """
    rows = match(sent, delivered, until).transform(_with_latest).where(_conditions()["out_of_order"])
    return rows.select("key", "id", F.col("latest.id").alias("after"))


def latency(sent: DataFrame, delivered: DataFrame, until: datetime | None = None) -> DataFrame:
    """One row with the percentiles and the maximum of the time from sent to first delivered, in ms.

    `records` is the number of records for which both times are known.
    """
    return match(sent, delivered, until).agg(*_latency_columns())


def audit(
    sent: DataFrame,
    delivered: DataFrame,
    *,
    exactly_once: bool = False,
    until: datetime | None = None,
    examples: int = 5,
) -> AuditReport:
    """All checks in one Spark job with two shuffles, with at most `examples` records for each kind of finding."""
    limit = whole_number("examples", examples, at_least=0)
    conditions = _conditions()
    row = (
        match(sent, delivered, until)
        .transform(_with_latest)
        .agg(
            F.coalesce(F.sum("times"), F.lit(0)).alias("sent"),
            F.coalesce(F.sum("deliveries"), F.lit(0)).alias("delivered"),
            F.count_if(_has_order()).alias("ordered"),
            *(F.count_if(condition).alias(name) for name, condition in conditions.items()),
            F.struct(*_latency_columns()).alias("latency"),
            F.struct(*(_examples(name, c, max(limit, 1)) for name, c in conditions.items())).alias("examples"),
        )
        .collect()[0]
    )
    latency = row["latency"]
    return AuditReport(
        exactly_once=exactly_once,
        **{name: row[name] for name in ("sent", "delivered", "ordered", *COUNTS)},
        latency=Latency(**latency.asDict()) if latency["records"] else None,
        examples={name: tuple(one.asDict() for one in (row["examples"][name] or [])[:limit]) for name in COUNTS},
    )


def _with_latest(rows: DataFrame) -> DataFrame:
    """Adds the column `latest` to rows of `match`: position and id of the record that was sent last, among those that
    were delivered up to this one."""
    # Records without an order are windowed by id: otherwise one task would get all records without a key.
    key_or_id = F.when(_has_order(), F.col("key")).otherwise(F.col("id").cast("binary"))
    window = Window.partitionBy(key_or_id, "partition", "delivered_partition")
    deliveries = window.orderBy("delivered_position", "position")  # those at equal positions count as in order
    so_far = deliveries.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    return rows.withColumn("latest", F.max(F.when(_has_order(), F.struct("position", "id"))).over(so_far))


def _has_order() -> Column:
    return F.col("key").isNotNull() & F.col("position").isNotNull() & F.col("delivered_position").isNotNull()


def _conditions() -> dict[str, Column]:
    """The condition for each of `COUNTS`, on rows of `match`; `out_of_order` needs the column `latest` besides."""
    return {
        "lost": F.col("deliveries") == 0,
        "duplicated": F.col("deliveries") > 1,
        "unexpected": F.col("times") == 0,
        "out_of_order": _has_order() & (F.col("latest.position") > F.col("position")),
    }


def _latency_columns() -> list[Column]:
    took = (F.unix_micros("delivered_at") - F.unix_micros("at")) / 1000
    ranks = F.percentile_approx(took, list(PERCENTILES.values()), ACCURACY)
    named = [ranks[i].alias(name) for i, name in enumerate(PERCENTILES)]
    return [F.count(took).alias("records"), *named, F.max(took).alias("max_ms")]


def _examples(name: str, condition: Column, limit: int) -> Column:
    columns = {
        "lost": ("id", "key", "partition", "position"),
        "duplicated": ("id", "key", F.col("deliveries").alias("times")),
        "unexpected": (
            "id",
            "key",
            F.col("delivered_partition").alias("partition"),
            F.col("delivered_position").alias("position"),
        ),
        "out_of_order": ("key", "id", F.col("latest.id").alias("after")),
    }[name]
    order = F.struct("partition", "position", "delivered_partition", "delivered_position", "id")
    return F.min_by(F.struct(*columns), F.when(condition, order), limit).alias(name)
