"""The pipeline on a log in PostgreSQL: topics are read and written, in batches and as streams, and resharded."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from shardyard.log.postgresql import PostgresqlLog
from shardyard.model import InvalidValue, Record
from shardyard.pipeline.reshard.reshard import reshard
from shardyard.pipeline.source.staging import STAGING_VARIABLE, staging_folder
from shardyard.placement import Modulus
from tests.pipeline.logs import append, by_key, consume, contents, create, fill, ids
from tests.postgresql import PASSWORD


def test_a_topic_is_copied_through_spark(spark: SparkSession, postgresql_url: str, tmp_path: Path) -> None:
    create(postgresql_url, "orders", 3)
    create(postgresql_url, "copies", 4)
    fill(postgresql_url, "orders", 2_500)
    frame = spark.read.format("shardyard").options(log=postgresql_url, topics="orders").load()
    assert sorted(int(bytes(row["value"])) for row in frame.select("value").collect()) == list(range(2_500))
    rows = frame.select("id", "key", "value", "headers", "timestamp")
    options = {"log": postgresql_url, "topic": "copies", "staging": str(tmp_path)}
    rows.write.format("shardyard").options(**options).mode("append").save()
    assert {key: sorted(ids) for key, ids in by_key(contents(postgresql_url, "copies")).items()} == {
        key: sorted(ids) for key, ids in by_key(contents(postgresql_url, "orders")).items()
    }


def test_a_stream_writes_each_record_once(spark: SparkSession, postgresql_url: str, tmp_path: Path) -> None:
    folders = {"staging": str(tmp_path), "checkpointLocation": str(tmp_path / "checkpoint")}
    create(postgresql_url, "orders", 2)
    create(postgresql_url, "copies", 2)
    for first in (0, 500):
        fill(postgresql_url, "orders", 500, first=first)
        stream = spark.readStream.format("shardyard").options(
            log=postgresql_url, topics="orders", startingOffsets="earliest"
        )
        query = (
            stream.load()
            .select("id", "key", "value", "headers", "timestamp")
            .writeStream.format("shardyard")
            .options(log=postgresql_url, topic="copies", **folders)
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(120)
        assert by_key(contents(postgresql_url, "copies")) == by_key(contents(postgresql_url, "orders"))


class Crash(Exception):
    pass


@pytest.mark.parametrize("interrupted_at", [None, "move_topic"])
def test_a_topic_is_resharded_and_its_groups_continue_where_they_were(
    spark: SparkSession,
    postgresql_url: str,
    tmp_path: Path,
    interrupted_at: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(STAGING_VARIABLE, str(tmp_path))
    create(postgresql_url, "orders", 3)
    fill(postgresql_url, "orders", 300)
    append(postgresql_url, "orders", 1, [Record(f"free-{n}", None, b"", (("tag", b"x"),), 5 + n) for n in range(10)])
    before = contents(postgresql_url, "orders")
    seen: list[str] = []
    asyncio.run(consume(postgresql_url, postgresql_url, "orders", 100, seen))
    assert 100 <= len(seen) < 310
    if interrupted_at is not None:

        def crash(*_: Any, **__: Any) -> Any:
            raise Crash

        with monkeypatch.context() as patch:
            patch.setattr(PostgresqlLog, interrupted_at, crash)
            with pytest.raises(Crash):
                reshard(spark, postgresql_url, "orders", partitions=7, registry=postgresql_url)
    done = reshard(spark, postgresql_url, "orders", partitions=7, registry=postgresql_url)
    assert (done.target, done.records, done.groups) == ("orders.2", 310, {"billing": 0})

    after = contents(postgresql_url, "orders.2")
    assert sorted(flat(after), key=lambda r: r.id) == sorted(flat(before), key=lambda r: r.id)
    keyed = [[record for record in records if record.key is not None] for records in after]
    assert by_key(keyed) == by_key([[record for record in records if record.key is not None] for records in before])
    partitioner = Modulus("fnv1a32", 7)
    assert all(partitioner.place(record.key) == i for i, records in enumerate(keyed) for record in records)
    assert contents(postgresql_url, "orders") == before  # the old topic stays

    asyncio.run(consume(postgresql_url, postgresql_url, "orders", 310, seen))  # under its old name
    assert sorted(seen) == ids(before), "each record was consumed once"


def flat(partitions: list[list[Record]]) -> list[Record]:
    return [record for records in partitions for record in records]


def test_a_write_without_a_folder_to_stage_in_says_how_to_name_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(STAGING_VARIABLE, raising=False)
    with pytest.raises(InvalidValue, match="a folder that the driver and all workers can reach") as refused:
        staging_folder(f"postgresql://yard:{PASSWORD}@127.0.0.1/yard")
    assert PASSWORD not in str(refused.value)
