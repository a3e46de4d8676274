"""The log on PostgreSQL beyond what every log keeps: its database, several processes, and a server in trouble."""

import asyncio
import contextlib
import sys
import threading
import time
from itertools import count, product
from typing import Any

import psycopg
import pytest

from shardyard.log import database, merging, open_log, rules
from shardyard.log.appending import Append
from shardyard.log.postgresql import PostgresqlLog, appends, maintenance, retention, sessions, tail
from shardyard.model import (
    Damaged,
    DatabaseDenied,
    DatabaseUnavailable,
    Fence,
    Fenced,
    InvalidValue,
    OutcomeUnknown,
    Partition,
    PartitionOutOfRange,
    Record,
    Retention,
    Sealed,
    Stamp,
    UnknownTopic,
    WrongSchemaVersion,
)
from shardyard.model.url import parse_url
from shardyard.runtime.clock import ManualClock
from shardyard.runtime.postgresql import Aborted, Connection
from tests.log.samples import HOLDER, T0, T1, TIMEOUT_SECONDS, awaited, contents, records
from tests.postgresql import PASSWORD, PostgresqlServer
from tests.servers import free_port

PRODUCERS = 6
PARTITIONS = [Partition("t", i) for i in range(3)]


@pytest.fixture
def url(postgresql_log_url: str) -> str:
    return postgresql_log_url


def open_(url: str, **options: Any) -> PostgresqlLog:
    return PostgresqlLog(url, maintain_every=None, **options)


def execute(url: str, statement: str) -> list[Any]:
    with psycopg.connect(url, autocommit=True, options="-c search_path=shardyard") as connection:
        cursor = connection.execute(statement.encode())
        return cursor.fetchall() if cursor.description else []


async def waiting(log: PostgresqlLog, partitions: int = 1) -> None:
    """Wait until readers wait for records of so many partitions."""
    while len(log._tail._waiters._waiters) < partitions:  # noqa: ASYNC110 there is no event for it
        await asyncio.sleep(0.001)


# The database ------------------------------------------------------------------------------------------------------


def test_the_tables_are_created_once_in_a_schema_of_their_own(postgresql_url: str) -> None:
    async def use() -> None:
        async with open_log(postgresql_url) as log, open_log(postgresql_url) as other:
            await log.create_topic("t", 1)
            assert await other.topics() == await log.topics()

    asyncio.run(use())
    tables = execute(postgresql_url, "SELECT schemaname, tablename FROM pg_tables WHERE tablename LIKE 'log%'")
    assert {schema for schema, _ in tables} == {"shardyard"}
    assert {"log_topics", "log_partitions", "log_batches", "log_version"} <= {name for _, name in tables}
    assert execute(postgresql_url, "SELECT version FROM log_version") == [(2,)]


def test_tables_of_a_newer_version_are_refused_and_left_alone(postgresql_url: str) -> None:
    asyncio.run(open_(postgresql_url).close())
    execute(postgresql_url, "UPDATE log_version SET version = 99")
    with pytest.raises(WrongSchemaVersion, match="has schema version 99, this Shardyard works with 2") as refused:
        open_(postgresql_url)
    assert PASSWORD not in str(refused.value)
    assert execute(postgresql_url, "SELECT version FROM log_version") == [(99,)]


def test_a_user_who_may_not_create_the_schema_is_told_what_to_run(
    postgresql: PostgresqlServer, postgresql_url: str
) -> None:
    database = postgresql_url.rsplit("/", 1)[1]
    postgresql.execute("CREATE ROLE guest LOGIN PASSWORD 'guest'")
    try:
        with pytest.raises(DatabaseDenied, match="CREATE SCHEMA shardyard AUTHORIZATION"):
            open_(postgresql.url(database, user="guest", password="guest"))
    finally:
        postgresql.execute("DROP ROLE guest")


