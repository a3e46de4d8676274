"""The file of the embedded log: how it is opened, recognised and upgraded, and what its failures mean."""

import contextlib
import errno
import fcntl
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Literal

from shardyard.log.urls import FILE
from shardyard.model import Busy, Damaged, NoRoom, NotOurs, NotWritable, ShardyardError, WrongSchemaVersion

Durability = Literal["power", "process"]
"""What an appended record survives: a power cut, or only the death of all processes."""

PAGE_BYTES = 8192
"""Of new files; those that were created with another size keep it. A commit of a few records writes some pages as a
whole: with larger ones it takes longer, and with smaller ones large batches do."""
WAL_KEEP_BYTES = 64 * 1024 * 1024
"""How large the write-ahead log may stay when it is restarted."""
OPEN_SECONDS = 30.0
"""How long to wait for a process that is the last to close the file, or recovers it after a crash."""
UPGRADE_SECONDS = 2.0
"""How long to wait for processes of an older version to close the file."""
_APPLICATION_ID = 0x53594C47  # "SYLG"
_SCHEMA_VERSION = 5
_SCHEMA = """
CREATE TABLE epochs (last INTEGER NOT NULL);
INSERT INTO epochs VALUES (0);

CREATE TABLE topics (
    name TEXT PRIMARY KEY,
    partitions INTEGER NOT NULL,
    kind TEXT NOT NULL,
    age_ms INTEGER,
    bytes_per_partition INTEGER,
    epoch INTEGER NOT NULL
) WITHOUT ROWID;

-- A partition of a deleted topic has no topic until its batches are deleted. A dropped partition, whose number is
-- beyond those of its topic, keeps its end in case that it is added again.
CREATE TABLE partitions (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    topic TEXT,
    number INTEGER NOT NULL,
    first INTEGER NOT NULL DEFAULT 0,
    "end" INTEGER NOT NULL DEFAULT 0,
    merged INTEGER NOT NULL DEFAULT 0,
    UNIQUE (topic, number)
);

CREATE TABLE batches (
    id INTEGER PRIMARY KEY,
    partition INTEGER NOT NULL,
    first INTEGER NOT NULL,
    count INTEGER NOT NULL,
    latest INTEGER NOT NULL,
    bytes INTEGER NOT NULL,
    checksum INTEGER NOT NULL,
    data BLOB NOT NULL
);
-- Covers all queries that do not read the data: by offset, by time, by size.
CREATE INDEX batches_by_offset ON batches (partition, first, count, latest, bytes);

CREATE TABLE stamps (
    partition INTEGER NOT NULL,
    producer TEXT NOT NULL,
    sequence INTEGER NOT NULL,
    first INTEGER NOT NULL,
    count INTEGER NOT NULL,
    at INTEGER NOT NULL,
    PRIMARY KEY (partition, producer, sequence)
) WITHOUT ROWID;

CREATE TABLE fences (name TEXT PRIMARY KEY, epoch INTEGER NOT NULL) WITHOUT ROWID;
"""
_UPGRADES = {
    1: """
ALTER TABLE topics ADD COLUMN partitioner TEXT NOT NULL DEFAULT 'modulus';
ALTER TABLE topics ADD COLUMN hash TEXT DEFAULT 'fnv1a32';
ALTER TABLE topics ADD COLUMN sealed INTEGER NOT NULL DEFAULT 0;
ALTER TABLE topics ADD COLUMN successor TEXT;
""",
    2: """
ALTER TABLE topics ADD COLUMN open_partitions INTEGER;
""",
    3: """
ALTER TABLE topics ADD COLUMN generation INTEGER NOT NULL DEFAULT 0;
ALTER TABLE topics ADD COLUMN sealed_by TEXT;
ALTER TABLE topics ADD COLUMN sealed_since INTEGER NOT NULL DEFAULT 0;
ALTER TABLE topics ADD COLUMN sealed_until INTEGER NOT NULL DEFAULT 0;
UPDATE topics SET generation = epoch;
UPDATE topics SET sealed = 0 WHERE successor IS NULL;
""",
    4: "",
}
"""The statements that upgrade a file to the next version. A new file goes through all of them, so all files are alike.
Generations come from the counter of epochs, so a topic's epoch can be its first one. A seal of version 3 had no holder
that could renew it. Version 4 had Arrow batches only."""


