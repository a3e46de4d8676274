"""All that is SQLite's own: how to open it, be alone in it, hear of changes, and read its errors."""

import errno
import logging
import os
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TypeVar, cast

from sqlalchemy import Connection, create_engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool

from shardyard.model import Busy, Closed, Damaged, NoRoom, NotOurs, NotWritable, ShardyardError
from shardyard.registry import schema
from shardyard.registry.watches import Watches

_RETRY = 0.001
"""Seconds between two attempts at a lock that another process has. SQLite's own waiting backs off to 100 ms."""
_POLL = 0.005
"""Seconds between two looks at whether another process has committed something."""
_FAREWELL = 1.0
"""Seconds that closing waits for a callback under way."""
_LITTLE_ROOM = 1024 * 1024
"""Bytes free below which a failed write means a full disk: SQLite calls it an I/O error in its side files."""

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")


class SqliteStore:
    """A registry's SQLite file. It is made, with its folder, if it is not there.

    Transactions of one process queue for one connection, as SQLite has one writer at a time in any case; those that
    only read have another.
    """

    def __init__(self, path: str | Path, *, busy_wait: float = 10.0) -> None:
        """`busy_wait`: seconds to wait for the transactions of others before `Busy`."""
        self._file = _File(Path(path).absolute(), busy_wait)
        self._file.make_folder()
        self._watcher = _Watcher(self._file)
        self._writing = _Line(self._file, "BEGIN IMMEDIATE", busy_wait)
        try:
            with self.begin() as connection:
                schema.migrate(connection, str(self._file.path), schema.MIGRATIONS)
            self._reading = _Line(self._file, "BEGIN", busy_wait)
        except BaseException:
            self._watcher.close()
            self._writing.close()
            raise

    def begin(self) -> AbstractContextManager[Connection]:
        return self._writing.transaction()

    def look(self) -> AbstractContextManager[Connection]:
        return self._reading.transaction()

    def committed(self, touched: set[str]) -> None:
        self._watcher.wake(touched)

    def watch(self, name: str, callback: Callable[[], None]) -> Callable[[], None]:
        return self._watcher.watch(name, callback)

    def close(self) -> None:
        self._watcher.close()
        self._writing.close()
        self._reading.close()


class _Line:
    """A connection, for one transaction at a time; the others queue."""

    def __init__(self, file: "_File", begin: str, busy_wait: float) -> None:
        self._file = file
        self._begin = begin
        self._busy_wait = busy_wait
        self._alone = threading.Lock()
        self._closed = False
        with file.own_errors():
            self._connection = create_engine("sqlite://", creator=file.open, poolclass=NullPool).connect()

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        deadline = time.monotonic() + self._busy_wait
        if not self._alone.acquire(timeout=self._busy_wait):
            raise self._file.busy()
        try:
            if self._closed:
                raise Closed("registry")
            raw = cast(sqlite3.Connection, self._connection.connection.driver_connection)
            try:
                with self._file.own_errors():
                    self._file.patiently(lambda: raw.execute(self._begin), deadline)
                with self._connection.begin():
                    yield self._connection
            except DBAPIError as error:
                raise self._file.ours(error.orig, error) from error
            finally:
                if raw.in_transaction:  # interrupted between the two beginnings
                    raw.rollback()
        finally:
            self._alone.release()
            self._let_go_if_closed()

    def close(self) -> None:
        self._closed = True
        self._let_go_if_closed()

    def _let_go_if_closed(self) -> None:
        """Whoever is last, the transaction under way or `close`, closes the connection."""
        if self._closed and self._alone.acquire(blocking=False):
            try:
                self._connection.close()
            finally:
                self._alone.release()


