"""ingest: topics -> lake, exactly once, until all is read or without end."""

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 as everybody calls it
from pyspark.sql.streaming.listener import SourceProgress
from pyspark.sql.streaming.query import StreamingQuery

from shardyard.model import Damaged, InvalidValue, UnknownTopic
from shardyard.pipeline.blocking import blocking
from shardyard.pipeline.lake.files import COLUMNS, Lake, Merge, rows_in
from shardyard.pipeline.source.offsets import Offsets, ranges
from shardyard.pipeline.source.options import absolute
from shardyard.pipeline.spark_errors import told_plainly

RECORDS_PER_BATCH = 2_000_000
EVERY_SECONDS = 5.0
FILE_BYTES = 128 * 1024 * 1024
"""What a file is meant to reach: small ones are merged up to it."""
FEW_FILES = 8
"""As many small files of a topic and day may stay."""
MERGE_EVERY = 20
"""Batches."""
LOOK_SECONDS = 0.2
DAY_MICROSECONDS = 86_400_000_000


Stopped = Callable[[], bool]


@dataclass(frozen=True, slots=True)
class Progress:
    """How far an ingest is."""

    records: int
    """Ingested by this run."""
    left: int
    """Records that are there to be ingested, as of the last look."""


@dataclass(frozen=True, slots=True)
class Ingested:
    """What an ingest did."""

    lake: str
    topics: tuple[str, ...]
    records: int
    batches: int


def ingest(
    spark: SparkSession,
    log: str,
    topics: Sequence[str],
    lake: Path | str,
    *,
    continuous: bool = False,
    every: float = EVERY_SECONDS,
    records_per_batch: int = RECORDS_PER_BATCH,
    fail_on_data_loss: bool = True,
    tasks: int | None = None,
    on_progress: Callable[[Progress], None] = lambda _: None,
    stopped: Stopped = lambda: False,
) -> Ingested:
    """Bring the lake up to date with the topics, which it keeps from then on; if `continuous`, `every` so many seconds.

    A topic that came into the lake before is kept up to date as well: a lake has one checkpoint. `stopped` is asked
    several times a second whether to end; a batch that is cut off by that is finished by the next ingest.
    """
    if not every >= 0:
        raise InvalidValue("every", every, "seconds, at least 0")
    log = absolute(log)
    target = Lake(lake)
    target.check()
    wanted = _checked_topics(log, topics, target, fail_on_data_loss)
    with target.opened():
        target.keep(wanted)
        stream = (
            spark.readStream.format("shardyard")
            .options(
                log=log,
                topics=",".join(wanted),
                startingOffsets="earliest",
                maxRecordsPerTrigger=str(records_per_batch),
                failOnDataLoss=str(fail_on_data_loss).lower(),
            )
            .load()
        )
        spark.conf.set("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")  # others do not know Spark's own
        job = _Batches(spark, target, tasks or os.cpu_count() or 1)
        writer = stream.transform(by_day).writeStream.foreachBatch(job.put).trigger(availableNow=True)
        writer = writer.option("checkpointLocation", str(target.checkpoint))
        with told_plainly():
            while True:
                _follow(writer.start(), job, on_progress, stopped)
                if not continuous or _waited(every, stopped):
                    break
            job.merge()
    return Ingested(str(target.root), tuple(wanted), job.records, job.batches)


def by_day(records: DataFrame) -> DataFrame:
    """The rows of the lake: the record's columns, with topic and day (UTC, whatever the session's zone) to go by."""
    day = F.floor(F.unix_micros("timestamp") / DAY_MICROSECONDS).cast("int")
    return records.withColumn("day", F.date_from_unix_date(day)).select("topic", "day", *COLUMNS)


def _checked_topics(log: str, topics: Sequence[str], lake: Lake, fail_on_data_loss: bool) -> list[str]:
    """Those asked for and those the lake has; the latter may be gone, if data may be lost."""
    if not topics and not lake.topics():
        raise InvalidValue("topics", list(topics), "at least one")
    with blocking(log) as opened:
        there = {topic.name for topic in opened.wait(opened.log.topics())}
    for name in topics:
        if name not in there:
            raise UnknownTopic(name)
    for name in lake.topics():
        if name not in there and fail_on_data_loss:
            raise InvalidValue("topic of the lake", name, "a topic that still exists, or leave to go on without it")
    return sorted({*topics, *lake.topics()} & there)


def _follow(query: StreamingQuery, job: "_Batches", on_progress: Callable[[Progress], None], stopped: Stopped) -> None:
    """Wait for the end of the query, or for being stopped."""
    try:
        while not query.awaitTermination(LOOK_SECONDS):  # type: ignore[arg-type]  # it takes parts of a second
            if stopped():
                return
            if (last := query.lastProgress) is not None:
                on_progress(Progress(job.records, _left(last.sources[0])))
    finally:
        query.stop()
    on_progress(Progress(job.records, 0))


def _waited(seconds: float, stopped: Stopped) -> bool:
    """Wait a while; whether to stop."""
    until = time.monotonic() + seconds
    while not stopped() and time.monotonic() < until:
        time.sleep(min(LOOK_SECONDS, seconds))
    return stopped()


def _left(source: SourceProgress) -> int:
    """Records between where the query is and what the topics hold, as Spark's own progress has them."""
    at, end = (json.loads(text or "null") for text in (source.endOffset, source.latestOffset))
    if at is None or end is None:  # it has not looked yet
        return 0
    return sum(map(len, ranges(Offsets.from_json(at), Offsets.from_json(end))))


class _Batches:
    """What is done with each batch of the stream."""

    def __init__(self, spark: SparkSession, lake: Lake, tasks: int) -> None:
        self._spark = spark
        self._lake = lake
        self._tasks = tasks
        self.batches = self.records = 0

    def put(self, records: DataFrame, batch: int) -> None:
        """Exactly once: a batch that is replayed is known, or finished as it was begun."""
        if self._lake.is_published(batch):
            return
        if not self._lake.is_complete(batch):
            staged = self._lake.new_staging()
            records.coalesce(self._tasks).write.partitionBy("topic", "day").parquet(str(staged))
            self.records += self._lake.complete(batch, staged)
        self._lake.publish(batch)
        self.batches += 1
        if self.batches % MERGE_EVERY == 0:
            self.merge()

    def merge(self) -> None:
        """Make few large files of many small ones."""
        for merge in self._lake.merges(FILE_BYTES, FEW_FILES):
            staged = self._lake.new_staging()
            files = self._spark.read.parquet(*map(str, merge.files))
            ordered = files.coalesce(1).sortWithinPartitions("partition", "offset")
            ordered.write.parquet(str(staged))
            check_rows(merge, staged)
            self._lake.replace(merge, staged)


def check_rows(merge: Merge, staged: Path) -> None:
    """Never replace files by one that has fewer or more rows."""
    before, after = rows_in(merge.files), rows_in(staged.glob("*.parquet"))
    if before != after:
        raise Damaged(str(merge.folder), f"{len(merge.files)} files with {before} rows became one with {after}")