def test_wrong_credentials_and_an_unreachable_server_are_named_without_the_password(
    postgresql: PostgresqlServer,
) -> None:
    with pytest.raises(DatabaseDenied, match="check the user and the password") as denied:
        open_(postgresql.url("postgres", password="nonsense"))
    with pytest.raises(DatabaseUnavailable, match="refused") as gone:
        open_(f"postgresql://yard:nonsense@127.0.0.1:{free_port()}/yard")
    assert "nonsense" not in f"{denied.value} {gone.value}"
    with pytest.raises(InvalidValue, match="expected postgresql://"):
        open_("sqlite:///log")


@awaited
async def test_damaged_and_missing_batches_are_noticed_and_never_served(url: str) -> None:
    async with open_(url) as log:
        await log.create_topic("t", 2)
        for i in range(3):
            await log.append(T0, records(i))
            await log.append(T1, records(i))
        execute(url, "UPDATE log_batches SET data = set_byte(data, 20, 1 + get_byte(data, 20) % 200) WHERE first = 1")
        second = "SELECT id FROM log_partitions WHERE number = 1"
        execute(url, f"DELETE FROM log_batches WHERE first = 1 AND partition = ({second})")
        for partition, what in ((T0, "fails its checksum"), (T1, "missing")):
            with pytest.raises(Damaged, match=what):
                await log.read(partition, 1)
            with pytest.raises(Damaged, match=what):
                await log.read(partition, 0)
            assert (await log.read(partition, 2)).records() == records(2)
        await log.maintain()
        with pytest.raises(Damaged):
            await log.read(T0, 1)


@awaited
async def test_a_second_batch_at_an_offset_is_refused_as_damage(url: str) -> None:
    async with open_(url) as log:
        await log.create_topic("t", 2)
        await log.append(T0, records(0))
        execute(url, 'UPDATE log_partitions SET "end" = 0')  # as a bad restore would
        with pytest.raises(Damaged):
            await log.append(T0, records(1))
        await log.append(T1, records(2))


@awaited
async def test_a_partition_whose_row_is_missing_is_damaged_and_the_others_are_not(url: str) -> None:
    async with open_(url) as log:
        await log.create_topic("t", 2)
        execute(url, "DELETE FROM log_partitions WHERE number = 0")  # as a bad restore would
        missing, there = await asyncio.gather(
            log.append(T0, records(0)), log.append(T1, records(1)), return_exceptions=True
        )
        assert isinstance(missing, Damaged)
        assert "the row of the partition is missing" in str(missing)
        assert not isinstance(there, BaseException)
        assert await contents(log, T1) == records(1)


@awaited
async def test_seals_go_by_the_time_of_the_database_unless_a_clock_is_given(url: str) -> None:
    clock = ManualClock()
    async with open_(url) as log, open_(url, clock=clock) as virtual:
        await log.create_topic("t", 1)
        await log.seal_topic("t", HOLDER, seconds=3600)
        with pytest.raises(Sealed):
            await log.append(T0, records(0))
        await virtual.append(T0, records(0))  # by its clock, which is behind, the seal is not in force
        await virtual.seal_topic("t", HOLDER, seconds=5)
        with pytest.raises(Sealed):
            await virtual.append(T0, records(1))
        await clock.advance(5.1)
        await virtual.append(T0, records(1))


# Several processes -------------------------------------------------------------------------------------------------


@awaited
async def test_processes_that_append_to_one_partition_share_its_offsets_without_gaps(url: str) -> None:
    script = (
        "import asyncio, sys\n"
        "from shardyard.log import open_log\n"
        "from shardyard.model import Partition, Record, Stamp\n"
        "async def main(url, name):\n"
        "    async with open_log(url) as log:\n"
        "        for i in range(100):\n"
        "            rows = [Record(f'{name}:{i}:{n}', None, b'v', timestamp=1) for n in range(3)]\n"
        "            await log.append(Partition('t', 0), rows, stamp=Stamp(name, i))\n"
        "asyncio.run(main(*sys.argv[1:]))\n"
    )
    async with open_(url) as log:
        topic = await log.create_topic("t", 1)
        processes = [
            await asyncio.create_subprocess_exec(sys.executable, "-c", script, url, name) for name in ("a", "b")
        ]
        seen: list[Record] = []
        while len(seen) < 600:  # every record before one that was seen can be read
            batch = await log.read(T0, len(seen), epoch=topic.epoch, wait=TIMEOUT_SECONDS)
            assert len(batch)
            seen += batch.records()
        for process in processes:
            assert await process.wait() == 0
        assert (await log.span(T0)).end == 600
        for name in ("a", "b"):
            mine = [r.id for r in seen if r.id.startswith(name)]
            assert mine == [f"{name}:{i}:{n}" for i in range(100) for n in range(3)]


