"""Audits the two ways of a channel's events, by the sources that the ids of forwarded records are:

    events -> fanout    every event is there exactly once, in its channel's partition, in the order of its channel
    -> inbox            every post comes from an event, is in each inbox partition at most once, and in the order of
                        its channel

Whether an inbox partition that has no post of an event had nobody online at that moment, the topics do not say.
Announcements of the job `fanout` are not forwarded: their posts are compared with `events`. With a replicated routing
table, so are all posts. Announcements have no order among other posts.
"""

from dataclasses import dataclass
from datetime import datetime

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 as everybody calls it

from shardyard.pipeline.audit.audit import SENT, audit
from shardyard.pipeline.audit.report import AuditReport
from shardyard.pipeline.partitioning import placement_column
from shardyard.wire.channels import BULK, DELIVERED, EVENTS, FANOUT, FANOUT_PARTITIONS, HASH, PARTITIONER
from shardyard.wire.inbox import POST_KEY

_SOURCE = r"^([^.]+\.\d+\.\d+\.\d+)"
"""The source in the id of a record, without what follows in that of a post."""


@dataclass(frozen=True, slots=True)
class ChannelAudit:
    """The result for both ways."""

    forwarded: AuditReport | None
    """From `events` to `fanout`; None if it was not asked for."""
    posted: AuditReport
    """To `inbox`. A post in two partitions counts twice; `lost` is always 0."""

    @property
    def ok(self) -> bool:
        return self.posted.ok and (self.forwarded is None or self.forwarded.ok)


def audit_channels(
    events: DataFrame,
    fanout: DataFrame,
    inbox: DataFrame,
    *,
    replicated: bool = False,
    until: datetime | None = None,
    examples: int = 5,
) -> ChannelAudit:
    """Audit the records of the three topics, as the data source `shardyard` reads them. `replicated`: events go to
    `inbox` without `fanout`, which is not checked then. `until`: events that were sent later are left out."""
    forwarded = None
    if not replicated:
        sent, delivered = forwarded_events(events), arrivals(fanout)
        forwarded = audit(sent, delivered, exactly_once=True, until=until, examples=examples)
    posts = posts_by_inbox(inbox)
    sent = origins(events, fanout).transform(expected_posts, posts)
    return ChannelAudit(forwarded, audit(sent, posts, exactly_once=True, until=until, examples=examples))


def forwarded_events(events: DataFrame) -> DataFrame:
    """The events that coordinators forward, as `SENT`, with their source as id."""
    return events.where(F.col("key").isNotNull() & ~_is_announcement()).transform(_as_sent, EVENTS)


def arrivals(fanout: DataFrame) -> DataFrame:
    """The records of `fanout`, as `DELIVERED`. The event of a split channel is in several partitions and counts in the
    channel's own."""
    home = placement_column("key", HASH, PARTITIONER, FANOUT_PARTITIONS)
    split = F.exists("headers", lambda header: header["name"] == "split")
    rows = fanout.where(~split | (F.col("partition") == home))
    return rows.select("id", "key", "partition", F.col("offset").alias("position"), F.col("timestamp").alias("at")).to(
        SENT
    )


def posts_by_inbox(inbox: DataFrame) -> DataFrame:
    """The posts in `inbox`, as `DELIVERED`. The id is the source and the inbox partition."""
    post = F.substring("key", 1, 1) == F.lit(POST_KEY)
    source = F.regexp_extract("id", _SOURCE, 1)
    return (
        inbox.where(post)
        .select(
            F.concat_ws("@", source, F.col("partition").cast("string")).alias("id"),
            F.expr("substring(key, 2)").alias("key"),
            "partition",
            F.col("offset").alias("position"),
            F.col("timestamp").alias("at"),
        )
        .to(SENT)
    )


def origins(events: DataFrame, fanout: DataFrame) -> DataFrame:
    """Everything that may become posts, as `SENT`. Announcements have no order: no position."""
    announced = events.where(_is_announcement()).transform(_as_sent, BULK)
    announced = announced.withColumn("position", F.lit(None).cast("long"))
    ordinary = events.where(F.col("key").isNotNull() & ~_is_announcement()).transform(_as_sent, EVENTS)
    return fanout.transform(_as_sent, FANOUT).unionByName(ordinary).unionByName(announced)


def expected_posts(found: DataFrame, posts: DataFrame) -> DataFrame:
    """For each inbox partition that has a post of an origin: this post, as `SENT`. A post that has no origin is not
    expected."""
    pairs = posts.select("id").distinct().withColumn("source", F.substring_index("id", "@", 1))
    rows = pairs.join(found.withColumnRenamed("id", "source"), "source")
    return rows.select(*SENT.names)


def _as_sent(records: DataFrame, topic: str) -> DataFrame:
    place = [F.col(name).cast("string") for name in ("partition", "epoch", "offset")]
    return records.select(
        F.concat_ws(".", F.lit(topic), *place).alias("id"),
        "key",
        "partition",
        F.col("offset").alias("position"),
        F.col("timestamp").alias("at"),
    ).to(SENT)


def _is_announcement() -> Column:
    return F.exists("headers", lambda header: header["name"] == DELIVERED)
