"""`SqliteStore`: transactions in a registry's SQLite file."""

import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import cast

from sqlalchemy import Connection, Update, create_engine
from sqlalchemy.pool import NullPool

from shardyard.model import Closed
from shardyard.registry import migrations
from shardyard.registry.sql_transaction import Values
from shardyard.registry.sqlite.file import RegistryFile
from shardyard.registry.sqlite.watcher import Watcher
from shardyard.runtime.clock import Clock, SystemClock
from shardyard.runtime.sqlite import migrate

_log = logging.getLogger(__name__)
_SYSTEM_CLOCK = SystemClock()
CHECKPOINT_TRANSACTIONS = 300
"""After so many a checkpoint is made, by the next transaction that may wait: it takes a while."""
MOST_TRANSACTIONS = 10 * CHECKPOINT_TRANSACTIONS
"""After so many it is made by any."""

_RECORD_TOUCHED = """
INSERT INTO changes (name, version) VALUES (?, (SELECT coalesce(max(version), 0) + 1 FROM changes))
ON CONFLICT (name) DO UPDATE SET version = excluded.version
"""


class SqliteStore:
    """A registry's SQLite file. The file and its folder are created if they do not exist.

    The transactions of one process take turns on one connection, as SQLite has one writer at a time in any case; its
    snapshots take turns on another. Time is the machine's, which all users of the file share.
    """

    is_embedded = True

    def __init__(self, path: str | Path, clock: Clock = _SYSTEM_CLOCK, *, busy_wait: float = 10.0) -> None:
        """`busy_wait`: see `Registry.busy_wait`."""
        self.busy_wait = busy_wait
        self._clock = clock
        self._file = RegistryFile(Path(path).absolute(), busy_wait)
        self._file.prepare_path()
        self._watcher = Watcher(self._file)
        self._compiled: dict[Update, tuple[str, Sequence[str]]] = {}
        """The SQL of the statements of `update_each`, and the names of its parameters in their order."""
        self._writing = _SharedConnection(self._file, _begin_writing)
        try:
            with self.begin(busy_wait) as connection:
                steps = migrations.migrations_at(clock.now())
                migrate(connection, str(self._file.path), migrations.VERSION_TABLE, steps)
            self._reading = _SharedConnection(self._file, _begin_reading)
        except BaseException:
            self._watcher.close()
            self._writing.close()
            raise

    def begin(self, wait: float, *, guarded: bool = False) -> AbstractContextManager[Connection]:  # noqa: ARG002 - SQLite has one kind
        return self._writing.transaction(wait)

    def begin_reading(self) -> AbstractContextManager[Connection]:
        return self._reading.transaction(self.busy_wait)

    def now(self, _connection: Connection) -> float:
        return self._clock.now()

    def update_each(self, connection: Connection, statement: Update, rows: Sequence[Values]) -> list[bool]:
        """The statement goes to SQLite directly: SQLAlchemy takes far longer to pass it on than SQLite to run it."""
        sql, names = self._compile(connection, statement)
        execute = _driver(connection).execute
        return [execute(sql, [row[name] for name in names]).rowcount > 0 for row in rows]

    def update_all(self, connection: Connection, statement: Update, rows: Sequence[Values]) -> int:
        sql, names = self._compile(connection, statement)
        return _driver(connection).executemany(sql, [[row[name] for name in names] for row in rows]).rowcount

    def _compile(self, connection: Connection, statement: Update) -> tuple[str, Sequence[str]]:
        if statement not in self._compiled:
            compiled = statement.compile(dialect=connection.dialect)
            self._compiled[statement] = str(compiled), compiled.positiontup or []
        return self._compiled[statement]

    def record_touched(self, connection: Connection, names: set[str]) -> None:
        connection.exec_driver_sql(_RECORD_TOUCHED, [(name,) for name in names])

    def committed(self, names: set[str]) -> None:
        self._watcher.committed(names)

    def watch(self, name: str, callback: Callable[[], None]) -> Callable[[], None]:
        return self._watcher.watch(name, callback)

    def close(self) -> None:
        self._watcher.close()
        self._writing.close()
        self._reading.close()


def _driver(connection: Connection) -> sqlite3.Connection:
    return cast(sqlite3.Connection, connection.connection.driver_connection)


def _begin_writing(connection: sqlite3.Connection) -> None:
    connection.execute("BEGIN IMMEDIATE")


def _begin_reading(connection: sqlite3.Connection) -> None:
    connection.execute("BEGIN")
    try:  # SQLite chooses the state that a transaction sees when it first reads
        connection.execute(f"SELECT version FROM {migrations.VERSION_TABLE}").fetchone()  # noqa: S608 - a constant
    except BaseException:
        connection.rollback()
        raise


class _SharedConnection:
    """A connection for one transaction at a time. The threads of this process wait for each other here, and for other
    processes in SQLite."""

    def __init__(self, file: RegistryFile, begin: Callable[[sqlite3.Connection], object]) -> None:
        self._file = file
        self._begin = begin
        self._since_checkpoint = 0
        """Transactions."""
        self._in_use = threading.Lock()
        self._closed = False
        with file.translated_errors():
            self._connection = create_engine("sqlite://", creator=file.open, poolclass=NullPool).connect()
            _driver(self._connection).execute("PRAGMA wal_autocheckpoint = 0")

    @contextmanager
    def transaction(self, wait: float) -> Iterator[Connection]:
        deadline = time.monotonic() + wait
        if not self._in_use.acquire(timeout=wait):
            raise self._file.busy()
        try:
            if self._closed:
                raise Closed("registry")
            raw = _driver(self._connection)
            try:
                with self._file.translated_errors():
                    self._file.retry_while_locked(lambda: self._begin(raw), deadline)
                    with self._connection.begin():
                        yield self._connection
                    if self._begin is _begin_writing:
                        self._checkpoint_if_due(raw, can_wait=wait > 0)
            finally:
                if raw.in_transaction:  # interrupted after SQLite's BEGIN and before SQLAlchemy's
                    raw.rollback()
        finally:
            self._in_use.release()
            self._release_if_closed()

    def _checkpoint_if_due(self, raw: sqlite3.Connection, *, can_wait: bool) -> None:
        self._since_checkpoint += 1
        if self._since_checkpoint >= (CHECKPOINT_TRANSACTIONS if can_wait else MOST_TRANSACTIONS):
            self._since_checkpoint = 0
            try:
                raw.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
            except sqlite3.Error as error:  # the pages are as safe in the write-ahead log
                _log.warning("the checkpoint of %s will be retried: %s", self._file.name, error)

    def close(self) -> None:
        self._closed = True
        self._release_if_closed()

    def _release_if_closed(self) -> None:
        """Either the transaction in progress or `close` closes the connection, whichever ends last."""
        if self._closed and self._in_use.acquire(blocking=False):
            try:
                self._connection.close()
            finally:
                self._in_use.release()