class _File:
    """Opens connections to the file, waits for its locks, and says its errors in our words."""

    def __init__(self, path: Path, busy_wait: float) -> None:
        self.path = path
        self._busy_wait = busy_wait

    def make_folder(self) -> None:
        """Make the folder if it is missing, and see that what lies at the path, if anything, can be a registry."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            is_folder, is_there = self.path.is_dir(), self.path.exists()
        except OSError as error:
            if error.errno in {errno.ENOSPC, errno.EDQUOT}:
                raise NoRoom(str(self.path)) from error
            raise NotWritable(str(self.path), error.strerror or str(error)) from error
        if is_folder:
            raise self._not_ours()
        # SQLite would open a read-only file, and leave side files behind that are read-only like it and stay in the way
        if is_there and not os.access(self.path, os.W_OK, effective_ids=True):
            raise NotWritable(str(self.path), "it is read-only")

    def open(self) -> sqlite3.Connection:
        """A connection without waiting or transactions of its own, to a file that is ours or empty."""
        connection = sqlite3.connect(self.path, timeout=0, isolation_level=None, check_same_thread=False)
        try:
            self.patiently(lambda: self._prepare(connection))
        except BaseException:
            connection.close()
            raise
        return connection

    def _prepare(self, connection: sqlite3.Connection) -> None:
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if tables and schema.VERSION_TABLE not in tables:
            raise self._not_ours()  # before anything is changed in it
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")  # what is committed survives a power cut

    def patiently(self, action: Callable[[], _Result], deadline: float | None = None) -> _Result:
        """The result of `action`, tried again while others have a lock; `Busy` when they have it too long."""
        if deadline is None:
            deadline = time.monotonic() + self._busy_wait
        while True:
            try:
                return action()
            except sqlite3.OperationalError as error:
                if not _is_busy(error):
                    raise
                if time.monotonic() >= deadline:
                    raise self.busy() from error
            time.sleep(_RETRY)

    @contextmanager
    def own_errors(self) -> Iterator[None]:
        try:
            yield
        except DBAPIError as error:
            raise self.ours(error.orig, error) from error
        except sqlite3.Error as error:
            raise self.ours(error, error) from error

    def ours(self, cause: BaseException | None, otherwise: Exception) -> Exception:
        """Our error for SQLite's; `otherwise` if it is the caller's, such as a value of a wrong type."""
        path, code = str(self.path), getattr(cause, "sqlite_errorcode", 0) & 0xFF
        if code == sqlite3.SQLITE_IOERR and shutil.disk_usage(self.path.parent).free < _LITTLE_ROOM:
            code = sqlite3.SQLITE_FULL
        ours: dict[int, Callable[[], ShardyardError]] = {
            sqlite3.SQLITE_BUSY: self.busy,
            sqlite3.SQLITE_LOCKED: self.busy,
            sqlite3.SQLITE_FULL: lambda: NoRoom(path),
            sqlite3.SQLITE_READONLY: lambda: NotWritable(path, str(cause)),
            sqlite3.SQLITE_CANTOPEN: lambda: NotWritable(path, str(cause)),
            sqlite3.SQLITE_PERM: lambda: NotWritable(path, str(cause)),
            sqlite3.SQLITE_NOTADB: self._not_ours,
            sqlite3.SQLITE_CORRUPT: lambda: Damaged(path, str(cause)),
            sqlite3.SQLITE_IOERR: lambda: Damaged(path, str(cause)),
            sqlite3.SQLITE_ERROR: lambda: Damaged(path, str(cause)),  # our SQL is right, so a table of ours is not
        }
        return ours[code]() if code in ours else otherwise

    def _not_ours(self) -> NotOurs:
        return NotOurs(str(self.path), "a Shardyard registry")

    def busy(self) -> Busy:
        return Busy(f"registry {self.path}", self._busy_wait)


def _is_busy(error: sqlite3.Error) -> bool:
    return error.sqlite_errorcode & 0xFF in {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}


class _Watcher:
    """Calls the watches. While there are any, a thread looks for commits, of any process, on its own connection."""

    def __init__(self, file: _File) -> None:
        self._file = file
        self._watches = Watches()
        self._seen: dict[str, int] = {}
        """The version of each watched name that its callbacks know of."""
        self._connection: sqlite3.Connection | None = None
        self._thread: threading.Thread | None = None
        self._closed = False
        self._lock = threading.Lock()
        """Held over all of the above, but not while callbacks run."""
        self._wake = threading.Event()

    def watch(self, name: str, callback: Callable[[], None]) -> Callable[[], None]:
        with self._lock, self._file.own_errors():
            if self._closed:
                raise Closed("registry")
            connection = self._connection = self._connection or self._file.open()
            if name not in self._seen:
                self._seen[name] = self._file.patiently(lambda: _version(connection, name))
            end_watch = self._watches.add(name, callback)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="shardyard-registry-watch", daemon=True)
                self._thread.start()

        def end() -> None:
            with self._lock:
                end_watch()
                if name not in self._watches:
                    self._seen.pop(name, None)
            self._wake.set()

        return end

    def wake(self, touched: set[str]) -> None:
        """Look at once, as this process has just committed these."""
        if any(name in self._seen for name in touched):
            self._wake.set()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._watches.clear()
            self._seen.clear()
            thread = self._thread
        self._wake.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join(_FAREWELL)

    def _run(self) -> None:
        looked_at, troubled = None, False
        while True:
            self._wake.wait(_POLL)
            self._wake.clear()
            with self._lock:
                connection = self._connection
                if not self._watches or connection is None:
                    self._stop()
                    return
                try:
                    (data_version,) = connection.execute("PRAGMA data_version").fetchone()
                    changed = [] if data_version == looked_at else self._changed(connection)
                    looked_at, troubled = data_version, False
                except sqlite3.Error as error:
                    if not troubled and not _is_busy(error):
                        _log.warning("can't look for changes in %s: %s; trying on", self._file.path, error)
                        troubled = True
                    continue
            self._watches.call(changed)

    def _changed(self, connection: sqlite3.Connection) -> list[str]:
        versions = {name: _version(connection, name) for name in self._seen}
        changed = [name for name, version in versions.items() if version != self._seen[name]]
        self._seen.update(versions)
        return changed

    def _stop(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = self._thread = None


def _version(connection: sqlite3.Connection, name: str) -> int:
    row = connection.execute("SELECT version FROM changes WHERE name = ?", (name,)).fetchone()
    return 0 if row is None else int(row[0])
