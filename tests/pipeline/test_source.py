"""The data source: topics read as frames, in batches and as streams."""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable
from pyspark.sql.streaming.query import StreamingQuery

from shardyard.model import Partition, Record
from shardyard.pipeline.blocking import blocking
from shardyard.pipeline.source.columns import COLUMNS
from shardyard.pipeline.source.offsets import DataLost, Range
from shardyard.pipeline.source.options import read_options
from shardyard.pipeline.source.source import RangePartition, StreamReader
from tests.pipeline.logs import append, create, fill, numbered, url

START_MS = 1_760_000_000_000


@pytest.fixture
def log(tmp_path: Path) -> str:
    return url(tmp_path)


def read(spark: SparkSession, log: str, topics: str = "orders", **options: Any) -> DataFrame:
    return spark.read.format("shardyard").options(log=log, topics=topics, **options).load()


def numbers(frame: DataFrame) -> list[int]:
    return sorted(int(bytes(row["value"])) for row in frame.select("value").collect())


# Batches


def test_a_record_is_a_row_with_all_of_its_fields(spark: SparkSession, log: str) -> None:
    topic = create(log, "orders", 2)
    headers = (("tag", b"x"), ("tag", b"y"))
    append(log, "orders", 1, [Record("a", b"k", b"v", headers, START_MS + 5), Record("b", None, b"", (), START_MS)])
    frame = read(spark, log)
    assert frame.schema == COLUMNS
    assert frame.orderBy("offset").collect() == [
        Row(
            topic="orders",
            partition=1,
            offset=0,
            epoch=topic.epoch,
            timestamp=datetime.fromtimestamp((START_MS + 5) / 1000, UTC).replace(tzinfo=None),
            id="a",
            key=bytearray(b"k"),
            value=bytearray(b"v"),
            headers=[Row(name="tag", value=bytearray(b"x")), Row(name="tag", value=bytearray(b"y"))],
        ),
        Row(
            topic="orders",
            partition=1,
            offset=1,
            epoch=topic.epoch,
            timestamp=datetime.fromtimestamp(START_MS / 1000, UTC).replace(tzinfo=None),
            id="b",
            key=None,
            value=bytearray(b""),
            headers=[],
        ),
    ]


def test_several_topics_are_read_at_once_and_large_partitions_by_several_tasks(spark: SparkSession, log: str) -> None:
    create(log, "orders", 3)
    create(log, "returns", 1)
    fill(log, "orders", 300)
    fill(log, "returns", 50, first=300)
    frame = read(spark, log, "returns,orders", recordsPerTask=20)
    assert numbers(frame) == list(range(350))
    tasks = frame.selectExpr("spark_partition_id() AS task", "topic", "partition").groupBy("task")
    assert tasks.count().where("count > 20").count() == 0
    assert tasks.agg({"topic": "approx_count_distinct", "partition": "approx_count_distinct"}).count() > 15


def test_a_range_is_read_by_offset_and_by_time(spark: SparkSession, log: str) -> None:
    create(log, "orders", 1)
    fill(log, "orders", 100)
    by_offset = {"startingOffsets": '{"orders": {"0": 10}}', "endingOffsets": '{"orders": {"0": 20}}'}
    assert numbers(read(spark, log, **by_offset)) == list(range(10, 20))
    by_time = {"startingTimestamp": str(START_MS + 90), "endingTimestamp": "2025-10-09T08:53:20.095Z"}
    assert numbers(read(spark, log, **by_time)) == list(range(90, 95))
    assert numbers(read(spark, log, startingOffsets="latest")) == []


def test_a_schema_selects_columns(spark: SparkSession, log: str) -> None:
    create(log, "orders", 1)
    fill(log, "orders", 3)
    reader = spark.read.format("shardyard").options(log=log, topics="orders")
    assert reader.schema("offset long, key binary").load().collect()[2] == Row(offset=2, key=bytearray(b"key-2"))
    with pytest.raises(PySparkException, match="schema is 'price double': expected some of: topic string"):
        reader.schema("price double").load().collect()


