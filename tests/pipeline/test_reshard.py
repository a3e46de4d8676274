"""reshard: the same records on other partitions, while producers and groups continue. Spark is not needed for few."""

import asyncio
import errno
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from shardyard.log import Sender, open_log
from shardyard.log.sqlite import SqliteLog
from shardyard.model import (
    Busy,
    Damaged,
    InvalidCall,
    InvalidValue,
    Moved,
    Partition,
    Record,
    Retention,
    SealLost,
    Topic,
    TopicExists,
    UnknownTopic,
)
from shardyard.pipeline.blocking import blocking
from shardyard.pipeline.partitioning import PartitionerSpec
from shardyard.pipeline.reshard import copying, direct_rounds, seal
from shardyard.pipeline.reshard.copying import Copying
from shardyard.pipeline.reshard.direct_rounds import DirectRounds
from shardyard.pipeline.reshard.job import Job, abort, job_folder, lock_job, next_name
from shardyard.pipeline.reshard.positions import GroupPositions
from shardyard.pipeline.reshard.reshard import reshard
from shardyard.pipeline.source.staging import Staging, commit, staging_folder
from shardyard.placement import Jump, Modulus
from shardyard.queues.settings import WATCH_NAME
from shardyard.registry import open_registry
from tests.pipeline.logs import append, by_key, consume, contents, create, fill, ids, url


@pytest.fixture
def log(tmp_path: Path) -> str:
    return url(tmp_path)


@pytest.fixture
def registry(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'registry.db'}"


def no_spark() -> SparkSession:
    raise AssertionError("so few records are copied without Spark")


def leftover_files(log: str) -> list[Path]:
    return [path for path in staging_folder(log).rglob("*") if path.is_file() and path.suffix != ".lock"]


@pytest.mark.parametrize(
    ("options", "partitioner"),
    [
        ({"partitions": 7}, Modulus("fnv1a32", 7)),
        ({"partitions": 2}, Modulus("fnv1a32", 2)),
        ({"partitions": 3, "partitioner": "jump"}, Jump("xxh64", 3)),
    ],
    ids=["more", "fewer", "another partitioner"],
)
def test_every_record_is_on_the_new_partition_of_its_key_in_order(
    log: str, options: dict[str, Any], partitioner: Modulus | Jump
) -> None:
    create(log, "orders", 3)
    fill(log, "orders", 500)
    append(log, "orders", 1, [Record(f"free-{n}", None, b"", (("tag", b"x"),), 5 + n) for n in range(10)])
    before = contents(log, "orders")
    done = reshard(no_spark, log, "orders", **options)
    assert (done.target, done.records) == ("orders.2", 510)
    after = contents(log, "orders.2")
    assert sorted((r for p in after for r in p), key=lambda r: r.id) == sorted(
        (r for p in before for r in p), key=lambda r: r.id
    )
    keyed = [[r for r in records if r.key is not None] for records in after]
    assert by_key(keyed) == by_key([[r for r in records if r.key is not None] for records in before])
    assert all(partitioner.place(r.key) == i for i, records in enumerate(keyed) for r in records)
    assert contents(log, "orders") == before  # the old topic stays
    assert leftover_files(log) == []


def test_the_topic_moves_with_its_kind_and_retention(log: str) -> None:
    create(log, "orders", 2)
    with blocking(log) as opened:
        opened.wait(opened.log.set_retention("orders", Retention(age_ms=10**12)))
    fill(log, "orders", 20)
    reshard(no_spark, log, "orders", partitions=4, target="orders-wide")
    with blocking(log) as opened:
        assert opened.wait(opened.log.topic("orders")).successor == "orders-wide"
        assert opened.wait(opened.log.topic("orders-wide")).retention == Retention(age_ms=10**12)
        with pytest.raises(Moved):
            opened.wait(opened.log.append(Partition("orders", 0), [Record("x", None, b"")]))