@awaited
async def test_a_reader_is_woken_by_records_and_deletions_of_other_processes(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tail, "CHECK_SECONDS", 3600.0)  # notifications alone wake it
    async with open_(url) as log, open_(url) as other:
        await log.create_topic("t", 2)
        for i in range(5):
            reading = asyncio.create_task(log.read(T0, i, wait=TIMEOUT_SECONDS))
            if i % 2:
                await waiting(log)
            await other.append(T0, records(i))
            assert (await reading).records() == records(i)
        dropped = asyncio.create_task(log.read(T1, 0, wait=TIMEOUT_SECONDS))
        deleted = asyncio.create_task(log.read(T0, 5, wait=TIMEOUT_SECONDS))
        await waiting(log, 2)
        await other.contract_topic("t", 1)
        await other.drop_partitions("t", 1)
        with pytest.raises(PartitionOutOfRange):
            await dropped
        await other.delete_topic("t")
        with pytest.raises(UnknownTopic):
            await deleted


@awaited
async def test_a_reader_that_starts_to_wait_while_the_log_is_closed_is_woken(url: str) -> None:
    async with open_(url) as log:
        await log.create_topic("t", 1)
    arrived = log._tail.wait_for({1: 0}, log._tail.news)
    await asyncio.wait([arrived], timeout=TIMEOUT_SECONDS)
    assert arrived.done()


@awaited
async def test_a_reader_finds_records_whose_notification_was_lost(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail, "CHECK_SECONDS", 0.1)
    monkeypatch.setattr(tail.Tail, "_on_notify", lambda *_: None)
    async with open_(url) as log, open_(url) as other:
        await log.create_topic("t", 1)
        reading = asyncio.create_task(log.read(T0, 0, wait=TIMEOUT_SECONDS))
        await waiting(log)
        await other.append(T0, records(0))
        assert (await reading).records() == records(0)


@awaited
async def test_an_append_whose_notification_fails_is_stored_once_all_the_same(
    url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tail, "CHECK_SECONDS", 0.1)
    monkeypatch.setattr(appends, "_NOTIFY", "SELECT 1/0 WHERE %s::text IS NOT NULL AND %s::text[] IS NOT NULL")
    async with open_(url) as log, open_(url) as other:
        await log.create_topic("t", 1)
        reading = asyncio.create_task(other.read(T0, 0, wait=TIMEOUT_SECONDS))
        assert not (await log.append(T0, records(0))).duplicate
        assert (await reading).records() == records(0)
        assert "waiting readers were not notified" in caplog.text
        assert (await log.append(T0, records(1))).first.offset == 1
        assert await contents(log, T0) == records(0, 1)


@awaited
async def test_a_fence_that_is_raised_in_another_process_refuses_appends_from_then_on(url: str) -> None:
    async with open_(url) as log, open_(url) as other:
        await log.create_topic("t", 1)
        for epoch in range(1, 30):
            appends = [log.append(T0, records(epoch), fence=Fence("f", epoch)) for _ in range(3)]
            results = await asyncio.gather(*appends, other.set_fence(Fence("f", epoch + 1)), return_exceptions=True)
            assert all(not isinstance(r, BaseException) or isinstance(r, Fenced) for r in results)
            end = (await log.span(T0)).end
            with pytest.raises(Fenced):
                await log.append(T0, records(epoch), fence=Fence("f", epoch))
            assert (await other.span(T0)).end == end


