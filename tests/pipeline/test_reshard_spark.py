"""reshard by Spark, as for a topic with very many records. `test_reshard.py` tests the same without it."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from shardyard.model import Damaged, Partition, Record
from shardyard.pipeline.reshard import copying, spark_rounds
from shardyard.pipeline.reshard.job import Rounds
from shardyard.pipeline.reshard.reshard import reshard
from shardyard.pipeline.source.staging import commit
from shardyard.placement import Jump
from tests.pipeline.logs import append, by_key, consume, contents, create, fill, ids, url


@pytest.fixture(autouse=True)
def by_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "SPARK_ABOVE", 0)
    monkeypatch.setattr(spark_rounds, "RECORDS_PER_TASK", 100)


@pytest.fixture
def log(tmp_path: Path) -> str:
    return url(tmp_path)


@pytest.fixture
def registry(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'registry.db'}"


def test_every_record_is_on_the_new_partition_of_its_key_in_order_and_groups_continue(
    spark: SparkSession, log: str, registry: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(log, "orders", 3)
    fill(log, "orders", 500)
    append(log, "orders", 1, [Record(f"free-{n}", None, b"", (("tag", b"x"),), 5 + n) for n in range(10)])
    seen: list[str] = []
    asyncio.run(consume(log, registry, "orders", 150, seen))
    stored: list[bool] = []
    store = Rounds.store

    def remember(rounds: Rounds, number: int, done: Any) -> None:
        stored.append(done.is_direct)
        store(rounds, number, done)

    monkeypatch.setattr(Rounds, "store", remember)
    done = reshard(spark, log, "orders", partitions=5, partitioner="jump", registry=registry)
    assert done.records == 510
    assert stored
    assert not any(stored), "Spark has copied them"
    before, after = contents(log, "orders"), contents(log, "orders.2")
    keyed = [[record for record in records if record.key is not None] for records in after]
    assert by_key(keyed) == by_key([[record for record in records if record.key is not None] for records in before])
    assert all(Jump("xxh64", 5).place(r.key) == index for index, records in enumerate(keyed) for r in records)
    assert sorted((r for p in after for r in p), key=lambda r: r.id) == sorted(
        (r for p in before for r in p), key=lambda r: r.id
    )
    asyncio.run(consume(log, registry, "orders", 510, seen))
    assert sorted(set(seen)) == ids(before)
    assert len(seen) == 510 + done.groups["billing"]


def test_round_robin_keeps_every_record_but_no_order(spark: SparkSession, log: str) -> None:
    create(log, "orders", 3)
    fill(log, "orders", 90)
    reshard(spark, log, "orders", partitions=3, partitioner="round_robin")
    assert ids(contents(log, "orders.2")) == ids(contents(log, "orders"))


class Crash(Exception):
    pass


@pytest.mark.parametrize(
    "step",
    [
        "shardyard.pipeline.source.staging.Staging.start",
        "shardyard.pipeline.source.staging.Staging.finish",
        "shardyard.pipeline.reshard.spark_rounds.checksum",
    ],
    ids=["staged", "appended", "not compared"],
)
def test_a_round_that_was_interrupted_is_finished_by_the_next_run(
    spark: SparkSession, log: str, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(log, "orders", 3)
    fill(log, "orders", 200)

    def crash(*_: Any, **__: Any) -> Any:
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(step, crash)
        with pytest.raises(Crash):
            reshard(spark, log, "orders", partitions=5)
    assert reshard(spark, log, "orders", partitions=5).records == 200
    assert by_key(contents(log, "orders.2")) == by_key(contents(log, "orders"))


def test_a_topic_never_moves_to_a_copy_that_differs(
    spark: SparkSession, log: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(log, "orders", 3)
    fill(log, "orders", 50)

    async def add_stray_record(opened: Any, staging: Any, manifest: Any) -> int:
        await opened.append(Partition("orders.2", 0), [Record("stray", b"k", b"v")])
        return await commit(opened, staging, manifest)

    monkeypatch.setattr(copying, "commit", add_stray_record)
    with pytest.raises(Damaged, match=r"orders\.2 is damaged: it has Checksum"):
        reshard(spark, log, "orders", partitions=5)
