"""What is particular to a history in SQLite or PostgreSQL: files, locks, indexes, outages and several writers."""

import asyncio
import random
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, event

from shardyard.messaging.history import open_history, reading, writing
from shardyard.messaging.history.postgresql import PostgresqlDatabase
from shardyard.messaging.history.sql import SqlHistory
from shardyard.messaging.history.sqlite import SqliteDatabase
from shardyard.model import (
    Busy,
    DatabaseDenied,
    DatabaseUnavailable,
    InvalidValue,
    NotOurs,
    OutcomeUnknown,
    RetryLater,
    WrongSchemaVersion,
)
from shardyard.model.url import parse_url
from tests.messaging.history_model import HistoryModel, mark, message, placed
from tests.postgresql import PostgresqlServer
from tests.sqlite_files import with_registry


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "history.db"


async def open_and_close(url: str) -> None:
    async with open_history(url):
        pass


def test_a_file_of_something_else_is_refused_and_left_alone(path: Path) -> None:
    before = with_registry(path).read_bytes()
    with pytest.raises(NotOurs, match="a Shardyard history"):
        asyncio.run(open_and_close(f"sqlite:///{path}"))
    assert path.read_bytes() == before


def test_a_newer_version_is_refused(path: Path) -> None:
    asyncio.run(open_and_close(f"sqlite:///{path}"))
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE shardyard_history SET version = 99")
    connection.close()
    with pytest.raises(WrongSchemaVersion, match="version 99"):
        asyncio.run(open_and_close(f"sqlite:///{path}"))


def test_a_url_that_names_no_engine_is_refused() -> None:
    with pytest.raises(InvalidValue, match="history URL"):
        asyncio.run(open_and_close("mysql://host/database"))


def test_a_commit_to_sqlite_survives_a_power_cut(path: Path) -> None:
    database = SqliteDatabase(path)
    try:
        for pragma, expected in (("journal_mode", "wal"), ("synchronous", 2)):
            for use in (database.read, database.write):
                assert use(lambda db, name=pragma: db.exec_driver_sql(f"PRAGMA {name}").scalar()) == expected  # type: ignore[misc]
    finally:
        database.close()


def test_a_store_that_waits_too_long_for_another_process_is_refused_and_reads_are_not(path: Path) -> None:
    async def scenario() -> None:
        history = SqlHistory(SqliteDatabase(path, busy_wait=0.01))
        other = sqlite3.connect(path, isolation_level=None)
        try:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(Busy):
                await history.store(placed(message(1, "a", "b")))
            assert (await history.page("a", "b")).messages == []
            other.execute("ROLLBACK")
            await history.store(placed(message(1, "a", "b")))
            assert len((await history.page("a", "b")).messages) == 1
        finally:
            other.close()
            history.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "query",
    [
        lambda db: reading.page(db, "a", "b", 5, 10),
        lambda db: reading.chats(db, "a", 5, 10),
        lambda db: reading.addressed_to(db, "a", 1, 0, 5, 10),
        lambda db: reading.sent_by(db, "a", 0, 10),
    ],
    ids=["page", "chats", "addressed_to", "sent_by"],
)
def test_a_query_reads_an_index_in_its_order_and_no_table_as_a_whole(
    path: Path, query: Callable[[Connection], object]
) -> None:
    def plan(db: Connection) -> list[str]:
        sent: list[tuple[str, Any]] = []
        event.listen(db, "before_cursor_execute", lambda *args: sent.append((args[2], args[3])))
        query(db)
        ((statement, parameters),) = sent
        return [row[3] for row in db.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)]

    database = SqliteDatabase(path)
    try:
        steps = database.read(plan)
    finally:
        database.close()
    searched = [step for step in steps if "history_" in step]
    assert searched
    assert all(step.startswith("SEARCH") for step in searched), steps
    # A page sorts what it has found of the two directions.
    assert sum("TEMP B-TREE" in step for step in steps) == (1 if "UNION ALL" in steps else 0), steps