def test_a_topic_can_be_resharded_repeatedly(log: str) -> None:
    create(log, "orders", 2)
    fill(log, "orders", 60)
    assert reshard(no_spark, log, "orders", partitions=4).target == "orders.2"
    fill(log, "orders.2", 40, first=60)
    assert reshard(no_spark, log, "orders.2", partitions=3).target == "orders.3"
    assert len(ids(contents(log, "orders.3"))) == 100
    with pytest.raises(Moved, match=r"resharded already, and continues as 'orders\.2': to reshard again"):
        reshard(no_spark, log, "orders", partitions=5)


def test_round_robin_keeps_every_record_but_no_order(log: str) -> None:
    create(log, "orders", 3)
    fill(log, "orders", 90)
    reshard(no_spark, log, "orders", partitions=3, partitioner="round_robin")
    after = contents(log, "orders.2")
    assert ids(after) == ids(contents(log, "orders"))
    assert max(map(len, after)) - min(map(len, after)) <= 3


def test_a_topic_that_is_expanded_during_the_reshard_is_copied_once(
    log: str, registry: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(log, "orders", 2)
    fill(log, "orders", 100)
    asyncio.run(consume(log, registry, "orders", 30, []))
    real = commit
    expanded = False

    async def expand(opened: Any, staging: Any, manifest: Any) -> int:
        nonlocal expanded
        if not expanded:
            expanded = True
            await opened.expand_topic("orders", 4)
            await opened.append(Partition("orders", 3), [Record(f"new-{n}", b"new", b"") for n in range(10)])
        return await real(opened, staging, manifest)

    monkeypatch.setattr(copying, "commit", expand)
    done = reshard(no_spark, log, "orders", partitions=5, registry=registry)
    assert done.records == 110
    assert ids(contents(log, "orders.2")) == ids(contents(log, "orders"))


def test_files_of_an_earlier_reshard_are_ignored(log: str) -> None:
    create(log, "orders", 2)
    fill(log, "orders", 50)
    home = staging_folder(log) / "reshards" / "topic-orders"
    (home / "rounds-0").mkdir(parents=True)
    stale = {"starts": [0, 0], "ends": [50, 50], "chunks": [], "target_ends": [50, 50, 50]}
    for folder in home.glob("rounds*"):
        (folder / "00000000.json").write_text(json.dumps(stale))
    assert reshard(no_spark, log, "orders", partitions=3).records == 50
    assert len(ids(contents(log, "orders.2"))) == 50


def test_a_topic_can_have_a_name_that_is_special_in_paths(log: str) -> None:
    create(log, "..orders", 2)
    fill(log, "..orders", 20)
    assert reshard(no_spark, log, "..orders", partitions=3, target="dots").records == 20


def test_a_registry_that_does_not_exist_is_refused(log: str, tmp_path: Path) -> None:
    create(log, "orders", 2)
    with pytest.raises(InvalidValue, match=r"registry is .*: expected one that exists"):
        reshard(no_spark, log, "orders", partitions=3, registry=f"sqlite:///{tmp_path / 'typo.db'}")
    assert not (tmp_path / "typo.db").exists()


def test_a_round_without_spark_holds_a_limited_number_of_bytes(log: str, monkeypatch: pytest.MonkeyPatch) -> None:
    create(log, "orders", 4)
    for partition in range(4):
        append(log, "orders", partition, [Record(f"{n}", None, b"v" * 10_000) for n in range(20)])
    monkeypatch.setattr(direct_rounds, "ROUND_BYTES", 4 * 40_000)
    job = Job("orders", 1, "orders.2", 1, PartitionerSpec("modulus", "fnv1a32", 5), Retention())
    with blocking(log) as opened:
        done, _ = DirectRounds(opened, Staging(staging_folder(log)), job).stage([0] * 4, [20] * 4)
    assert all(0 < end <= 5 for end in done.ends), "one record more than fits is read at most"


def test_the_default_name_of_the_target_has_the_next_free_number() -> None:
    assert next_name("orders", []) == "orders.2"
    assert next_name("orders", ["orders.2"]) == "orders.3"
    assert next_name("orders.9", []) == "orders.10"


# Producers and groups


def test_groups_continue_where_they_were(log: str, registry: str) -> None:
    create(log, "orders", 3)
    fill(log, "orders", 300)
    seen: list[str] = []
    asyncio.run(consume(log, registry, "orders", 100, seen))
    done = reshard(no_spark, log, "orders", partitions=8, registry=registry)
    assert done.groups == {"billing": 0}
    asyncio.run(consume(log, registry, "orders", 300, seen))  # under its old name
    assert sorted(seen) == ids(contents(log, "orders"))


def test_brokers_learn_that_the_topic_has_moved(log: str, registry: str) -> None:
    create(log, "orders", 3)
    with open_registry(registry) as opened:
        signalled = threading.Event()
        opened.watch(WATCH_NAME, signalled.set)
        reshard(no_spark, log, "orders", partitions=8, registry=registry)
        assert signalled.wait(60)


def test_producers_keep_writing_and_nothing_is_lost_or_duplicated(log: str) -> None:
    create(log, "orders", 3)
    fill(log, "orders", 1000)

    sent = [0, 0, 0]

    async def produce(name: int, stop: asyncio.Event) -> int:
        n = 0
        async with open_log(log) as opened:
            sender = Sender(opened, "orders")
            while not stop.is_set():
                await sender.send(
                    [Record(f"live-{name}-{n + i:06}", b"live-%d-%d" % (name, i), b"v") for i in range(5)]
                )
                n += 5
                sent[name] = n
                await asyncio.sleep(0.005)
        assert sender.topic is not None
        assert sender.topic.name == "orders.2"
        return n

    async def scenario() -> list[int]:
        stop = asyncio.Event()
        producers = [asyncio.create_task(produce(name, stop)) for name in range(3)]
        done = await asyncio.to_thread(reshard, no_spark, log, "orders", partitions=5)
        assert done.records > 1000
        goal = [n + 50 for n in sent]
        async with asyncio.timeout(60):
            while any(n < wanted for n, wanted in zip(sent, goal, strict=True)):  # noqa: ASYNC110 on the new topic, too
                await asyncio.sleep(0.005)
        stop.set()
        return await asyncio.gather(*producers)

    counts = asyncio.run(scenario())
    expected = [f"live-{name}-{n:06}" for name, count in enumerate(counts) for n in range(count)]
    written = contents(log, "orders.2")
    assert [i for i in ids(written) if i.startswith("live")] == sorted(expected)
    assert len(ids(written)) == 1000 + sum(counts)
    assert all(
        found == sorted(found) for key, found in by_key(written).items() if key is not None and key.startswith(b"live")
    )


# Interruptions


class Crash(Exception):
    pass


def stall_switches(log: str, monkeypatch: pytest.MonkeyPatch, times: int, *, early: bool = False) -> list[str]:
    """Stall the first switches until their seal has ended, and send a record meanwhile. Returns the ids of these.

    `early`: before it is checked whether the copy is complete, and not after it.
    """
    sent: list[str] = []
    place: tuple[type, str] = (Copying, "check_complete") if early else (GroupPositions, "transfer")
    real = getattr(*place)

    def stalled(*args: Any) -> Any:
        if len(sent) < times:
            sent.append(f"late-{len(sent)}")
            with blocking(log) as other:
                send = Sender(other.log, "orders").send([Record(sent[-1], b"key-1", b"v")])
                other.wait(send)  # returns when the seal has ended
        return real(*args)

    monkeypatch.setattr(seal, "SEAL_SECONDS", 0.5)
    monkeypatch.setattr(seal, "RENEW_SECONDS", 3600.0)
    monkeypatch.setattr(*place, stalled)
    return sent


@pytest.mark.parametrize("early", [False, True], ids=["after the check", "before the check"])
def test_a_reshard_that_was_stalled_until_its_seal_ended_copies_what_came_and_seals_again(
    log: str, monkeypatch: pytest.MonkeyPatch, early: bool
) -> None:
    create(log, "orders", 3)
    fill(log, "orders", 200)
    stall_switches(log, monkeypatch, 1, early=early)
    done = reshard(no_spark, log, "orders", partitions=5)
    assert done.records == 201
    assert done.sealed_seconds >= 0.5, "the seal of the first attempt counts"
    before = contents(log, "orders")
    assert "late-0" in ids(before)
    assert by_key(contents(log, "orders.2")) == by_key(before)


def test_a_reshard_that_always_loses_its_seal_does_not_move_the_topic_and_the_next_run_does(
    log: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(log, "orders", 3)
    fill(log, "orders", 200)
    with monkeypatch.context() as patch:
        sent = stall_switches(log, patch, 1000)
        with pytest.raises(SealLost, match="topic 'orders' is not sealed by 'reshard-"):
            reshard(no_spark, log, "orders", partitions=5)
    with blocking(log) as opened:
        topic = opened.wait(opened.log.topic("orders"))
        assert (topic.sealed, topic.successor) == (False, None)
    done = reshard(no_spark, log, "orders", partitions=5)
    assert done.records == 200 + len(sent)
    assert done.sealed_seconds >= 0.5 * len(sent), "over all attempts of both runs"
    assert by_key(contents(log, "orders.2")) == by_key(contents(log, "orders"))


def test_a_reshard_renews_its_seal_while_it_copies(log: str, monkeypatch: pytest.MonkeyPatch) -> None:
    create(log, "orders", 3)
    fill(log, "orders", 50)
    renewed: list[int] = []
    enough = threading.Event()
    seal_topic = SqliteLog.seal_topic

    async def counting(self: SqliteLog, *args: Any, **options: Any) -> Any:
        topic = await seal_topic(self, *args, **options)
        renewed.append(topic.generation)
        if len(renewed) == 10:
            enough.set()
        return topic

    def takes_long(*args: Any) -> dict[str, int]:
        assert enough.wait(60)
        return transfer(*args)

    transfer = GroupPositions.transfer
    monkeypatch.setattr(seal, "SEAL_SECONDS", 1.0)
    monkeypatch.setattr(seal, "RENEW_SECONDS", 0.2)
    monkeypatch.setattr(GroupPositions, "transfer", takes_long)
    monkeypatch.setattr(SqliteLog, "seal_topic", counting)
    assert reshard(no_spark, log, "orders", partitions=5).records == 50
    assert len(set(renewed)) == 1, "it never lost it"


def test_a_seal_that_was_lost_and_taken_again_is_released(log: str, monkeypatch: pytest.MonkeyPatch) -> None:
    create(log, "orders", 1)
    unseal_topic = SqliteLog.unseal_topic
    unsealed = threading.Semaphore(0)

    async def counting(self: SqliteLog, *args: Any) -> Topic:
        topic = await unseal_topic(self, *args)
        unsealed.release()
        return topic

    monkeypatch.setattr(seal, "RENEW_SECONDS", 0.01)
    monkeypatch.setattr(SqliteLog, "unseal_topic", counting)
    with blocking(log) as opened, seal.sealed(opened, "orders", seal.SealTimes(staging_folder(log))) as held:
        opened.wait(opened.log.unseal_topic("orders", held.holder))  # as if its time were over
        assert unsealed.acquire(timeout=30)
        assert unsealed.acquire(timeout=30), "the renewal sealed it again, under a generation that nobody can use"
        append(log, "orders", 0, [Record("next", None, b"")])


def test_a_reshard_whose_folder_is_full_while_it_holds_the_seal_succeeds(
    log: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    create(log, "orders", 3)
    fill(log, "orders", 50)
    put, transfer = seal.SealTimes.put, GroupPositions.transfer
    refused = threading.Event()
    stored: list[seal.SealTime] = []

    def full(times: seal.SealTimes, time: seal.SealTime) -> None:
        if stored:
            refused.set()
            raise OSError(errno.ENOSPC, "no space left on device")
        put(times, time)
        stored.append(time)

    def after_a_renewal(*args: Any) -> dict[str, int]:
        assert refused.wait(30)
        return transfer(*args)

    monkeypatch.setattr(seal, "RENEW_SECONDS", 0.01)
    monkeypatch.setattr(seal.SealTimes, "put", full)
    monkeypatch.setattr(GroupPositions, "transfer", after_a_renewal)
    assert reshard(no_spark, log, "orders", partitions=5).records == 50
    assert len(ids(contents(log, "orders.2"))) == 50
    assert "may be reported wrongly: [Errno 28] no space left on device" in caplog.text


def test_a_reshard_waits_while_someone_else_has_the_topic_sealed(log: str) -> None:
    create(log, "orders", 3)
    fill(log, "orders", 50)
    with blocking(log) as opened:
        opened.wait(opened.log.seal_topic("orders", "someone else", seconds=1.0))
    assert reshard(no_spark, log, "orders", partitions=5).records == 50
    assert len(ids(contents(log, "orders.2"))) == 50


def test_a_topic_never_moves_to_a_copy_that_differs(log: str, monkeypatch: pytest.MonkeyPatch) -> None:
    create(log, "orders", 3)
    fill(log, "orders", 50)

    real = commit

    async def add_stray_record(opened: Any, staging: Any, manifest: Any) -> int:
        await opened.append(Partition("orders.2", 0), [Record("stray", b"k", b"v")])
        return await real(opened, staging, manifest)

    monkeypatch.setattr(copying, "commit", add_stray_record)
    with pytest.raises(Damaged, match=r"orders\.2 is damaged: partition 0 has \d+ records .* abort the reshard"):
        reshard(no_spark, log, "orders", partitions=5)
    with blocking(log) as opened:
        topic = opened.wait(opened.log.topic("orders"))
        assert not topic.sealed
        assert topic.successor is None
    assert abort(log, "orders") == "orders.2"
    assert leftover_files(log) == []
    with blocking(log) as opened, pytest.raises(UnknownTopic):
        opened.wait(opened.log.topic("orders.2"))


def other_value(data: pa.RecordBatch) -> pa.RecordBatch:
    values = pa.array([b"other", *data["value"].to_pylist()[1:]], pa.binary())
    return data.set_column(data.schema.get_field_index("value"), data.schema.field("value"), values)


@pytest.mark.parametrize(
    "tamper",
    [
        lambda data: data.slice(1),
        lambda data: pa.concat_batches([data.slice(0, 1), data]),
        lambda data: data.take(pa.array([1, 0, *range(2, len(data))])),
        other_value,
    ],
    ids=["one missing", "one twice", "another order", "another value"],
)
def test_a_topic_never_moves_to_a_copy_with(
    log: str, tamper: Callable[[pa.RecordBatch], pa.RecordBatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    create(log, "orders", 1)
    fill(log, "orders", 50, keys=1)
    read = Staging.read
    monkeypatch.setattr(Staging, "read", lambda staging, name: [tamper(data) for data in read(staging, name)])
    with pytest.raises(Damaged, match=r"orders\.2 is damaged: partition \d has \d+ records"):
        reshard(no_spark, log, "orders", partitions=2)
    with blocking(log) as opened:
        topic = opened.wait(opened.log.topic("orders"))
        assert (topic.sealed, topic.successor) == (False, None)


def test_a_topic_never_moves_to_a_copy_with_extra_records(log: str, monkeypatch: pytest.MonkeyPatch) -> None:
    create(log, "orders", 3)
    fill(log, "orders", 50)
    real = SqliteLog.seal_topic

    async def seal_and_add_stray_record(opened: SqliteLog, name: str, holder: str, **options: Any) -> Topic:
        await opened.append(Partition("orders.2", 0), [Record("stray", b"k", b"v")])
        return await real(opened, name, holder, **options)

    monkeypatch.setattr(SqliteLog, "seal_topic", seal_and_add_stray_record)
    with pytest.raises(
        Damaged, match=r"orders\.2 is damaged: it has 1 records that were not copied: abort the reshard"
    ):
        reshard(no_spark, log, "orders", partitions=5)
    with blocking(log) as opened:
        assert not opened.wait(opened.log.topic("orders")).sealed


def test_a_topic_never_moves_to_a_copy_that_lacks_a_record(log: str, monkeypatch: pytest.MonkeyPatch) -> None:
    create(log, "orders", 3)
    fill(log, "orders", 50)
    copy, seal_topic = Copying.copy, SqliteLog.seal_topic

    async def append_and_seal(opened: SqliteLog, name: str, holder: str, **options: Any) -> Topic:
        await opened.append(Partition("orders", 0), [Record("last", b"k", b"v")])
        return await seal_topic(opened, name, holder, **options)

    def forgetful(copying: Copying, ends: Any, *, without_spark: bool = False) -> None:
        if not without_spark:  # that is the last round, under the seal
            copy(copying, ends)

    monkeypatch.setattr(SqliteLog, "seal_topic", append_and_seal)
    monkeypatch.setattr(Copying, "copy", forgetful)
    with pytest.raises(Damaged, match=r"orders\.2 is damaged: it lacks 1 records of 'orders': abort the reshard"):
        reshard(no_spark, log, "orders", partitions=5)


def crash_reshard(log: str, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """Reshard 50 records, and crash at this call of the log."""
    create(log, "orders", 3)
    fill(log, "orders", 50)

    def crash(*_: Any, **__: Any) -> Any:
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(SqliteLog, call, crash)
        with pytest.raises(Crash):
            reshard(no_spark, log, "orders", partitions=5)


def test_an_aborted_reshard_leaves_the_topic_as_it_was(log: str, monkeypatch: pytest.MonkeyPatch) -> None:
    crash_reshard(log, monkeypatch, "move_topic")
    abort(log, "orders")
    fill(log, "orders", 50, first=50)  # the topic takes records again
    with pytest.raises(InvalidCall, match="there is no reshard of 'orders' under way"):
        abort(log, "orders")
    assert reshard(no_spark, log, "orders", partitions=6).records == 100


# Invalid input


@pytest.mark.parametrize(
    ("topic", "options", "kind", "message"),
    [
        ("refunds", {"partitions": 5}, UnknownTopic, "topic 'refunds' does not exist"),
        ("orders", {"partitions": 0}, InvalidValue, "partitions is 0: expected a whole number of at least 1"),
        ("orders", {"partitions": 3}, InvalidValue, "another number or another partitioner than 'orders' has"),
        ("orders", {"partitions": 5, "partitioner": "ring"}, InvalidValue, "partitioner is 'ring'"),
        ("orders", {"partitions": 5, "partitioner": "jump", "hash_": "fnv1a32"}, InvalidValue, "a 64-bit hash"),
        ("orders", {"partitions": 5, "target": "taken"}, TopicExists, "topic 'taken' exists already"),
        ("orders", {"partitions": 5, "target": "no/name"}, InvalidValue, "topic name is 'no/name'"),
    ],
)
def test_an_invalid_reshard_changes_nothing(
    log: str, topic: str, options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    create(log, "orders", 3)
    create(log, "taken", 1)
    with pytest.raises(kind, match=message):
        reshard(no_spark, log, topic, **options)
    with blocking(log) as opened:
        assert [(t.name, t.sealed) for t in opened.wait(opened.log.topics())] == [("orders", False), ("taken", False)]
    assert leftover_files(log) == []


def test_a_second_reshard_of_the_same_topic_is_refused(log: str, monkeypatch: pytest.MonkeyPatch) -> None:
    crash_reshard(log, monkeypatch, "seal_topic")
    with pytest.raises(InvalidCall, match=r"'orders' is being resharded to 'orders\.2' with 5 partitions by modulus"):
        reshard(no_spark, log, "orders", partitions=6)
    folder = job_folder(staging_folder(log), "orders")
    with lock_job(folder, "orders"), pytest.raises(Busy, match="another process is running or aborting it"):
        reshard(no_spark, log, "orders", partitions=5)
    with lock_job(folder, "orders"), pytest.raises(Busy, match="another process is running or aborting it"):
        abort(log, "orders")
    job_file = folder / "job.json"
    assert json.loads(job_file.read_text())["target"] == "orders.2"
    job_file.write_text("{")
    with pytest.raises(Damaged, match=r"job\.json is damaged"):
        reshard(no_spark, log, "orders", partitions=5)
