"""What only the registry in PostgreSQL does: conflicts of real transactions, lost connections, a server that fails."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import psycopg
import pytest
from sqlalchemy import create_engine, inspect

from shardyard.model import (
    Busy,
    Damaged,
    DatabaseDenied,
    DatabaseUnavailable,
    OutcomeUnknown,
    Partition,
    Position,
    RetryLater,
    UnknownDatabase,
    WrongSchemaVersion,
)
from shardyard.model.url import parse_url
from shardyard.registry import (
    GroupRow,
    Heartbeat,
    MemberRow,
    OwnershipRow,
    PositionCommit,
    Registry,
    Snapshot,
    Transaction,
    open_registry,
    schema,
    sql_transaction,
)
from shardyard.registry.port import TransactionAborted
from shardyard.registry.postgresql import PostgresqlStore, shared_connection
from shardyard.registry.postgresql.shared_connection import SharedConnection
from shardyard.registry.sql import SqlRegistry
from shardyard.runtime import postgresql as runtime_postgresql
from shardyard.runtime.postgresql import connect, listener
from tests.postgresql import PASSWORD, PostgresqlServer, postgresql_server
from tests.registry.blocks import snapshot, transaction, wait_until_listening
from tests.registry.test_migrations import shape

TIMEOUT_SECONDS = 60.0
"""How long a test waits for what must happen soon."""


@pytest.fixture
def registry(postgresql_url: str) -> Iterator[Registry]:
    with opened(postgresql_url) as registry:
        yield registry


def opened(url: str, *, busy_wait: float = 10.0) -> Registry:
    return SqlRegistry(PostgresqlStore(parse_url("registry", url), busy_wait=busy_wait))


def increment(tx: Transaction) -> int:
    row = tx.group("billing") or GroupRow("billing")
    tx.put_group(replace(row, epoch=row.epoch + 1))
    tx.audit("ann", "increment", "billing")
    return row.epoch + 1


def epoch(tx: Snapshot) -> int:
    row = tx.group("billing")
    return 0 if row is None else row.epoch


def count(tx: Snapshot) -> tuple[int, int]:
    """How often `increment` was committed, by both of its traces."""
    return epoch(tx), len(tx.audit_log(limit=10_000))


def in_threads(*works: Callable[[], object]) -> None:
    failed: list[BaseException] = []

    def run(work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 the test shows it
            failed.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_SECONDS)
    assert failed == []


# Opening -----------------------------------------------------------------------------------------------------


def test_a_url_opens_it_in_a_schema_of_its_own_beside_the_tables_of_a_team(
    postgresql: PostgresqlServer, postgresql_url: str
) -> None:
    database = postgresql_url.rsplit("/", 1)[1]
    postgresql.execute("CREATE TABLE groups (recipe text)", database)
    with open_registry(postgresql_url) as registry:
        registry.run(increment)
    with open_registry(postgresql_url) as registry:
        assert registry.read(count) == (1, 1)
    postgresql.execute("SELECT recipe FROM groups", database)


def test_the_migrations_result_in_the_tables_of_the_schema(postgresql: PostgresqlServer) -> None:
    with postgresql.new_database() as migrated, postgresql.new_database() as created:
        opened(migrated).close()
        engines = [create_engine(url.replace("postgresql:", "postgresql+psycopg:")) for url in (migrated, created)]
        schema.METADATA.create_all(engines[1])
        assert shape(inspect(engines[0]), "shardyard") == shape(inspect(engines[1]))
        for engine in engines:
            engine.dispose()


def test_statements_for_one_member_read_no_rows_of_others(postgresql_url: str) -> None:
    """A scan of the table would conflict with every commit of every group."""
    with opened(postgresql_url), connect(parse_url("registry", postgresql_url), "test") as connection:
        connection.execute("SET enable_seqscan = off")  # as the registry does: the table is empty
        dialect = create_engine("postgresql+psycopg://").dialect
        for statement in (sql_transaction._NOTE_RECENT, sql_transaction._OWNERSHIPS_OF):
            compiled = statement.compile(dialect=dialect)
            values = dict.fromkeys(compiled.params, "1")
            plan = connection.execute(f"EXPLAIN {compiled}".encode(), values).fetchall()
            assert "ownerships_by_owner" in str(plan)
            assert "Seq Scan" not in str(plan)


def test_many_may_open_a_new_registry_at_once(postgresql_url: str) -> None:
    def open_and_put() -> None:
        with opened(postgresql_url) as registry:
            registry.run(increment)

    in_threads(*[open_and_put] * 6)
    with opened(postgresql_url) as registry:
        assert registry.read(count) == (6, 6)


def test_a_newer_schema_or_one_that_lost_a_table_is_refused(postgresql: PostgresqlServer, postgresql_url: str) -> None:
    database = postgresql_url.rsplit("/", 1)[1]
    opened(postgresql_url).close()
    postgresql.execute("DROP TABLE shardyard.groups", database)
    with pytest.raises(Damaged, match="groups"), opened(postgresql_url) as registry:
        registry.read(epoch)
    postgresql.execute("UPDATE shardyard.registry_version SET version = 99", database)
    with pytest.raises(WrongSchemaVersion, match="schema version 99"):
        opened(postgresql_url)


@pytest.mark.parametrize(
    ("url", "error"),
    [
        (lambda s: s.url("nowhere"), UnknownDatabase),
        (lambda s: s.url("postgres", password="s3cret"), DatabaseDenied),
        (lambda _: f"postgresql://yard:{PASSWORD}@127.0.0.1:1/x", DatabaseUnavailable),
    ],
)
def test_a_server_that_can_not_be_used_is_a_clear_error_without_a_password(
    postgresql: PostgresqlServer, url: Callable[[PostgresqlServer], str], error: type[Exception]
) -> None:
    with pytest.raises(error, match=r"postgresql://\*\*\*@127\.0\.0\.1") as raised:
        open_registry(url(postgresql))
    assert PASSWORD not in str(raised.value)
    assert "s3cret" not in str(raised.value)


def test_a_connection_that_is_lost_while_it_is_opened_is_reported_as_one_to_retry(
    postgresql_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect_and_lose(*arguments: Any, **options: Any) -> Any:
        connection = connect(*arguments, **options)
        with psycopg.connect(postgresql_url, autocommit=True) as other:
            other.execute("SELECT pg_terminate_backend(%s, 5000)", [connection.info.backend_pid])
        return connection

    monkeypatch.setattr(shared_connection, "connect", connect_and_lose)
    with pytest.raises(RetryLater, match="administrator command"):
        opened(postgresql_url)


def test_time_is_the_databases(postgresql: PostgresqlServer, registry: Registry) -> None:
    with psycopg.connect(postgresql.url("postgres")) as connection:
        row = connection.execute("SELECT extract(epoch FROM clock_timestamp())::float8").fetchone()
    assert row is not None
    assert registry.run(lambda tx: tx.now) == pytest.approx(row[0], abs=TIMEOUT_SECONDS)
    assert registry.run(lambda tx: tx.now) <= registry.read(lambda tx: tx.now)


# Transactions of several processes ---------------------------------------------------------------------------


def test_transactions_of_two_processes_that_conflict_are_run_again_and_lose_no_update(postgresql_url: str) -> None:
    def count_up() -> None:
        with opened(postgresql_url) as registry:
            for _ in range(50):
                registry.run(increment)

    in_threads(count_up, count_up)
    with opened(postgresql_url) as registry:
        assert registry.read(count) == (100, 100)


def test_two_transactions_that_each_read_what_the_other_writes_do_not_both_commit(postgresql_url: str) -> None:
    """Write skew: under weaker isolation both would see no group, and both create one."""

    def create_if_alone(tx: Transaction, name: str) -> None:
        if not tx.groups():
            tx.put_group(GroupRow(name))

    with opened(postgresql_url) as ours, opened(postgresql_url) as theirs:
        with pytest.raises(TransactionAborted), transaction(ours) as first:  # noqa: SIM117 one after the other
            with transaction(theirs) as second:
                create_if_alone(first, "a")
                create_if_alone(second, "b")
        assert [row.name for row in ours.read(lambda tx: tx.groups())] == ["b"]


def test_a_lock_that_another_client_holds_for_too_long_raises_busy(postgresql_url: str) -> None:
    with opened(postgresql_url, busy_wait=0.1) as registry, psycopg.connect(postgresql_url) as other:
        registry.run(increment)
        other.execute("SELECT * FROM shardyard.groups FOR UPDATE")
        with pytest.raises(Busy, match=r"registry postgresql.* was busy for 0\.1 s"):
            registry.run(increment)
        assert registry.read(epoch) == 1
        other.rollback()
        registry.run(increment)
        assert registry.read(count) == (2, 2)


def test_a_row_that_is_never_found_and_exists_all_the_same_is_damage(postgresql_url: str) -> None:
    with opened(postgresql_url, busy_wait=3.0) as registry, psycopg.connect(postgresql_url, autocommit=True) as other:
        registry.run(increment)
        other.execute("CREATE UNIQUE INDEX ON shardyard.groups (assignor)")  # as if an index had lost an entry
        with pytest.raises(Damaged, match="duplicate key value"):
            registry.run(lambda tx: tx.put_group(GroupRow("shipping")))
        assert registry.read(count) == (1, 1)


PARTITION = Partition("orders", 0)


def join(tx: Transaction) -> None:
    tx.put_member(MemberRow("billing", "a", 1, 1, ("orders",), False, None, 10.0, tx.now))
    tx.put_ownerships([OwnershipRow("billing", PARTITION, "a", 1, "a")])


def commit(tx: Transaction) -> list[bool]:
    return tx.commit_positions([PositionCommit("billing", "a", {PARTITION: (1, Position(1, 7))})])


def test_a_guarded_commit_that_waited_for_a_change_of_the_owner_is_refused(postgresql_url: str) -> None:
    with opened(postgresql_url) as ours, opened(postgresql_url) as theirs:
        ours.run(join)
        outcomes: list[list[bool]] = []
        committing = threading.Thread(target=lambda: outcomes.append(ours.run_guarded(commit)))
        with transaction(theirs) as tx, psycopg.connect(postgresql_url, autocommit=True) as observer:
            tx.put_ownerships([OwnershipRow("billing", PARTITION, "b", 2, "b")])
            committing.start()
            wait_until(lambda: is_waiting_for_a_lock(observer))
        committing.join(TIMEOUT_SECONDS)
        assert outcomes == [[False]]
        assert ours.read(lambda tx: tx.ownerships("billing")) == [OwnershipRow("billing", PARTITION, "b", 2, "b")]


def test_a_transaction_that_changes_the_owner_on_an_outdated_state_is_aborted_by_a_guarded_commit(
    postgresql_url: str,
) -> None:
    with opened(postgresql_url) as ours, opened(postgresql_url) as theirs:
        ours.run(join)
        with pytest.raises(TransactionAborted), transaction(theirs) as tx:
            (row,) = tx.ownerships("billing")
            assert ours.run_guarded(commit) == [True]
            assert ours.run_guarded(lambda tx: tx.renew_sessions([Heartbeat("billing", "a", 1)])) == [True]
            tx.put_ownerships([replace(row, owner="b", epoch=2)])  # it would undo the commit
        (row,) = ours.read(lambda tx: tx.ownerships("billing"))
        assert (row.owner, row.committed) == ("a", Position(1, 7))


def is_waiting_for_a_lock(observer: psycopg.Connection) -> bool:
    row = observer.execute("SELECT count(*) FROM pg_locks WHERE NOT granted").fetchone()
    return row is not None and row[0] > 0


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# Lost connections --------------------------------------------------------------------------------------------


def test_connections_that_were_cut_are_replaced_without_an_error(
    postgresql: PostgresqlServer, registry: Registry
) -> None:
    registry.run(increment)
    postgresql.cut_connections()
    registry.run(increment)
    postgresql.cut_connections()
    assert registry.read(count) == (2, 2)


def test_work_whose_connection_is_cut_in_the_middle_is_run_again(
    postgresql: PostgresqlServer, registry: Registry
) -> None:
    runs = 0

    def work(tx: Transaction) -> int:
        nonlocal runs
        runs += 1
        increment(tx)
        if runs == 1:
            postgresql.cut_connections()
        return increment(tx)

    assert registry.run(work) == 2
    assert runs == 2
    assert registry.read(count) == (2, 2)

    def read(tx: Snapshot) -> int:
        nonlocal runs
        runs += 1
        if runs == 3:
            postgresql.cut_connections()
        return epoch(tx)

    assert registry.read(read) == 2
    assert runs == 4


class Loss:
    """Makes the next commit lose its connection: before or after the server carries the commit out."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *,
        carried_out: bool,
        then: Callable[[runtime_postgresql.Connection], None] = lambda _: None,
    ) -> None:
        """`then` is called before the connection is lost."""
        self._carried_out = carried_out
        self._then = then
        self._due = True
        execute, commit = runtime_postgresql.Connection.execute, runtime_postgresql.Connection.commit

        def losing_execute(connection: runtime_postgresql.Connection, query: Any, *args: Any, **options: Any) -> Any:
            if isinstance(query, bytes) and query.endswith(b"COMMIT\n"):
                return self._lose(connection, lambda: execute(connection, query, *args, **options))
            return execute(connection, query, *args, **options)

        monkeypatch.setattr(runtime_postgresql.Connection, "execute", losing_execute)
        monkeypatch.setattr(
            runtime_postgresql.Connection, "commit", lambda self_: self._lose(self_, lambda: commit(self_))
        )

    def _lose(self, connection: runtime_postgresql.Connection, carry_out: Callable[[], object]) -> object:
        due, self._due = self._due, False
        result = carry_out() if not due or self._carried_out else None
        if due:
            self._then(connection)
            connection.close()
            raise psycopg.OperationalError(
                "server closed the connection unexpectedly\n\tThis probably means the server terminated abnormally\n"
            )
        return result


