"""The data source on a log in PostgreSQL: topics are read and written, in batches and as streams."""

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from shardyard.model import InvalidValue
from shardyard.pipeline.source.staging import STAGING_VARIABLE, staging_folder
from tests.pipeline.logs import by_key, contents, create, fill
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


def test_a_write_without_a_folder_to_stage_in_says_how_to_name_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(STAGING_VARIABLE, raising=False)
    with pytest.raises(InvalidValue, match="a folder that the driver and all workers can reach") as refused:
        staging_folder(f"postgresql://yard:{PASSWORD}@127.0.0.1/yard")
    assert PASSWORD not in str(refused.value)