def create_or_check(folder: Path) -> Path:
    """The path of the log's file in `folder`: created if it does not exist, upgraded if it is older, else checked."""
    path = folder / FILE
    with _named(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with open_lock(folder / "open.lock") as lock, translated(path):
        fcntl.flock(lock, fcntl.LOCK_EX)  # wait for other processes that open the same log
        connection = sqlite3.connect(path, isolation_level=None, timeout=OPEN_SECONDS)
        try:
            if _is_blank(connection):
                _create(connection)
            version = _version(connection, path)
        finally:
            connection.close()
        if version in _UPGRADES:
            version = _upgrade(path)
        if version != _SCHEMA_VERSION:
            raise WrongSchemaVersion(str(path), version, _SCHEMA_VERSION)
    return path


def _is_blank(connection: sqlite3.Connection) -> bool:
    """Whether the file is empty, apart from what a process left that was killed before it had created the log."""
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    return not tables and not application


def _create(connection: sqlite3.Connection) -> None:
    connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
    connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.executescript(
        f"BEGIN; {_SCHEMA} {''.join(_UPGRADES.values())} PRAGMA application_id = {_APPLICATION_ID};"
        f" PRAGMA user_version = {_SCHEMA_VERSION}; COMMIT;"
    )


def _version(connection: sqlite3.Connection, path: Path) -> int:
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    if application != _APPLICATION_ID:
        raise NotOurs(str(path), "a Shardyard log")
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    return int(version)


def _upgrade(path: Path) -> int:
    """Upgrade a file in one transaction. `Busy` while a process of the older version has it open, because that process
    would continue without the rules of the new version."""
    connection = sqlite3.connect(path, isolation_level=None, timeout=UPGRADE_SECONDS)
    try:
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        connection.execute("BEGIN EXCLUSIVE")
        for version in range(_version(connection, path), _SCHEMA_VERSION):
            for statement in filter(str.strip, _UPGRADES[version].split(";")):
                connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")
        connection.execute("COMMIT")
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY:
            raise Busy(str(path), UPGRADE_SECONDS) from error
        raise
    finally:
        connection.close()
    return _SCHEMA_VERSION


def connect(path: Path, durability: Durability) -> sqlite3.Connection:
    """A connection for one thread at a time."""
    with translated(path):
        return _connect(path, durability)


def _connect(path: Path, durability: Durability) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None, timeout=OPEN_SECONDS, check_same_thread=False)
    # In WAL mode FULL syncs every commit; NORMAL leaves them to the operating system, which outlives our processes.
    connection.execute(f"PRAGMA synchronous = {'FULL' if durability == 'power' else 'NORMAL'}")
    connection.execute("PRAGMA secure_delete = OFF")  # Debian's SQLite overwrites and writes all pages that it frees
    connection.execute("PRAGMA wal_autocheckpoint = 0")
    connection.execute(f"PRAGMA journal_size_limit = {WAL_KEEP_BYTES}")
    connection.execute("PRAGMA cache_size = -16384")
    connection.execute("SELECT last FROM epochs").fetchall()  # so that no other process finds the file unused
    return connection


def open_lock(path: Path) -> IO[str]:
    """Open a file for `flock`."""
    with _named(path):
        return path.open("a")


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Raise errors of the operating system as errors that a caller can act on."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise NoRoom(str(path)) from error
        if isinstance(error, FileExistsError | NotADirectoryError):
            raise NotOurs(str(path), "a folder, as a log needs") from error
        raise NotWritable(str(path), error.strerror or str(error)) from error


@contextlib.contextmanager
def translated(path: Path) -> Iterator[None]:
    """Raise errors of SQLite as errors that a caller can act on. For reads whose arguments were checked before."""
    try:
        yield
    except sqlite3.Error as error:
        raise translate(error, path) from error
    except ShardyardError:
        raise
    except (TypeError, ValueError) as error:  # a value has another type than was written
        raise Damaged(str(path), str(error)) from error


def translate(error: sqlite3.Error, path: Path) -> ShardyardError:
    """The error to raise for an SQLite error."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
    match code:
        case sqlite3.SQLITE_FULL:
            return NoRoom(str(path))
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            return Busy(str(path), 0.0)
        case sqlite3.SQLITE_NOTADB:
            return NotOurs(str(path), "a Shardyard log")
        case sqlite3.SQLITE_READONLY | sqlite3.SQLITE_CANTOPEN | sqlite3.SQLITE_PERM:
            return NotWritable(str(path), str(error))
        case sqlite3.SQLITE_IOERR if _is_full(path):
            return NoRoom(str(path))
        case _:
            return Damaged(str(path), str(error))


def _is_full(path: Path) -> bool:
    """Whether the disk has no free block: then an I/O error means that it is full. A disk that does not even say how
    much is free has another problem."""
    try:
        room = os.statvfs(path.parent)
    except OSError:
        return False
    return room.f_bavail * room.f_frsize < PAGE_BYTES * 16