def test_an_empty_topic_is_an_empty_frame(spark: SparkSession, log: str) -> None:
    create(log, "orders", 2)
    assert read(spark, log).count() == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"topics": "refunds"}, "topic 'refunds' does not exist"),
        ({"log": "memory://"}, "expected a log that other processes can open"),
        ({"log": "kafka://x"}, "log URL is 'kafka://x'"),
        ({"recordsPerTask": "x"}, "option 'recordsPerTask' is 'x'"),
        ({"startingOffsets": '{"orders": {"0": 7}}'}, "option 'startingOffsets' is 7: expected an offset from 0 to 0"),
    ],
)
def test_an_invalid_read_gives_a_clear_error(
    spark: SparkSession, log: str, options: dict[str, str], message: str
) -> None:
    create(log, "orders", 1)
    with pytest.raises(PySparkException, match=message):
        spark.read.format("shardyard").options(**{"log": log, "topics": "orders"} | options).load().collect()


# Streams

Streamed = Callable[..., StreamingQuery]


@pytest.fixture
def streamed(spark: SparkSession, log: str, tmp_path: Path) -> Streamed:
    """Start a stream of `orders` into Parquet files, with the given name for files and checkpoint."""

    def start(name: str, *, available_now: bool = False, **options: Any) -> StreamingQuery:
        reader = spark.readStream.format("shardyard").options(log=log, topics="orders", **options)
        path = tmp_path / f"table-{name}"
        writer = reader.load().writeStream.format("parquet").option("path", str(path))
        writer = writer.option("checkpointLocation", str(tmp_path / name))
        return (writer.trigger(availableNow=True) if available_now else writer).start()

    return start


@pytest.fixture
def seen(spark: SparkSession, tmp_path: Path) -> Callable[[str], list[int]]:
    return lambda name: numbers(spark.read.parquet(str(tmp_path / f"table-{name}")))


def test_a_stream_reads_existing_and_new_records(
    log: str, streamed: Streamed, seen: Callable[[str], list[int]]
) -> None:
    create(log, "orders", 3)
    fill(log, "orders", 100)
    query = streamed("s", startingOffsets="earliest")
    try:
        query.processAllAvailable()
        assert seen("s") == list(range(100))
        fill(log, "orders", 50, first=100)
        query.processAllAvailable()
        assert seen("s") == list(range(150))
    finally:
        query.stop()


def test_a_stream_starts_at_the_latest_record_or_at_a_time_or_at_given_offsets(
    log: str, streamed: Streamed, seen: Callable[[str], list[int]]
) -> None:
    create(log, "orders", 1)
    fill(log, "orders", 100)
    later = streamed("later")
    try:
        later.processAllAvailable()
        fill(log, "orders", 10, first=100)
        later.processAllAvailable()
    finally:
        later.stop()
    assert seen("later") == list(range(100, 110))
    streamed("time", available_now=True, startingTimestamp=START_MS + 95).awaitTermination()
    assert seen("time") == list(range(95, 110))
    streamed("offsets", available_now=True, startingOffsets='{"orders": {"0": 104}}').awaitTermination()
    assert seen("offsets") == list(range(104, 110))


def test_a_trigger_has_a_limit_and_available_now_ends_when_all_is_read(
    log: str, streamed: Streamed, seen: Callable[[str], list[int]]
) -> None:
    create(log, "orders", 3)
    fill(log, "orders", 100)
    query = streamed("s", available_now=True, startingOffsets="earliest", maxRecordsPerTrigger=30)
    query.awaitTermination()
    assert seen("s") == list(range(100))
    assert [p["numInputRows"] for p in query.recentProgress] == [30, 30, 30, 10]


def test_a_stream_continues_where_it_stopped_and_reads_new_partitions(
    log: str, streamed: Streamed, seen: Callable[[str], list[int]]
) -> None:
    create(log, "orders", 2)
    fill(log, "orders", 60)
    streamed("s", available_now=True, startingOffsets="earliest").awaitTermination()
    with blocking(log) as opened:
        opened.wait(opened.log.expand_topic("orders", 4))
    fill(log, "orders", 40, first=60)
    streamed("s", available_now=True, startingOffsets="latest").awaitTermination()
    assert seen("s") == list(range(100))


