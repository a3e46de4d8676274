"""A history in SQLite: a file, for any number of processes on one machine, or in memory."""

import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from sqlalchemy import Connection, Insert, create_engine
from sqlalchemy.pool import QueuePool

from shardyard.messaging.history.schema import MIGRATIONS, VERSION_TABLE
from shardyard.messaging.history.sql import CONNECTIONS
from shardyard.messaging.history.writing import Values
from shardyard.runtime.sqlite import SqliteFile, migrate

T = TypeVar("T")

_CACHE_KIB = 32 * 1024
"""Of each connection. Indexes are written all over, and SQLite's default of 2 MB makes that many times slower."""
_CHECKPOINT_PAGES = 16 * 1024
"""Of 4 KiB, that the write-ahead log gets before they are written to their places. Many of them are changed again until
then, and SQLite's default of 1000 would be reached with each commit."""


class SqliteDatabase:
    """The tables of a history in a file, which is created with its folder if it does not exist; in memory without a
    path. The file has one writer at a time; readers do not wait for it."""

    def __init__(self, path: str | Path | None, *, busy_wait: float = 10.0) -> None:
        """`busy_wait`: seconds that a write waits for other processes."""
        where = Path(":memory:") if path is None else Path(path).absolute()
        self._file = SqliteFile(where, "history", VERSION_TABLE, busy_wait)
        if path is not None:
            self._file.prepare_path()
        self._engine = create_engine(
            "sqlite://",
            creator=self._open,
            poolclass=QueuePool,
            pool_size=1 if path is None else CONNECTIONS,  # a database in memory is that of one connection
            max_overflow=0,
        )
        self._compiled: dict[Insert, tuple[str, Sequence[str]]] = {}
        """The SQL of the statements of `run_each`, and the names of its parameters in their order."""
        try:
            self.write(lambda connection: migrate(connection, str(where), VERSION_TABLE, MIGRATIONS))
        except BaseException:
            self.close()
            raise

    def read(self, work: Callable[[Connection], T]) -> T:
        return self._transact(_begin_reading, work)

    def write(self, work: Callable[[Connection], T]) -> T:
        return self._transact(_begin_writing, work)

    def run_each(
        self, connection: Connection, statement: Insert, rows: Sequence[Values], /
    ) -> list[tuple[Any, ...] | None]:
        if statement not in self._compiled:
            compiled = statement.compile(dialect=connection.dialect)
            self._compiled[statement] = str(compiled), compiled.positiontup or []
        sql, names = self._compiled[statement]
        execute = _driver(connection).execute
        return [execute(sql, [row[name] for name in names]).fetchone() for row in rows]

    def close(self) -> None:
        self._engine.dispose()

    def _open(self) -> sqlite3.Connection:
        connection = self._file.open()
        connection.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
        connection.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES}")
        return connection

    def _transact(self, begin: Callable[[sqlite3.Connection], object], work: Callable[[Connection], T]) -> T:
        with self._file.translated_errors(), self._engine.connect() as connection:
            driver = _driver(connection)
            self._file.retry_while_locked(lambda: begin(driver))
            with connection.begin():
                return work(connection)


def _driver(connection: Connection) -> sqlite3.Connection:
    return cast(sqlite3.Connection, connection.connection.driver_connection)


def _begin_writing(connection: sqlite3.Connection) -> None:
    connection.execute("BEGIN IMMEDIATE")


def _begin_reading(connection: sqlite3.Connection) -> None:
    connection.execute("BEGIN")
    try:  # SQLite chooses the state that a transaction sees, and may find it locked, when it first reads
        connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone()
    except BaseException:
        connection.rollback()
        raise