@awaited
async def test_a_new_retention_does_not_undo_what_an_append_changes_at_the_same_time(url: str) -> None:
    async with open_(url) as log:
        await log.create_topic("t", 1)
        await log.seal_topic("t", HOLDER)
        with psycopg.connect(url, options="-c search_path=shardyard") as appending:
            appending.execute("SELECT FROM log_partitions FOR NO KEY UPDATE")
            appending.execute("UPDATE log_topics SET sealed = false, sealed_by = NULL, sealed_since = 0")
            changing = asyncio.create_task(log.set_retention("t", Retention(age_ms=1)))
            while not execute(url, "SELECT 1 FROM pg_locks WHERE NOT granted"):  # noqa: ASYNC110 there is no event
                await asyncio.sleep(0.001)
        assert (await changing).retention == Retention(age_ms=1)
        assert execute(url, "SELECT sealed, sealed_by, age_ms FROM log_topics") == [(False, None, 1)]


@awaited
async def test_appends_changes_of_topics_and_maintenance_of_several_processes_do_not_disturb_each_other(
    url: str,
) -> None:
    names = ["a", "b", "c"]
    until = time.monotonic() + 3.0
    stored: dict[Partition, list[str]] = {}

    async def produce(log: PostgresqlLog, producer: str, name: str) -> None:
        for i in count():
            partition, row = Partition(name, i % 4), Record(f"{producer}:{i}", None, b"v", timestamp=1)
            with contextlib.suppress(Sealed):
                await log.append(partition, [row], stamp=Stamp(producer, i), fence=Fence(f"{producer}:{name}", i))
                stored.setdefault(partition, []).append(row.id)
            if time.monotonic() > until:
                return

    async def change(log: PostgresqlLog, name: str) -> None:
        while time.monotonic() < until:
            with contextlib.suppress(Sealed, InvalidValue):  # the other process sealed it, or expanded it further
                assert (await log.seal_topic(name, f"{id(log)}")).sealed
                before = await log.span(Partition(name, 0))
                assert await log.span(Partition(name, 0)) == before, "a sealed topic takes no records"
                await log.unseal_topic(name, f"{id(log)}")
                await log.set_retention(name, Retention(bytes_per_partition=10**9))
                await log.expand_topic(name, (await log.topic(name)).partitions + 1)
            await log.maintain()

    async with open_(url) as one, open_(url) as two:
        for name in names:
            await one.create_topic(name, 4)
        async with asyncio.TaskGroup() as tasks:
            for log, name in product((one, two), names):
                tasks.create_task(produce(log, f"p{id(log)}", name))
                tasks.create_task(change(log, name))
        for partition, expected in stored.items():
            assert sorted(r.id for r in await contents(one, partition)) == sorted(expected)


# Maintenance -------------------------------------------------------------------------------------------------------


def batches_of(url: str) -> list[int]:
    """The number of stored batches of each partition that has some."""
    return [n for (n,) in execute(url, "SELECT count(*) FROM log_batches GROUP BY partition ORDER BY partition")]


async def append_small_batches(log: PostgresqlLog, number: int) -> None:
    for i in range(number):
        await asyncio.gather(*(log.append(partition, records(i)) for partition in PARTITIONS))


@awaited
async def test_merging_that_stops_early_continues_with_the_other_partitions_the_next_time(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "STEPS_SECONDS", -1.0)  # one step at a time
    monkeypatch.setattr(merging, "MERGE_BATCHES", 4)
    async with open_(url) as log:
        await log.create_topic("t", len(PARTITIONS))
        await append_small_batches(log, 5)
        for _ in range(2 * len(PARTITIONS)):
            await log._maintain(in_background=True)
        assert max(batches_of(url)) < 5
        for partition in PARTITIONS:
            assert await contents(log, partition) == records(*range(5))