@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("carried_out", [True, False])
def test_a_commit_whose_response_is_lost_is_run_again_only_if_it_was_not_carried_out(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, carried_out: bool, guarded: bool
) -> None:
    run = registry.run_guarded if guarded else registry.run
    run(increment)
    Loss(monkeypatch, carried_out=carried_out)
    assert run(increment) == 2
    assert registry.read(count) == (2, 2)
    assert run(increment) == 3


@pytest.mark.parametrize("mode", ["SERIALIZABLE", "READ COMMITTED"])
def test_a_commit_that_arrives_after_it_was_found_missing_is_not_carried_out(postgresql_url: str, mode: str) -> None:
    """The server may read it from a connection that its client has given up."""
    with opened(postgresql_url) as registry, connect(parse_url("registry", postgresql_url), "test") as late:
        late.execute(shared_connection._REGISTER, ["x"])
        late.execute(f"BEGIN ISOLATION LEVEL {mode}".encode())
        late.execute("INSERT INTO audit (at, who, action, subject, detail) VALUES (1, 'ann', 'late', 'x', 'null')")
        with connect(parse_url("registry", postgresql_url), "test") as asking:
            assert asking.execute(shared_connection._END_WRITER, ["x"]).fetchone() == (0,)
        with pytest.raises((psycopg.errors.SerializationFailure, psycopg.errors.DivisionByZero)):
            late.execute(shared_connection._COMMIT.format(number=1, writer="x").encode())
        late.rollback()
        assert registry.read(count) == (0, 0)


