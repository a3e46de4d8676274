"""ingest: topics -> lake, exactly once, either until the lake is up to date or without end."""

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
from shardyard.pipeline.lake.files import COLUMNS, Lake, Merge, count_rows
from shardyard.pipeline.source.offsets import Offsets, ranges
from shardyard.pipeline.source.options import absolute
from shardyard.pipeline.spark_errors import translate_spark_errors

RECORDS_PER_BATCH = 2_000_000
EVERY_SECONDS = 5.0
FILE_BYTES = 128 * 1024 * 1024
"""The size that small files are merged up to."""
MIN_MERGE_FILES = 8
"""Small files of a topic and day are merged when there are this many."""
MERGE_EVERY_BATCHES = 20
POLL_SECONDS = 0.2
DAY_MICROSECONDS = 86_400_000_000


Stopped = Callable[[], bool]


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of an ingest."""

    records: int
    """Records ingested by this run."""
    left: int
    """Records that are yet to be ingested: an estimate by offsets, which is too high where these have gaps."""


@dataclass(frozen=True, slots=True)
class Ingested:
    """The result of an ingest."""

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
    """Bring the lake up to date with the topics; if `continuous`, again and again with pauses of `every` seconds.

    Topics that were ingested into the lake before are brought up to date as well, because a lake has one checkpoint.
    `stopped` is called several times a second and ends the ingest when it returns True. The next ingest finishes a
    batch that was interrupted by that.
    """
    if not every >= 0:
        raise InvalidValue("every", every, "seconds, at least 0")
    log = absolute(log)
    target = Lake(lake)
    target.check()
    wanted = _checked_topics(log, topics, target, fail_on_data_loss)
    with target.exclusive():
        target.set_topics(wanted)
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
        spark.conf.set("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")  # Spark's own is unknown elsewhere
        batches = _BatchWriter(spark, target, tasks or os.cpu_count() or 1)
        writer = stream.transform(by_day).writeStream.foreachBatch(batches.write).trigger(availableNow=True)
        writer = writer.option("checkpointLocation", str(target.checkpoint))
        with translate_spark_errors():
            while True:
                _run(writer.start(), batches, on_progress, stopped)
                if not continuous or _pause(every, stopped):
                    break
            batches.merge()
    return Ingested(str(target.root), tuple(wanted), batches.records, batches.batches)


def by_day(records: DataFrame) -> DataFrame:
    """The rows of the lake: the record's columns, and the topic and day to partition by.

    The day is in UTC, whatever the session's time zone.
    """
    day = F.floor(F.unix_micros("timestamp") / DAY_MICROSECONDS).cast("int")
    return records.withColumn("day", F.date_from_unix_date(day)).select("topic", "day", *COLUMNS)


def _checked_topics(log: str, topics: Sequence[str], lake: Lake, fail_on_data_loss: bool) -> list[str]:
    """The requested topics and those that are in the lake already. The latter may be missing if data may be lost."""
    if not topics and not lake.topics():
        raise InvalidValue("topics", list(topics), "at least one")
    with blocking(log) as opened:
        existing = {topic.name for topic in opened.wait(opened.log.topics())}
    for name in topics:
        if name not in existing:
            raise UnknownTopic(name)
    for name in lake.topics():
        if name not in existing and fail_on_data_loss:
            expected = "a topic that still exists; allow data loss to continue without it"
            raise InvalidValue("topic of the lake", name, expected)
    return sorted({*topics, *lake.topics()} & existing)


def _run(
    query: StreamingQuery, batches: "_BatchWriter", on_progress: Callable[[Progress], None], stopped: Stopped
) -> None:
    """Wait until the query ends or is to be stopped."""
    try:
        while not query.awaitTermination(POLL_SECONDS):  # type: ignore[arg-type]  # it takes fractions of a second
            if stopped():
                return
            if (last := query.lastProgress) is not None:
                on_progress(Progress(batches.records, _remaining(last.sources[0])))
    finally:
        query.stop()
    on_progress(Progress(batches.records, 0))


def _pause(seconds: float, stopped: Stopped) -> bool:
    """Sleep, but not longer than until the ingest is stopped. Returns whether it is."""
    deadline = time.monotonic() + seconds
    while not stopped() and time.monotonic() < deadline:
        time.sleep(min(POLL_SECONDS, seconds))
    return stopped()


def _remaining(source: SourceProgress) -> int:
    """An upper bound of the records that the query has yet to read, from the offsets in Spark's progress report."""
    at, end = (json.loads(text or "null") for text in (source.endOffset, source.latestOffset))
    if at is None or end is None:  # before the first trigger
        return 0
    return sum(r.max_records for r in ranges(Offsets.from_json(at), Offsets.from_json(end)))


class _BatchWriter:
    """Writes each batch of the stream to the lake."""

    def __init__(self, spark: SparkSession, lake: Lake, tasks: int) -> None:
        self._spark = spark
        self._lake = lake
        self._tasks = tasks
        self.batches = self.records = 0

    def write(self, records: DataFrame, batch: int) -> None:
        """Write a batch exactly once: one that Spark replays is skipped if it was published, and finished if not."""
        if self._lake.is_published(batch):
            return
        if not self._lake.is_complete(batch):
            staged = self._lake.new_staging()
            records.coalesce(self._tasks).write.partitionBy("topic", "day").parquet(str(staged))
            self.records += self._lake.complete(batch, staged)
        self._lake.publish(batch)
        self.batches += 1
        if self.batches % MERGE_EVERY_BATCHES == 0:
            self.merge()

    def merge(self) -> None:
        """Merge small files into large ones."""
        for merge in self._lake.plan_merges(FILE_BYTES, MIN_MERGE_FILES):
            staged = self._lake.new_staging()
            files = self._spark.read.parquet(*map(str, merge.files))
            ordered = files.coalesce(1).sortWithinPartitions("partition", "offset")
            ordered.write.parquet(str(staged))
            check_rows(merge, staged)
            self._lake.apply_merge(merge, staged)


def check_rows(merge: Merge, staged: Path) -> None:
    """Raise `Damaged` if the merged file has another number of rows than the files it is to replace."""
    before, after = count_rows(merge.files), count_rows(staged.glob("*.parquet"))
    if before != after:
        raise Damaged(str(merge.folder), f"{len(merge.files)} files with {before} rows became one with {after}")