def test_trimmed_records_fail_the_stream_unless_data_may_be_lost(
    log: str, streamed: Streamed, seen: Callable[[str], list[int]]
) -> None:
    create(log, "orders", 1)
    fill(log, "orders", 10)
    streamed("s", available_now=True, startingOffsets="earliest").awaitTermination()
    fill(log, "orders", 10, first=10)
    with blocking(log) as opened:
        opened.wait(opened.log.trim(Partition("orders", 0), 15))
    with pytest.raises(PySparkException, match="offsets 10 to 14 of orders/0 were trimmed"):
        streamed("s", available_now=True).awaitTermination()
    streamed("s", available_now=True, failOnDataLoss="false").awaitTermination()
    assert seen("s") == [*range(10), *range(15, 20)]


def stream_reader(log: str, **options: str) -> StreamReader:
    """What Spark calls in the driver and in tasks, without Spark."""
    given = {"log": log, "topics": "orders", "startingOffsets": "earliest"} | options
    return StreamReader(read_options(given, streaming=True), COLUMNS)


def test_a_partition_that_was_dropped_fails_the_stream_only_if_it_was_not_read_to_its_end(log: str) -> None:
    epoch = create(log, "orders", 2).epoch
    at: dict[str, Any] = {}

    def trigger(**options: str) -> list[tuple[int, int]]:
        """Start the query again. Returns the offsets that it reads of partition 1."""
        nonlocal at
        reader = stream_reader(log, **options)
        try:
            start = at or reader.initialOffset()
            at = reader.latestOffset(start, ReadAllAvailable())
            tasks = reader.partitions(start, at)
        finally:
            reader.stop()
        assert all(isinstance(task, RangePartition) and task.range.partition == 1 for task in tasks)
        return [(task.range.start, task.range.end) for task in tasks if isinstance(task, RangePartition)]

    with blocking(log) as opened:

        def drop() -> None:
            opened.wait(opened.log.contract_topic("orders", 1))
            opened.wait(opened.log.drop_partitions("orders", 1))

        append(log, "orders", 1, numbered(range(10), 1))
        assert trigger() == [(0, 10)]
        drop()
        assert trigger() == []
        opened.wait(opened.log.expand_topic("orders", 2))
        append(log, "orders", 1, numbered(range(5), 1))
        assert trigger() == [(10, 15)]
        append(log, "orders", 1, numbered(range(5), 1))
        drop()
    with pytest.raises(DataLost, match="offsets 15 to 19 of orders/1 were dropped with it"):
        trigger()
    planned = RangePartition(Range("orders", 1, epoch, 15, 20))
    with pytest.raises(DataLost, match="'orders' has partitions 0 to 0"):
        list(stream_reader(log).read(planned))
    assert list(stream_reader(log, failOnDataLoss="false").read(planned)) == []
    assert trigger(failOnDataLoss="false") == []
    assert trigger() == []


def test_a_recreated_topic_fails_the_stream_unless_data_may_be_lost(
    log: str, streamed: Streamed, seen: Callable[[str], list[int]]
) -> None:
    create(log, "orders", 1)
    fill(log, "orders", 10)
    streamed("s", available_now=True, startingOffsets="earliest").awaitTermination()
    with blocking(log) as opened:
        opened.wait(opened.log.delete_topic("orders"))
    create(log, "orders", 1)
    fill(log, "orders", 5, first=50)
    with pytest.raises(PySparkException, match="topic 'orders' was deleted and recreated"):
        streamed("s", available_now=True).awaitTermination()
    streamed("s", available_now=True, failOnDataLoss="false").awaitTermination()
    assert seen("s") == [*range(10), *range(50, 55)]


def test_a_checkpoint_of_another_source_is_refused(log: str, streamed: Streamed, tmp_path: Path) -> None:
    create(log, "orders", 1)
    fill(log, "orders", 10)
    streamed("s", available_now=True, startingOffsets="earliest").awaitTermination()
    offsets = tmp_path / "s" / "offsets" / "0"
    lines = offsets.read_text().splitlines()
    offsets.write_text("\n".join([*lines[:-1], json.dumps({"orders": {"0": 5}})]))
    (tmp_path / "s" / "offsets" / ".0.crc").unlink()
    fill(log, "orders", 10, first=10)
    with pytest.raises(PySparkException, match="expected those of a shardyard stream"):
        streamed("s", available_now=True).awaitTermination()