def test_a_read_whose_connection_is_lost_at_its_end_is_read_again(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.run(increment)
    Loss(monkeypatch, carried_out=False)
    monkeypatch.setattr(SharedConnection, "_settle", lambda *_: pytest.fail("there is nothing to settle"))
    assert registry.read(count) == (1, 1)


def test_a_transaction_that_changes_nothing_leaves_nothing_to_sync(postgresql_url: str, registry: Registry) -> None:
    registry.run(increment)
    with psycopg.connect(postgresql_url, autocommit=True) as observer:
        before = observer.execute("SELECT id, last_commit, used_at FROM shardyard.writers").fetchall()
        registry.run(epoch)
        assert observer.execute("SELECT id, last_commit, used_at FROM shardyard.writers").fetchall() == before


def test_a_process_that_was_idle_for_a_day_registers_again(postgresql_url: str) -> None:
    with opened(postgresql_url) as idle, psycopg.connect(postgresql_url, autocommit=True) as other:
        idle.run(increment)
        other.execute("UPDATE shardyard.writers SET used_at = used_at - 86401")
        with opened(postgresql_url) as new:
            new.run(increment)
        assert other.execute("SELECT count(*) FROM shardyard.writers").fetchone() == (1,)
        assert idle.run(increment) == 3
        assert idle.read(count) == (3, 3)


def test_a_commit_whose_outcome_the_server_does_not_know_raises_outcome_unknown(
    registry: Registry, postgresql_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forget(_: object) -> None:
        with psycopg.connect(postgresql_url, autocommit=True) as other:
            other.execute("DELETE FROM shardyard.writers")

    Loss(monkeypatch, carried_out=True, then=forget)
    with pytest.raises(OutcomeUnknown, match="may have been carried out") as raised:
        registry.run(increment)
    assert "\n" not in str(raised.value)
    assert registry.read(count) == (1, 1)


@pytest.mark.parametrize(
    "error", [DatabaseDenied("x", "no", "ask"), UnknownDatabase("x", "no"), DatabaseUnavailable("x", "no")]
)
def test_a_commit_whose_outcome_can_not_be_asked_for_raises_outcome_unknown(
    postgresql_url: str, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    with opened(postgresql_url, busy_wait=0.2) as registry:
        registry.run(increment)

        def refuse(*_: object, **__: object) -> None:
            raise error

        with monkeypatch.context() as patched:
            Loss(patched, carried_out=True, then=lambda _: patched.setattr(shared_connection, "connect", refuse))
            with pytest.raises(OutcomeUnknown, match="could not be asked"):
                registry.run(increment)
        assert registry.read(count) == (2, 2)


# A server that fails -----------------------------------------------------------------------------------------


def test_a_killed_server_is_a_clear_error_until_it_is_back_with_everything_that_was_committed(
    own_postgresql: PostgresqlServer,
) -> None:
    called = threading.Semaphore(0)
    with own_postgresql.new_database() as url, opened(url) as registry:
        wait_until_listening(registry)
        registry.watch("group/", called.release)
        registry.run(increment)
        own_postgresql.kill()
        for _ in range(2):
            with pytest.raises(DatabaseUnavailable, match="try again"):
                registry.run(increment)
            with pytest.raises(DatabaseUnavailable, match="try again"):
                registry.read(epoch)
        own_postgresql.start()
        assert called.acquire(timeout=TIMEOUT_SECONDS)  # notifications may have been missed
        assert registry.run(increment) == 2
        assert registry.read(count) == (2, 2)
        registry.run(lambda tx: tx.touch("group/billing"))
        assert called.acquire(timeout=TIMEOUT_SECONDS)


@pytest.mark.server
def test_a_commit_that_a_crash_lost_is_not_taken_for_another_with_the_same_transaction_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """PostgreSQL assigns numbers again that it had not written to disk when it crashed."""
    statuses: list[object] = []
    with postgresql_server(wal_writer_delay="10s") as server, server.new_database() as url, opened(url) as registry:
        registry.run(increment)

        def crash(connection: runtime_postgresql.Connection) -> None:
            (number,) = connection.execute("SELECT pg_current_xact_id()::text").fetchone() or ()
            server.kill()
            server.start()
            with psycopg.connect(url, autocommit=True) as other:
                other.execute("CREATE TABLE anything (n bigint)")
                while not statuses:
                    (used,) = other.execute("INSERT INTO anything VALUES (1) RETURNING xmin::text").fetchone() or ()
                    if int(used) >= int(number):
                        statuses.extend(other.execute("SELECT pg_xact_status(%s::xid8)", [number]).fetchone() or ())

        Loss(monkeypatch, carried_out=False, then=crash)
        assert registry.run(increment) == 2
        assert statuses == ["committed"]  # the number is another transaction's
        assert registry.read(count) == (2, 2)


@pytest.mark.timeout(120)
def test_a_server_that_stops_responding_hangs_nobody_and_no_commit_is_lost_or_doubled(
    own_postgresql: PostgresqlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_connection, "_RESPONSE_SECONDS", 0.5)
    committed, unknown, refused = 0, 0, 0
    stop = threading.Event()
    with own_postgresql.new_database() as url, opened(url + "?connect_timeout=2", busy_wait=2.0) as registry:

        def count_up() -> None:
            nonlocal committed, unknown, refused
            while not stop.is_set():
                try:
                    registry.run(increment)
                    committed += 1
                except OutcomeUnknown:
                    unknown += 1
                except RetryLater:
                    refused += 1

        counting = threading.Thread(target=count_up)
        counting.start()
        wait_until(lambda: committed > 20)
        own_postgresql.stall()
        wait_until(lambda: unknown + refused > 1)
        own_postgresql.resume()
        before = committed
        wait_until(lambda: committed > before + 20)
        stop.set()
        counting.join(TIMEOUT_SECONDS)
        stored, audited = registry.read(count)
    assert stored == audited
    assert committed <= stored <= committed + unknown


def test_threads_that_commit_while_the_server_is_restarted_lose_nothing(own_postgresql: PostgresqlServer) -> None:
    acknowledged: list[list[int]] = [[], [], []]
    unknown = 0
    stop = threading.Event()

    with own_postgresql.new_database() as url, ExitStack() as stack:

        def count_up(number: int, registry: Registry) -> None:
            nonlocal unknown
            while not stop.is_set():
                try:
                    acknowledged[number].append(registry.run(increment))
                except OutcomeUnknown:
                    unknown += 1
                except RetryLater:
                    stop.wait(0.02)

        registries = [stack.enter_context(opened(url)) for _ in acknowledged]
        threads = [threading.Thread(target=count_up, args=pair) for pair in enumerate(registries)]
        for thread in threads:
            thread.start()
        for harm in (own_postgresql.kill, own_postgresql.stop):
            before = [len(numbers) for numbers in acknowledged]
            wait_until(lambda before=before: all(len(a) > b + 5 for a, b in zip(acknowledged, before, strict=True)))  # type: ignore[misc]
            harm()
            own_postgresql.start()
        before = [len(numbers) for numbers in acknowledged]
        wait_until(lambda: all(len(a) > b + 5 for a, b in zip(acknowledged, before, strict=True)))
        stop.set()
        for thread in threads:
            thread.join(TIMEOUT_SECONDS)
        stored, audited = registries[0].read(count)
    results = sorted(number for numbers in acknowledged for number in numbers)
    assert len(set(results)) == len(results)
    assert stored == audited
    assert len(results) <= stored <= len(results) + unknown


# Watches -----------------------------------------------------------------------------------------------------


def test_a_watch_does_not_wait_for_the_connection_that_receives_notifications(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Watches begin in event loops."""
    called, begun = threading.Event(), threading.Event()
    connected: list[bool] = []

    def connect_later(*args: Any, **options: Any) -> runtime_postgresql.Connection:
        connected.append(begun.wait(1.0))
        return connect(*args, **options)

    monkeypatch.setattr(listener, "connect", connect_later)
    registry.watch("group/billing", called.set)
    begun.set()
    registry.run(lambda tx: tx.touch("group/billing"))
    assert called.wait(TIMEOUT_SECONDS)
    assert connected == [True]


def test_a_commit_of_another_process_wakes_our_watch(postgresql_url: str) -> None:
    called = threading.Event()
    with opened(postgresql_url) as ours, opened(postgresql_url) as theirs:
        wait_until_listening(ours)
        ours.watch("group/billing", called.set)
        theirs.run(lambda tx: tx.touch("group/billing"))
        assert called.wait(TIMEOUT_SECONDS)


def test_any_number_of_names_of_any_length_is_notified(registry: Registry) -> None:
    wait_until_listening(registry)
    names = [f"group/{number}" for number in range(2_000)]
    waiting = set(names)
    for name in names:
        registry.watch(name, lambda name=name: waiting.discard(name))  # type: ignore[misc]
    long = threading.Event()
    registry.watch("group/" + "ü" * 9_000, long.set)

    def touch_all(tx: Transaction) -> None:
        for name in names:
            tx.touch(name)

    registry.run(touch_all)
    wait_until(lambda: not waiting)
    assert not long.is_set()
    registry.run(lambda tx: tx.touch("group/" + "ü" * 9_000))
    assert long.wait(TIMEOUT_SECONDS)


def test_watches_are_called_after_their_connection_was_cut(postgresql: PostgresqlServer, registry: Registry) -> None:
    wait_until_listening(registry)
    called = threading.Semaphore(0)
    registry.watch("group/billing", called.release)
    postgresql.cut_connections()
    assert called.acquire(timeout=TIMEOUT_SECONDS)
    registry.run(lambda tx: tx.touch("group/billing"))
    assert called.acquire(timeout=TIMEOUT_SECONDS)


def test_a_snapshot_is_of_one_moment(postgresql_url: str) -> None:
    with opened(postgresql_url) as ours, opened(postgresql_url) as theirs, snapshot(ours) as state:
        theirs.run(increment)
        assert count(state) == (0, 0)
