"""The data source: frames written to topics, in batches and as streams."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 as everybody calls it
from pyspark.sql.datasource import WriterCommitMessage

from shardyard.log.sqlite import SqliteLog
from shardyard.model import InvalidValue, Record
from shardyard.pipeline.blocking import blocking
from shardyard.pipeline.source.options import write_options
from shardyard.pipeline.source.sink import BatchSink, StreamSink
from shardyard.pipeline.source.staging import Manifest, Staging, commit, staging_folder
from shardyard.placement import Jump, Modulus
from tests.log.samples import move
from tests.pipeline.logs import append, by_key, contents, create, fill, numbered, url


@pytest.fixture
def log(tmp_path: Path) -> str:
    return url(tmp_path)


def write(frame: DataFrame, log: str, topic: str = "orders", **options: Any) -> None:
    frame.write.format("shardyard").options(log=log, topic=topic, **options).mode("append").save()


def rows(spark: SparkSession, count: int, keys: int = 10) -> DataFrame:
    """Ids `id-<n>` in the order of n, in several tasks."""
    n = spark.range(0, count, numPartitions=4)
    return n.select(
        F.concat(F.lit("id-"), "id").alias("id"),
        F.concat(F.lit("key-"), F.col("id") % keys).alias("key"),
        F.col("id").cast("string").alias("value"),
    )


def in_order(partitions: list[list[Record]]) -> bool:
    return all(ids == sorted(ids, key=lambda i: int(i[3:])) for ids in by_key(partitions).values())


def numbers(partitions: list[list[Record]]) -> list[int]:
    return sorted(int(record.id[3:]) for records in partitions for record in records)


def staged_files(log: str) -> list[Path]:
    return [path for path in staging_folder(log).rglob("*") if path.is_file()]


# Batches


@pytest.mark.parametrize(
    ("options", "partitioner"),
    [
        ({}, Modulus("fnv1a32", 5)),
        ({"partitioner": "modulus", "hash": "murmur2"}, Modulus("murmur2", 5)),
        ({"partitioner": "jump"}, Jump("xxh64", 5)),
    ],
)
def test_records_go_where_their_keys_live_in_order(
    spark: SparkSession, log: str, options: dict[str, str], partitioner: Modulus | Jump
) -> None:
    create(log, "orders", 5)
    write(rows(spark, 1000), log, **options)
    written = contents(log, "orders")
    assert numbers(written) == list(range(1000))
    assert in_order(written)
    assert all(partitioner.place(r.key) == i for i, records in enumerate(written) for r in records)
    assert staged_files(log) == []


def test_a_frame_that_was_read_can_be_written_unchanged(spark: SparkSession, log: str) -> None:
    create(log, "orders", 2)
    create(log, "copy", 2)
    headers = (("tag", b"x"), ("trace", b""))
    records = [
        Record("a", b"\xff", b"\0", headers, 1000),
        Record("b", None, b"v", (), 2000),
        Record("c", b"", b"", (), 1),
    ]
    append(log, "orders", 1, records)
    read = spark.read.format("shardyard").options(log=log, topics="orders").load()
    write(read, log, "copy", partitioner="column")
    assert contents(log, "copy") == [[], records]


def test_records_without_a_key_go_round_robin_and_missing_ids_and_timestamps_are_set(
    spark: SparkSession, log: str
) -> None:
    create(log, "orders", 4)
    write(spark.range(100, numPartitions=1).selectExpr("cast(id as string) value"), log)
    written = contents(log, "orders")
    assert [len(records) for records in written] == [25] * 4
    records = [r for records in written for r in records]
    assert len({r.id for r in records}) == 100
    assert all(r.key is None and r.timestamp > 1_700_000_000_000 for r in records)
    write(
        spark.range(100, numPartitions=1).selectExpr("'k' key", "cast(id as string) value"),
        log,
        partitioner="round_robin",
    )
    assert [len(records) for records in contents(log, "orders")] == [50] * 4


def test_a_batch_with_a_producers_name_is_written_once(spark: SparkSession, log: str) -> None:
    create(log, "orders", 3)
    for _ in range(2):
        write(rows(spark, 100), log, producer="nightly 2026-01-31")
    assert numbers(contents(log, "orders")) == list(range(100))
    for _ in range(2):
        write(rows(spark, 100), log)
    assert len(numbers(contents(log, "orders"))) == 300


def test_a_producers_name_is_scoped_to_a_topic_and_its_epoch(spark: SparkSession, log: str) -> None:
    create(log, "orders", 1)
    create(log, "returns", 1)
    for topic in ("orders", "returns"):
        write(rows(spark, 10), log, topic, producer="nightly")
    assert len(contents(log, "returns")[0]) == 10
    with blocking(log) as opened:
        opened.wait(opened.log.delete_topic("orders"))
    create(log, "orders", 1)
    write(rows(spark, 10), log, producer="nightly")
    assert len(contents(log, "orders")[0]) == 10


def test_a_write_does_not_create_a_log(spark: SparkSession, log: str, tmp_path: Path) -> None:
    with pytest.raises(PySparkException, match="expected a log that exists"):
        write(rows(spark, 10), log)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("frame", "options", "message"),
    [
        ("cast(id as string) value", {"topic": "refunds"}, "topic 'refunds' does not exist"),
        ("cast(id as string) text", {}, "columns is 'text': expected a column 'value'"),
        ("cast(id as string) value; id price", {}, "column is 'price': expected partition, timestamp, id, key, value"),
        ("id value", {}, "type of column 'value' is 'bigint': expected binary or string"),
        (
            "'v' value; cast(7 as int) partition",
            {"partitioner": "column"},
            "column 'partition' is 7: expected partitions 0",
        ),
        ("'v' value", {"partitioner": "column"}, "expected a frame with a column 'partition'"),
        ("'v' value", {"partitioner": "ring"}, "partitioner is 'ring'"),
        ("'v' value; '' id", {}, "column 'id' is '': expected no empty string"),
        ("cast(null as string) value", {}, "column 'value' is missing: expected no null"),
        ("repeat('x', 1100000) value", {}, "in bytes is 1100000, beyond the limit of 1048576"),
    ],
)
def test_an_invalid_write_is_refused_and_nothing_is_written(
    spark: SparkSession, log: str, frame: str, options: dict[str, str], message: str
) -> None:
    create(log, "orders", 3)
    with pytest.raises(PySparkException, match=message):
        write(spark.range(10).selectExpr(*frame.split("; ")), log, **{"topic": "orders"} | options)
    assert contents(log, "orders") == [[], [], []]


def test_a_topic_is_never_overwritten(spark: SparkSession, log: str) -> None:
    create(log, "orders", 1)
    fill(log, "orders", 5)
    with pytest.raises(PySparkException, match="mode is 'overwrite': expected append"):
        rows(spark, 5).write.format("shardyard").options(log=log, topic="orders").mode("overwrite").save()
    assert len(contents(log, "orders")[0]) == 5


# Streams


@pytest.fixture
def copied(spark: SparkSession, log: str, tmp_path: Path) -> Callable[..., None]:
    """Copy new records of `orders` to `copy` with a stream that continues where it stopped."""

    def copy(**options: Any) -> None:
        stream = spark.readStream.format("shardyard").options(log=log, topics="orders", startingOffsets="earliest")
        frame = stream.option("maxRecordsPerTrigger", 70).load()
        writer = frame.writeStream.format("shardyard").options(log=log, topic="copy", **options)
        writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint"))
        writer.trigger(availableNow=True).start().awaitTermination()

    return copy


def test_a_stream_writes_each_record_once_in_order(log: str, copied: Callable[..., None]) -> None:
    create(log, "orders", 3)
    create(log, "copy", 5)
    fill(log, "orders", 200)
    copied()
    fill(log, "orders", 100, first=200)
    copied()
    written = contents(log, "copy")
    assert numbers(written) == list(range(300))
    assert in_order(written)


def test_a_batch_that_spark_replays_adds_nothing(log: str, copied: Callable[..., None], tmp_path: Path) -> None:
    create(log, "orders", 3)
    create(log, "copy", 5)
    fill(log, "orders", 200)
    copied()
    commits = sorted((tmp_path / "checkpoint" / "commits").glob("[0-9]*"))
    commits[-1].unlink()  # as if the driver had died after the write, before its commit
    (commits[-1].parent / f".{commits[-1].name}.crc").unlink()
    fill(log, "orders", 100, first=200)
    copied()
    assert numbers(contents(log, "copy")) == list(range(300))


def test_a_new_checkpoint_is_a_new_query(log: str, copied: Callable[..., None], tmp_path: Path) -> None:
    create(log, "orders", 1)
    create(log, "copy", 1)
    fill(log, "orders", 50)
    copied()
    (tmp_path / "checkpoint").rename(tmp_path / "old")
    copied()
    assert numbers(contents(log, "copy")) == sorted([*range(50)] * 2)


def test_a_stream_needs_a_checkpoint_option_or_a_producers_name(spark: SparkSession, log: str, tmp_path: Path) -> None:
    create(log, "orders", 1)
    fill(log, "orders", 5)
    create(log, "copy", 1)
    spark.conf.set("spark.sql.streaming.checkpointLocation", str(tmp_path / "elsewhere"))
    try:
        stream = (
            spark.readStream.format("shardyard").options(log=log, topics="orders", startingOffsets="earliest").load()
        )
        query = stream.writeStream.format("shardyard").options(log=log, topic="copy").trigger(availableNow=True).start()
        with pytest.raises(PySparkException, match="option 'producer' is missing: expected a checkpointLocation"):
            query.awaitTermination()
    finally:
        spark.conf.unset("spark.sql.streaming.checkpointLocation")
    assert contents(log, "copy") == [[]]


def test_a_stream_follows_its_topic_when_it_moves(log: str, copied: Callable[..., None]) -> None:
    create(log, "orders", 3)
    create(log, "copy", 2)
    create(log, "copy.2", 5)
    fill(log, "orders", 100)
    copied()
    with blocking(log) as opened:
        opened.wait(move(opened.log, "copy", "copy.2"))
    fill(log, "orders", 100, first=100)
    copied()
    assert numbers(contents(log, "copy")) == list(range(100))
    assert numbers(contents(log, "copy.2")) == list(range(100, 200))


# Staging


def stage(staging: Staging, values: range) -> str:
    data = numbered(values, 7)
    name = staging.write([(data, Modulus("fnv1a32", 3).place_array(data["key"]).to_numpy())])
    assert name is not None
    return name


def run(log: str, manifest: Manifest) -> int:
    with blocking(log) as opened:
        return opened.wait(commit(opened.log, Staging(staging_folder(log)), manifest))


class Crash(Exception):
    pass


def fail_after(appends: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every append after so many fail."""
    append_for_real = SqliteLog.append
    left = appends

    async def append(self: SqliteLog, *args: Any, **options: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise Crash
        return await append_for_real(self, *args, **options)

    monkeypatch.setattr(SqliteLog, "append", append)


def test_an_interrupted_batch_is_finished_with_the_files_of_the_first_attempt(
    log: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardyard.pipeline.source.staging.APPEND_RECORDS", 10)
    epoch = create(log, "orders", 3).epoch
    staging = Staging(staging_folder(log))
    first = Manifest("p", 4, "orders", epoch, (stage(staging, range(100)), stage(staging, range(100, 200))), {})
    with monkeypatch.context() as patch:
        fail_after(9, patch)
        with pytest.raises(Crash):
            run(log, first)
    assert 0 < len(numbers(contents(log, "orders"))) < 200
    # In a replay the rows may be in other tasks: the files of the first attempt count.
    again = Manifest("p", 4, "orders", epoch, (stage(staging, range(150)), stage(staging, range(150, 200))), {})
    run(log, again)
    written = contents(log, "orders")
    assert numbers(written) == list(range(200))
    assert in_order(written)
    assert run(log, Manifest("p", 4, "orders", epoch, (stage(staging, range(200)),), {})) == 0
    assert len(numbers(contents(log, "orders"))) == 200
    assert sorted(path.name for path in staged_files(log)) == ["done.json", "p.lock"]


def stage_in_task(sink: StreamSink | BatchSink) -> list[WriterCommitMessage | None]:
    """What Spark has when the only task of a batch of 100 records is done."""
    return [sink.write(iter([numbered(range(100), 7).select(["id", "key", "value"])]))]


def test_a_batch_whose_commit_fails_is_finished_by_the_next_attempt_after_spark_has_aborted_it(
    log: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(log, "orders", 3)
    options = write_options({"log": log, "topic": "orders", "producer": "p"}, streaming=True)
    with monkeypatch.context() as patch:
        fail_after(1, patch)
        for _ in range(2):
            sink = StreamSink(options)
            messages = stage_in_task(sink)
            with pytest.raises(Crash):
                sink.commit(messages, 0)
            sink.abort(messages, 0)
    assert 0 < len(numbers(contents(log, "orders"))) < 100
    sink = StreamSink(options)
    sink.commit(stage_in_task(sink), 0)
    assert numbers(contents(log, "orders")) == list(range(100))
    assert [path for path in staged_files(log) if path.suffix == ".arrow"] == []


def test_a_write_without_a_name_leaves_nothing_behind_when_its_commit_fails(
    log: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(log, "orders", 3)
    sink = BatchSink(write_options({"log": log, "topic": "orders"}, streaming=False))
    messages = stage_in_task(sink)
    fail_after(1, monkeypatch)
    with pytest.raises(Crash):
        sink.commit(messages)
    sink.abort(messages)
    assert staged_files(log) == []


@pytest.mark.parametrize("dropped", [False, True])
def test_records_for_a_partition_that_was_contracted_go_to_the_remaining_ones(log: str, dropped: bool) -> None:
    epoch = create(log, "orders", 3).epoch
    staging = Staging(staging_folder(log))
    manifest = Manifest("p", 0, "orders", epoch, (stage(staging, range(200)),), {"placing": [None, None]})
    with blocking(log) as opened:
        opened.wait(opened.log.contract_topic("orders", 2))
        if dropped:
            opened.wait(opened.log.drop_partitions("orders", 2))
    run(log, manifest)
    assert sorted(numbers(contents(log, "orders"))) == list(range(200))


def test_a_batch_interrupted_by_a_move_is_finished_in_the_successor(log: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardyard.pipeline.source.staging.APPEND_RECORDS", 10)
    epoch = create(log, "orders", 3).epoch
    create(log, "orders.2", 4)
    staging = Staging(staging_folder(log))
    manifest = Manifest("p", 0, "orders", epoch, (stage(staging, range(200)),), {"placing": [None, None]})
    left = 9

    async def move_at_the_ninth(self: SqliteLog, *args: Any, **options: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            await move(self, "orders", "orders.2")
        return await append_for_real(self, *args, **options)

    append_for_real = SqliteLog.append
    with monkeypatch.context() as patch:
        patch.setattr(SqliteLog, "append", move_at_the_ninth)
        patch.setattr(Staging, "finish", lambda *_: None)  # and the driver died before it recorded that
        run(log, manifest)
    run(log, manifest)
    old, new = contents(log, "orders"), contents(log, "orders.2")
    assert sorted(numbers(old) + numbers(new)) == list(range(200))
    assert numbers(new)
    assert in_order(new)
    assert all(Modulus("fnv1a32", 4).place(r.key) == i for i, records in enumerate(new) for r in records)


def test_appends_with_a_stamp_too_old_to_be_known_are_not_repeated(log: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardyard.pipeline.source.staging.APPEND_RECORDS", 1)
    epoch = create(log, "orders", 3).epoch
    staging = Staging(staging_folder(log))
    manifest = Manifest("p", 0, "orders", epoch, (stage(staging, range(400)),), {})
    with monkeypatch.context() as patch:
        patch.setattr(Staging, "finish", lambda *_: None)  # the driver died after the last append
        run(log, manifest)
    run(log, manifest)
    assert numbers(contents(log, "orders")) == list(range(400))


def test_records_staged_for_a_topic_that_was_recreated_are_not_appended(log: str) -> None:
    epoch = create(log, "orders", 3).epoch
    manifest = Manifest("p", 0, "orders", epoch - 1, (stage(Staging(staging_folder(log)), range(10)),), {})
    with pytest.raises(InvalidValue, match="the one the records were staged for"):
        run(log, manifest)
    assert contents(log, "orders") == [[], [], []]


def test_files_of_failed_tasks_are_deleted_after_a_day(log: str) -> None:
    create(log, "orders", 3)
    staging = Staging(staging_folder(log))
    old, new = stage(staging, range(5)), stage(staging, range(5))
    path = staging_folder(log) / "files" / old
    os.utime(path, (time.time() - 25 * 3600,) * 2)
    staging.clear_orphans()
    assert [p.name for p in staged_files(log)] == [new]
