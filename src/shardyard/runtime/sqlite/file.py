"""A file of SQLite: it opens connections, waits for locks, and translates SQLite's errors."""

import errno
import os
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from sqlalchemy.exc import DBAPIError

from shardyard.model import Busy, Damaged, NoRoom, NotOurs, NotWritable, ShardyardError

_RETRY_SECONDS = 0.001
"""Between two attempts at a lock that another process has. SQLite's own waiting backs off to 100 ms."""
_DISK_FULL_BYTES = 1024 * 1024
"""With less free space than this, a failed write means a full disk: SQLite reports it as an I/O error when the write
was to one of its side files."""

_Result = TypeVar("_Result")


class SqliteFile:
    """The path of a database, and how to open it."""

    def __init__(self, path: Path, component: str, version_table: str, busy_wait: float) -> None:
        """`component` (`registry`, `history`) is what errors call it. A file with tables is one of these databases if
        `version_table` is among them."""
        self.path = path
        self.busy_wait = busy_wait
        self._component = component
        self._version_table = version_table

    def prepare_path(self) -> None:
        """Create the folder if it is missing, and check that the path can be a database's."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            is_folder, exists = self.path.is_dir(), self.path.exists()
        except OSError as error:
            if error.errno in {errno.ENOSPC, errno.EDQUOT}:
                raise NoRoom(str(self.path)) from error
            raise NotWritable(str(self.path), error.strerror or str(error)) from error
        if is_folder:
            raise self._not_ours()
        # SQLite would open a read-only file, and leave read-only side files behind that then stay in the way.
        if exists and not os.access(self.path, os.W_OK, effective_ids=True):
            raise NotWritable(str(self.path), "it is read-only")

    def open(self) -> sqlite3.Connection:
        """A connection that neither waits for locks nor begins transactions by itself, to one of our databases
        or an empty file."""
        connection = sqlite3.connect(self.path, timeout=0, isolation_level=None, check_same_thread=False)
        try:
            self.retry_while_locked(lambda: self._configure(connection))
        except BaseException:
            connection.close()
            raise
        return connection

    def _configure(self, connection: sqlite3.Connection) -> None:
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if tables and self._version_table not in tables:
            raise self._not_ours()  # before anything is changed in it
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")  # a commit survives a power cut

    def retry_while_locked(self, action: Callable[[], _Result], deadline: float | None = None) -> _Result:
        """The result of `action`, which is retried while another process has a lock. `Busy` when the deadline, a moment
        of `time.monotonic()`, has passed; the default is `busy_wait` seconds from now."""
        if deadline is None:
            deadline = time.monotonic() + self.busy_wait
        while True:
            try:
                return action()
            except sqlite3.OperationalError as error:
                if not is_locked(error):
                    raise
                if time.monotonic() >= deadline:
                    raise self.busy() from error
            time.sleep(_RETRY_SECONDS)

    @contextmanager
    def translated_errors(self) -> Iterator[None]:
        """Raise SQLite's errors as ours."""
        try:
            yield
        except DBAPIError as error:
            raise self._translated(error.orig, error) from error
        except sqlite3.Error as error:
            raise self._translated(error, error) from error

    def _translated(self, cause: BaseException | None, original: Exception) -> Exception:
        """Our error for SQLite's. `original` if it is the caller's, such as a value of a wrong type."""
        path, code = str(self.path), getattr(cause, "sqlite_errorcode", 0) & 0xFF
        if code == sqlite3.SQLITE_IOERR and shutil.disk_usage(self.path.parent).free < _DISK_FULL_BYTES:
            code = sqlite3.SQLITE_FULL
        errors: dict[int, Callable[[], ShardyardError]] = {
            sqlite3.SQLITE_BUSY: lambda: self._locked(str(cause)),
            sqlite3.SQLITE_LOCKED: lambda: self._locked(str(cause)),
            sqlite3.SQLITE_FULL: lambda: NoRoom(path),
            sqlite3.SQLITE_READONLY: lambda: NotWritable(path, str(cause)),
            sqlite3.SQLITE_CANTOPEN: lambda: NotWritable(path, str(cause)),
            sqlite3.SQLITE_PERM: lambda: NotWritable(path, str(cause)),
            sqlite3.SQLITE_NOTADB: self._not_ours,
            sqlite3.SQLITE_CORRUPT: lambda: Damaged(path, str(cause)),
            sqlite3.SQLITE_IOERR: lambda: Damaged(path, str(cause)),
            sqlite3.SQLITE_ERROR: lambda: Damaged(path, str(cause)),  # our SQL is right, so a table is not
        }
        return errors[code]() if code in errors else original

    def busy(self) -> Busy:
        return Busy(self.name, self.busy_wait)

    def _locked(self, _why: str) -> ShardyardError:
        """The error when a lock ended a transaction that had begun."""
        return self.busy()

    def _not_ours(self) -> NotOurs:
        return NotOurs(str(self.path), f"a Shardyard {self._component}")

    @property
    def name(self) -> str:
        """What errors call the database."""
        return f"{self._component} {self.path}"


def is_locked(error: sqlite3.Error) -> bool:
    """Whether SQLite gave up because another connection has a lock."""
    return error.sqlite_errorcode & 0xFF in {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}
