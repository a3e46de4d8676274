"""ingest: topics -> lake, exactly once, either until the lake is up to date or without end."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 as everybody calls it
from pyspark.sql.streaming.query import StreamingQuery

from shardyard.model import InvalidValue, ShardyardError, UnknownTopic
from shardyard.pipeline.blocking import blocking
from shardyard.pipeline.lake.formats import choose_format, records_of
from shardyard.pipeline.lake.lake import COLUMNS, Lake, Records
from shardyard.pipeline.lake.progress import Progress, ProgressListener
from shardyard.pipeline.lake.restarts import MAX_RESTARTS, Restart, Restarts
from shardyard.pipeline.source.options import absolute
from shardyard.pipeline.spark_errors import SparkEnded, SparkFailed, translate_spark_errors

RECORDS_PER_BATCH = 2_000_000
EVERY_SECONDS = 5.0
MAINTAIN_EVERY_BATCHES = 20
POLL_SECONDS = 0.2
DAY_MICROSECONDS = 86_400_000_000

_log = logging.getLogger(__name__)

Stopped = Callable[[], bool]


@dataclass(frozen=True, slots=True)
class Ingested:
    """The result of an ingest."""

    lake: str
    format: str
    topics: tuple[str, ...]
    records: int
    batches: int
    restarts: int


def ingest(
    spark: SparkSession,
    log: str,
    topics: Sequence[str],
    lake: Path | str,
    *,
    format: str | None = None,  # noqa: A002 as Spark and the command call it
    continuous: bool = False,
    every: float = EVERY_SECONDS,
    max_restarts: int = MAX_RESTARTS,
    records_per_batch: int = RECORDS_PER_BATCH,
    fail_on_data_loss: bool = True,
    tasks: int | None = None,
    on_progress: Callable[[Progress], None] = lambda _: None,
    on_restart: Callable[[Restart], None] = lambda _: None,
    stopped: Stopped = lambda: False,
) -> Ingested:
    """Bring the lake up to date with the topics; if `continuous`, again and again with pauses of `every` seconds.

    Topics that were ingested into the lake before are brought up to date as well, because a lake has one checkpoint.
    `format` is delta or parquet; the default is the lake's own, or for a new lake delta if the session has it. A lake
    of plain Parquet files is converted if `format` is delta.

    If `continuous`, a query that fails is started again, with pauses that get longer; `GaveUp` is raised after
    `max_restarts` of them without a batch in between. `stopped` is called several times a second and ends the ingest
    when it returns True. The next ingest finishes a batch that was interrupted by that.
    """
    if not every >= 0:
        raise InvalidValue("every", every, "seconds, at least 0")
    restarts = Restarts(max_restarts, on_restart)
    log = absolute(log)
    target = Lake(lake)
    target.check()
    chosen = choose_format(spark, target, format)
    wanted = _checked_topics(log, topics, target, fail_on_data_loss)
    listener = ProgressListener(f"ingest into {target.root}")
    with target.exclusive(chosen), translate_spark_errors():
        target.set_topics(wanted)
        records = records_of(target, tasks)
        records.prepare(spark)
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
        writer = stream.transform(by_day).writeStream.foreachBatch(batch_writer(records)).trigger(availableNow=True)
        writer = writer.queryName(listener.query_name).option("checkpointLocation", str(target.checkpoint))
        spark.streams.addListener(listener)
        try:
            while True:
                pause = every
                try:
                    with translate_spark_errors():
                        _run(writer.start(), listener, on_progress, stopped)
                except SparkFailed as failure:
                    if not continuous:
                        raise
                    pause = restarts.after(failure, listener.batches)
                if not continuous or _pause(pause, stopped):
                    break
            maintain(records, spark)
        finally:
            spark.streams.removeListener(listener)
    return Ingested(str(target.root), chosen, tuple(wanted), listener.records, listener.batches, restarts.total)


def by_day(records: DataFrame) -> DataFrame:
    """The rows of the lake: the record's columns, and the topic and day to partition by.

    The day is in UTC, whatever the session's time zone.
    """
    day = F.floor(F.unix_micros("timestamp") / DAY_MICROSECONDS).cast("int")
    return records.withColumn("day", F.date_from_unix_date(day)).select("topic", "day", *COLUMNS)


def batch_writer(records: Records) -> Callable[[DataFrame, int], None]:
    """The function that writes each batch of the stream. Spark Connect runs it in a process of its own."""

    def write(batch: DataFrame, number: int) -> None:
        records.write(batch, number)
        if number % MAINTAIN_EVERY_BATCHES == MAINTAIN_EVERY_BATCHES - 1:
            maintain(records, batch.sparkSession)

    return write


def maintain(records: Records, spark: SparkSession) -> None:
    """Maintain the lake if possible. A failure is logged: the rows are written, and the next attempt may succeed."""
    try:
        with translate_spark_errors():
            records.maintain(spark)
    except SparkEnded:
        raise
    except (ShardyardError, OSError) as error:
        _log.warning("maintenance of the lake will be retried: %s", error)
    except Exception:  # noqa: BLE001 the lake works without it
        _log.exception("maintenance of the lake failed and will be retried")


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
    query: StreamingQuery, listener: ProgressListener, on_progress: Callable[[Progress], None], stopped: Stopped
) -> None:
    """Wait until the query ends or is to be stopped."""
    try:
        while not query.awaitTermination(POLL_SECONDS):  # type: ignore[arg-type]  # it takes fractions of a second
            if stopped():
                return
            if listener.progress is not None:
                on_progress(listener.progress)
    finally:
        query.stop()
        listener.await_end(str(query.runId))
    on_progress(Progress(listener.records, 0))


def _pause(seconds: float, stopped: Stopped) -> bool:
    """Sleep, but not longer than until the ingest is stopped. Returns whether it is."""
    deadline = time.monotonic() + seconds
    while not stopped() and time.monotonic() < deadline:
        time.sleep(min(POLL_SECONDS, seconds))
    return stopped()
