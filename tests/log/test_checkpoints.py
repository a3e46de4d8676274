"""The embedded log's write-ahead log is copied into the database file, and starts again from its beginning."""

import asyncio
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardyard.log.sqlite import SqliteLog, checkpoints, files
from shardyard.log.sqlite.checkpoints import Checkpoints
from shardyard.log.sqlite.files import connect, create_or_check
from shardyard.model import Partition, Record
from tests.log.samples import TIMEOUT_SECONDS, awaited

FULL = 2**40
"""Pages in a write-ahead log that is so large that the writer completes the checkpoint."""


@pytest.fixture(autouse=True)
def only_the_writer_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    """If nobody writes meanwhile, the thread's checkpoints are complete, and leave the writer nothing to do."""
    checkpoint = Checkpoints._checkpoint

    def by_writer(self: Checkpoints, db: sqlite3.Connection, kind: str) -> int:
        return FULL if db is self._db else checkpoint(self, db, kind)

    monkeypatch.setattr(Checkpoints, "_checkpoint", by_writer)


class Writing:
    """The writer's connection: remembers which checkpoints it was asked for."""

    def __init__(self, path: Path) -> None:
        self._db = connect(path, "process")
        self.wal = path.with_name(path.name + "-wal")
        self.kinds: list[str] = []
        self.restarts = threading.Event()
        self.execute("PRAGMA busy_timeout = 0")

    def execute(self, sql: str, *parameters: Any) -> sqlite3.Cursor:
        if sql.startswith("PRAGMA wal_checkpoint"):
            self.kinds.append(sql.removeprefix("PRAGMA wal_checkpoint"))
            if "RESTART" in sql:
                self.restarts.set()
        return self._db.execute(sql, *parameters)

    def write(self) -> int:
        """Write a few pages. Returns the size of the write-ahead log."""
        self.execute("INSERT OR REPLACE INTO fences VALUES (?, 1)", ("x" * 100_000,))
        return self.wal.stat().st_size

    def finish(self, unfinished: Checkpoints) -> None:
        unfinished.unfinished = True
        unfinished.finish(self)  # type: ignore[arg-type]

    def close(self) -> None:
        self._db.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return create_or_check(tmp_path / "log")


@pytest.fixture
def unfinished(path: Path) -> Iterator[Checkpoints]:
    with closing(Checkpoints(path)) as opened:
        yield opened


@pytest.fixture
def writing(path: Path) -> Iterator[Writing]:
    with closing(Writing(path)) as opened:
        yield opened


def test_the_write_ahead_log_does_not_grow_after_the_writer_has_finished_a_checkpoint(
    unfinished: Checkpoints, writing: Writing
) -> None:
    one, two = writing.write(), writing.write()
    assert two > one
    writing.finish(unfinished)
    assert [writing.write(), writing.write()] == [two, two]
    assert writing.kinds == ["(PASSIVE)"], "it is small, so nobody has to wait"


def test_only_a_large_write_ahead_log_is_left_to_the_writer_to_be_finished(
    unfinished: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = [checkpoints.FINISH_BYTES // unfinished.page_bytes, FULL, -1, -1]
    begun = [threading.Semaphore(0) for _ in pages]
    seen: list[bool] = []

    def checkpoint(*_: object) -> int:
        seen.append(unfinished.unfinished)
        number = len(seen) - 1
        begun[number].release()
        return pages[number]

    monkeypatch.setattr(Checkpoints, "_checkpoint", checkpoint)
    for each in begun:
        unfinished.grew(checkpoints.BUSY_CHECKPOINT_BYTES + 1, 0.0)
        assert each.acquire(timeout=TIMEOUT_SECONDS)
    assert seen == [False, False, True, True], "one that is in progress elsewhere takes nothing back"


@pytest.mark.parametrize(("busy", "makes_one"), [(0.4, True), (0.6, False)])
def test_a_busy_writer_makes_fewer_and_larger_checkpoints(
    path: Path, monkeypatch: pytest.MonkeyPatch, busy: float, makes_one: bool
) -> None:
    times = iter([100.0])
    monkeypatch.setattr(checkpoints, "time", SimpleNamespace(monotonic=lambda: next(times, 101.0)))
    with closing(Checkpoints(path)) as writer:
        writer.grew(checkpoints.CHECKPOINT_BYTES, busy)
        writer.grew(1, 0.0)
        assert (writer._bytes == 0) is makes_one
        writer.grew(checkpoints.BUSY_CHECKPOINT_BYTES, 0.0)
        assert writer._bytes == 0, "however busy it is"


def test_what_a_restart_leaves_of_the_file_is_not_counted_as_written(
    unfinished: Checkpoints, writing: Writing, monkeypatch: pytest.MonkeyPatch
) -> None:
    unfinished.grown()
    before = writing.write()
    assert unfinished.grown() > 0
    writing.finish(unfinished)
    assert writing.write() == before
    assert unfinished.grown() == 0, "every change of the log would be followed by a checkpoint"
    monkeypatch.setattr(files, "WAL_KEEP_BYTES", before - 1)
    assert unfinished.grown() == before, "it was not restarted for long"


def test_beyond_its_limit_the_writer_waits_until_readers_allow_it_to_restart(
    path: Path, unfinished: Checkpoints, writing: Writing, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = writing.write()
    monkeypatch.setattr(checkpoints, "LIMIT_BYTES", size - 1)
    monkeypatch.setattr(checkpoints, "LIMIT_WAIT_MS", int(TIMEOUT_SECONDS * 1000))
    reader = connect(path, "process")
    reader.execute("BEGIN")
    reader.execute("SELECT count(*) FROM fences").fetchall()

    is_finished = threading.Event()

    def end_reader_while_writer_waits() -> None:
        writing.restarts.wait(TIMEOUT_SECONDS)
        with closing(connect(path, "process")) as other:
            other.execute("PRAGMA busy_timeout = 0")
            while can_write(other):
                if is_finished.is_set():  # it has not waited
                    return
        reader.close()

    ending = threading.Thread(target=end_reader_while_writer_waits)
    ending.start()
    writing.finish(unfinished)
    is_finished.set()
    ending.join()
    assert writing.write() == size
    assert writing.execute("PRAGMA busy_timeout").fetchone() == (0,)


def can_write(db: sqlite3.Connection) -> bool:
    try:
        db.execute("BEGIN IMMEDIATE")
    except sqlite3.OperationalError:
        return False
    db.execute("ROLLBACK")
    return True


@awaited
async def test_the_write_ahead_log_restarts_once_no_reader_needs_its_old_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "CHECKPOINT_BYTES", 200_000)
    monkeypatch.setattr(checkpoints, "LIMIT_BYTES", 2_000_000)
    monkeypatch.setattr(checkpoints, "LIMIT_WAIT_MS", 10)
    monkeypatch.setattr(files, "WAL_KEEP_BYTES", 1_000_000)
    folder = tmp_path / "log"
    wal = folder / "log.db-wal"

    async def append(log: SqliteLog) -> None:
        await log.append(Partition("t", 0), [Record.new("x" * 50_000)])

    async with SqliteLog(folder, durability="process", maintain_every=None) as log:
        await log.create_topic("t", 1)
        with closing(connect(folder / "log.db", "process")) as reader:
            reader.execute("BEGIN")
            reader.execute("SELECT count(*) FROM batches").fetchall()
            for _ in range(100):
                await append(log)
            assert wal.stat().st_size > 4_000_000, "somebody reads a state from long ago"
        async with asyncio.timeout(TIMEOUT_SECONDS):
            while wal.stat().st_size > 2_000_000:
                await append(log)
