"""What the embedded log's writer makes of an operation that has changed something, or nothing."""

import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from shardyard.log.sqlite import SqliteLog
from shardyard.log.sqlite.writer import Operation
from shardyard.model import Fence, Fenced, NoRoom
from tests.log.samples import T0, awaited, records


class Watched:
    """A log with a partition whose end is known, and the signals that its readers get."""

    def __init__(self, log: SqliteLog, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log = log
        self.signals: list[bool] = []
        """Whether nothing but appends was committed."""
        committed = log._tail.committed

        def note(ends: dict[int, int], *, only_appends: bool) -> None:
            self.signals.append(only_appends)
            committed(ends, only_appends=only_appends)

        monkeypatch.setattr(log._tail, "committed", note)

    @property
    def is_known(self) -> bool:
        return self.log._known.find(T0, None) is not None

    async def do(self, work: Callable[[sqlite3.Connection, int], Any]) -> Any:
        return await self.log._writer.do(Operation(work))


@asynccontextmanager
async def watched(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Watched]:
    async with SqliteLog(folder / "log", maintain_every=None) as log:
        await log.create_topic("t", 1)
        await log.append(T0, records(0), fence=Fence("f", 1))
        assert len(await log.read(T0, 0)) == 1
        watched = Watched(log, monkeypatch)
        assert watched.is_known
        yield watched


@awaited
async def test_an_operation_that_changes_nothing_wakes_nobody_and_what_is_known_stays_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with watched(tmp_path, monkeypatch) as it:
        await it.log.set_fence(Fence("f", 1))
        await it.do(lambda db, _: db.execute("SELECT * FROM fences").fetchall())
        await it.do(lambda db, _: db.execute("UPDATE fences SET epoch = 9 WHERE name = 'none'"))
        assert (it.signals, it.is_known) == ([], True)


@awaited
async def test_an_operation_that_changes_something_wakes_readers_and_what_is_known_is_looked_up_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with watched(tmp_path, monkeypatch) as it:
        await it.log.set_fence(Fence("f", 2))
        assert (it.signals, it.is_known) == ([False], False)
        with pytest.raises(Fenced):
            await it.log.append(T0, records(1), fence=Fence("f", 1))


@awaited
async def test_an_operation_that_changes_something_and_then_fails_wakes_readers_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(db: sqlite3.Connection, _: int) -> None:
        db.execute("UPDATE fences SET epoch = 2")
        raise NoRoom("the log")

    async with watched(tmp_path, monkeypatch) as it:
        with pytest.raises(NoRoom):
            await it.do(work)
        assert (it.signals, it.is_known) == ([False], False)
        with pytest.raises(Fenced):
            await it.log.append(T0, records(1), fence=Fence("f", 1))


@awaited
async def test_an_operation_has_changed_something_also_if_sqlites_count_of_changes_begins_again_below_zero(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class AlmostFull:
        """A connection whose next change is one more than its count can hold."""

        def __init__(self, connection: sqlite3.Connection) -> None:
            self._connection = connection
            self._before = connection.total_changes

        @property
        def total_changes(self) -> int:
            changes = self._connection.total_changes - self._before
            return changes + 2**31 - 1 if changes == 0 else changes - 1 - 2**31

        def __getattr__(self, name: str) -> Any:
            return getattr(self._connection, name)

    async with watched(tmp_path, monkeypatch) as it:
        connection = AlmostFull(it.log._writer._db)
        it.log._writer._db = connection  # type: ignore[assignment]
        await it.log.set_fence(Fence("f", 1))
        assert (it.signals, it.is_known) == ([], True)
        await it.log.set_fence(Fence("f", 2))
        assert connection.total_changes == -(2**31)
        assert (it.signals, it.is_known) == ([False], False)