@awaited
async def test_a_step_that_the_database_aborts_is_taken_again(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merging, "MERGE_BATCHES", 4)
    monkeypatch.setattr(maintenance, "FORGET_FROM", 1)
    commit, clock = sessions.Session.commit, ManualClock()
    attempts = count()

    def aborted_every_second_time(self: sessions.Session, connection: Connection, statements: Any) -> None:
        if next(attempts) % 2 == 0:
            raise Aborted("the database", "a deadlock")
        commit(self, connection, statements)

    async with open_(url, clock=clock) as log:
        await log.create_topic("t", len(PARTITIONS))
        await append_small_batches(log, 5)
        await log.append(T0, records(5), stamp=Stamp("p", 0))
        await clock.advance(database.STAMP_MS / 1000 + 1)
        monkeypatch.setattr(sessions.Session, "commit", aborted_every_second_time)
        await log.maintain()
        assert max(batches_of(url)) < 5
        assert execute(url, "SELECT 1 FROM log_stamps") == []


@awaited
async def test_retention_trims_the_same_in_steps_of_any_size(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()

    async def spans(wanted: Retention) -> list[int]:
        async with open_(url, clock=clock) as log:
            topic = await log.create_topic("t", len(PARTITIONS), retention=wanted)
            for i in range(20):
                for partition in PARTITIONS[: 1 + i % 3]:
                    await log.append(partition, [Record(f"{i}", None, b"x" * 100, timestamp=rules.milliseconds(clock))])
                await clock.advance(1)
            await log.maintain()
            firsts = [(await log.span(partition)).first for partition in topic]
            await log.delete_topic("t")
            await log.maintain()
            assert execute(url, "SELECT 1 FROM log_partitions") == []
            return firsts

    for wanted in (Retention(age_ms=9500), Retention(bytes_per_partition=1500), Retention(9500, 1500), Retention(1)):
        expected = await spans(wanted)
        assert any(expected)
        with monkeypatch.context() as patch:
            patch.setattr(retention, "PARTITIONS_A_STEP", 2)
            patch.setattr(retention, "BATCHES_A_STEP", 2)
            assert await spans(wanted) == expected, wanted


@awaited
async def test_only_partitions_that_have_outgrown_their_size_are_added_up_again(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    walked: list[int] = []
    walk = retention.SizeRetention._walk

    def noted(self: Any, connection: Connection, walk_: Any) -> Any:
        walked.append(walk_.partition)
        return walk(self, connection, walk_)

    monkeypatch.setattr(retention.SizeRetention, "_walk", noted)
    async with open_(url) as log:
        await log.create_topic("t", len(PARTITIONS), retention=Retention(bytes_per_partition=10_000))
        await append_small_batches(log, 1)
        await log.maintain()
        assert len(walked) == len(PARTITIONS)
        await log.maintain()
        await log.append(T0, records(1))
        await log.maintain()
        assert len(walked) == len(PARTITIONS)
        for i in range(2, 14):
            await log.append(T0, [Record(f"{i}", None, b"x" * 1000, timestamp=1)])
        await log.maintain()
        assert len(walked) == len(PARTITIONS) + 1
        assert 0 < (await log.span(T0)).first < 14


@awaited
async def test_old_producers_are_forgotten_in_small_steps_and_the_others_remembered(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maintenance, "FORGET_FROM", 1)
    monkeypatch.setattr(maintenance, "STAMPS_A_STEP", 4)
    clock = ManualClock()
    async with open_(url, clock=clock) as log:
        await log.create_topic("t", len(PARTITIONS))
        for producer, partition in product("abcd", PARTITIONS):
            for i in range(2):
                await log.append(partition, records(i), stamp=Stamp(producer, i))
        await clock.advance(database.STAMP_MS / 1000 + 1)
        for partition in PARTITIONS:
            await log.append(partition, records(2), stamp=Stamp("b", 2))
        await log.maintain()
        found = execute(url, "SELECT producer, sequence FROM log_stamps")
        assert sorted(found) == sorted([("b", i) for i in range(3)] * len(PARTITIONS))


# A server in trouble -----------------------------------------------------------------------------------------------


def test_a_commit_whose_response_is_lost_is_reported_in_one_line(url: str) -> None:
    def lose_response() -> None:
        raise psycopg.OperationalError("server closed the connection unexpectedly\n\tThis probably means\n\tmore.")

    session = sessions.Session(parse_url("log", url), "test")
    with pytest.raises(OutcomeUnknown, match=r"lost during a commit \(server closed the connection") as unknown:
        session.run(lambda connection: session.commit(connection, lose_response))
    session.close()
    assert "\n" not in str(unknown.value)


@awaited
async def test_connections_that_were_cut_while_idle_are_replaced_unnoticed(
    postgresql: PostgresqlServer, url: str
) -> None:
    async with open_(url) as log, open_(url) as other:
        await log.create_topic("t", 1)
        for i in range(3):
            await log.append(T0, records(2 * i))
            reading = asyncio.create_task(log.read(T0, 2 * i + 1, wait=TIMEOUT_SECONDS))
            await waiting(log)
            postgresql.cut_connections()
            await other.append(T0, records(2 * i + 1))
            assert (await reading).records() == records(2 * i + 1)
            assert await contents(log, T0) == records(*range(2 * i + 2))
            await log.set_fence(Fence("f", i))


@awaited
async def test_records_that_a_server_lost_are_not_served_from_memory(postgresql: PostgresqlServer, url: str) -> None:
    async with open_(url) as log, open_(url) as other:
        await log.create_topic("t", 1)
        await log.append(T0, records(*range(10)))
        assert (await log.read(T0, 0, max_records=2)).records() == records(0, 1)
        execute(url, "DELETE FROM log_batches")  # as on a server that takes over and has not got them
        execute(url, 'UPDATE log_partitions SET "end" = 0')
        postgresql.cut_connections()
        await other.append(T0, records(*range(10, 20)))
        assert (await log.read(T0, 2, max_records=2)).records() == records(12, 13)


@awaited
async def test_readers_are_woken_although_an_unexpected_error_occurs_once(
    url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tail, "CHECK_SECONDS", 0.05)
    monkeypatch.setattr(tail.Tail, "_on_notify", lambda *_: None)
    async with open_(url) as log, open_(url) as other:
        await log.create_topic("t", 1)
        ends, failed = log._tail._ends, threading.Event()

        def failing(partition_ids: list[int]) -> dict[int, int]:
            if not failed.is_set():
                failed.set()
                raise psycopg.ProgrammingError("unexpected")
            return ends(partition_ids)

        monkeypatch.setattr(log._tail, "_ends", failing)
        reading = asyncio.create_task(log.read(T0, 0, wait=TIMEOUT_SECONDS))
        assert await asyncio.to_thread(failed.wait, TIMEOUT_SECONDS)
        await other.append(T0, records(0))
        async with asyncio.timeout(TIMEOUT_SECONDS / 2):
            assert (await reading).records() == records(0)
    assert "looking for new records failed and will be retried" in caplog.text


@awaited
async def test_a_process_that_is_stopped_during_an_append_delays_others_only_for_a_moment(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "RESPONSE_SECONDS", 1.0)
    async with open_(url) as log:
        await log.create_topic("t", 1)
        stopped = sessions.Session(parse_url("log", url), "stopped")
        ready, resumed = threading.Event(), threading.Event()

        def append(connection: Connection) -> None:
            with connection.pipeline() as pipeline:
                appends.PostgresqlLookup(connection, pipeline, [Append(T0, records(0), 1, None, (), None)])
                ready.set()
                resumed.wait(TIMEOUT_SECONDS)

        stalled = asyncio.create_task(asyncio.to_thread(stopped.run, append))
        await asyncio.to_thread(ready.wait, TIMEOUT_SECONDS)
        started = time.monotonic()
        await log.append(T0, records(1))
        assert 0.5 < time.monotonic() - started < TIMEOUT_SECONDS
        resumed.set()
        await asyncio.gather(stalled, return_exceptions=True)
        stopped.close()
        assert await contents(log, T0) == records(1)