@pytest.mark.parametrize("engine", ["sqlite", pytest.param("postgresql", marks=pytest.mark.server)])
def test_two_processes_that_store_the_same_chats_at_the_same_time_count_right(
    request: pytest.FixtureRequest, path: Path, engine: str
) -> None:
    url = request.getfixturevalue("postgresql_url") if engine == "postgresql" else f"sqlite:///{path}"
    chance = random.Random(7)
    model = HistoryModel()
    users = ["a", "b", "c"]
    of_each: list[list[Any]] = [[], []]
    for id_ in range(1, 401):
        sender, recipient = chance.choice(users), chance.choice(users)
        entry = (
            message(id_, sender, recipient)
            if chance.random() < 0.6
            else mark(id_, sender, recipient, chance.choice(["seen", "delivered"]), chance.randint(1, id_))
        )
        of_each[users.index(recipient) % 2] += placed(entry, first=id_)
        if id_ % 7 == 0:  # its partition has moved meanwhile
            of_each[chance.randrange(2)] += placed(entry, first=id_)
    for entries in of_each:
        model.store(entries)

    async def scenario() -> None:
        async with open_history(url) as one, open_history(url) as other:

            async def store_all(history: Any, entries: list[Any]) -> None:
                for first in range(0, len(entries), 5):
                    await history.store(entries[first : first + 5])

            await asyncio.gather(store_all(one, of_each[0]), store_all(other, of_each[1]))
            for user in users:
                assert await other.chats(user) == model.chats(user, None, 50)

    asyncio.run(scenario())


def test_a_history_in_postgresql_goes_on_after_its_connections_were_cut(
    postgresql: PostgresqlServer, postgresql_url: str
) -> None:
    async def scenario() -> None:
        async with open_history(postgresql_url) as history:
            await history.store(placed(message(1, "a", "b")))
            await history.page("a", "b")
            postgresql.cut_connections()
            await history.store(placed(message(2, "a", "b")))
            postgresql.cut_connections()
            assert len((await history.page("a", "b")).messages) == 2

    asyncio.run(scenario())


def test_a_connection_that_is_lost_in_a_transaction_changes_nothing_and_is_replaced(
    postgresql: PostgresqlServer, postgresql_url: str
) -> None:
    database = PostgresqlDatabase(parse_url("history", postgresql_url))
    entries = placed(message(1, "a", "b"))

    def lost_before_it_stores(db: Connection) -> None:
        postgresql.cut_connections()
        writing.store(db, entries, database.run_each)

    def lost_before_its_commit(db: Connection) -> None:
        writing.store(db, entries, database.run_each)
        postgresql.cut_connections()

    def count(db: Connection) -> int:
        return len(reading.page(db, "a", "b", None, 10).messages)

    try:
        with pytest.raises(DatabaseUnavailable):
            database.write(lost_before_it_stores)
        assert database.read(count) == 0
        with pytest.raises(OutcomeUnknown):
            database.write(lost_before_its_commit)
        assert database.read(count) == 0
        database.write(lambda db: writing.store(db, entries, database.run_each))
        assert database.read(count) == 1
    finally:
        database.close()


def test_a_user_without_rights_to_the_schema_is_told_so(postgresql: PostgresqlServer, postgresql_url: str) -> None:
    name = postgresql_url.rpartition("/")[2]
    postgresql.execute("CREATE SCHEMA shardyard", name)
    postgresql.execute("DROP ROLE IF EXISTS reader")
    postgresql.execute("CREATE ROLE reader LOGIN PASSWORD 'reader'")
    postgresql.execute("GRANT USAGE ON SCHEMA shardyard TO reader", name)
    try:
        with pytest.raises(DatabaseDenied):
            asyncio.run(open_and_close(postgresql.url(name, user="reader", password="reader")))
    finally:
        postgresql.execute("DROP OWNED BY reader", name)
        postgresql.execute("DROP ROLE reader")


def test_while_postgresql_is_down_calls_ask_to_be_retried(own_postgresql: PostgresqlServer) -> None:
    async def scenario(url: str) -> None:
        async with open_history(url) as history:
            await history.store(placed(message(1, "a", "b")))
            own_postgresql.kill()
            with pytest.raises(RetryLater):
                await history.store(placed(message(2, "a", "b")))
            with pytest.raises(DatabaseUnavailable):
                await history.chats("a")
            own_postgresql.start()
            await history.store(placed(message(2, "a", "b")))
            assert (await history.chats("b")).chats[0].unread == 2

    with own_postgresql.new_database() as url:
        asyncio.run(scenario(url))
