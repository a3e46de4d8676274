"""Which commits of the embedded log wait for the disk."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from shardyard.log import merging
from shardyard.log.appending import Append
from shardyard.log.sqlite import SqliteLog, maintenance
from shardyard.log.sqlite.files import Durability
from shardyard.log.sqlite.writer import Appends, Operation, Request
from shardyard.model import Appended, Damaged, Partition, Record
from tests.log.samples import awaited

P = Partition("t", 0)
NORMAL, FULL = 1, 2
"""SQLite's numbers: in WAL mode, a commit waits for the disk if it is full."""


class SyncsNoted:
    """A connection that notes under which setting it commits. It can be interrupted by Ctrl-C when that is set."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self.syncs: list[int] = []
        self.interrupt: str | None = None
        """"before" or "after" the setting has changed, once."""

    def execute(self, sql: str, *parameters: Any) -> Any:
        if sql == "COMMIT":
            self.syncs += self._connection.execute("PRAGMA synchronous").fetchone()
        interrupt = self.interrupt if sql.startswith("PRAGMA synchronous") else None
        if interrupt != "before":
            found = self._connection.execute(sql, *parameters)
        if interrupt is not None:
            self.interrupt = None
            raise KeyboardInterrupt
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


@asynccontextmanager
async def opened(folder: Path, durability: Durability = "power") -> AsyncIterator[tuple[SqliteLog, SyncsNoted]]:
    async with SqliteLog(folder / "log", durability=durability, maintain_every=None) as log:
        await log.create_topic("t", 1)
        connection = SyncsNoted(log._writer._db)
        log._writer._db = connection  # type: ignore[assignment]
        yield log, connection


def record(text: str = "x") -> list[Record]:
    return [Record.new(text)]


def rearranging() -> Operation:
    """An operation such as a merge."""
    return Operation(lambda db, _: db.execute("UPDATE partitions SET merged = merged"), only_rearranges=True)


@pytest.mark.parametrize(("durability", "synced"), [("power", FULL), ("process", NORMAL)])
@awaited
async def test_a_merge_alone_does_not_wait_for_the_disk_and_what_follows_it_does_if_it_is_to_survive_power_cuts(
    tmp_path: Path, durability: Durability, synced: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merging, "MERGE_BATCHES", 2)
    async with opened(tmp_path, durability) as (log, connection):
        for _ in range(2):
            await log.append(P, record())
        assert connection.syncs == [synced] * 2
        await log._merge_run(maintenance.Merger())
        assert connection.syncs[2:] == [NORMAL]
        await log.append(P, record())
        await log._writer.do(rearranging())
        await log.expand_topic("t", 2)  # which the thread does
        assert connection.syncs[3:] == [synced, NORMAL, synced]


@pytest.mark.parametrize(("durability", "synced"), [("power", FULL), ("process", NORMAL)])
@pytest.mark.parametrize("is_append_first", [True, False])
@awaited
async def test_a_merge_that_is_committed_with_an_append_waits_for_the_disk_as_the_append_does(
    tmp_path: Path, durability: Durability, synced: int, is_append_first: bool
) -> None:
    async with opened(tmp_path, durability) as (log, connection):
        await log._writer.do(rearranging())
        both = [log.append(P, record()), log._writer.do(rearranging())]
        await asyncio.gather(*(both if is_append_first else both[::-1]))
        assert connection.syncs == [NORMAL, synced]


@pytest.mark.parametrize(("durability", "synced"), [("power", FULL), ("process", NORMAL)])
@awaited
async def test_what_is_committed_apart_after_damage_waits_for_the_disk_if_it_is_more_than_a_merge(
    tmp_path: Path, durability: Durability, synced: int
) -> None:
    def fail(*_: object) -> None:
        error = sqlite3.DatabaseError("database disk image is malformed")
        error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
        raise error

    async with opened(tmp_path, durability) as (log, connection):
        outcomes = await asyncio.gather(
            log._writer.do(rearranging()),
            log.append(P, record("before")),
            log._writer.do(Operation(fail, only_rearranges=True)),
            log.append(P, record("after")),
            log._writer.do(rearranging()),
            return_exceptions=True,
        )
        assert [type(outcome) for outcome in outcomes[1:4]] == [Appended, Damaged, Appended]
        assert connection.syncs == [NORMAL, synced, synced, NORMAL]
        await log.append(P, record())
        assert connection.syncs[4:] == [synced]


@pytest.mark.parametrize("interrupt", ["before", "after"])
@pytest.mark.parametrize("is_for_merge", [True, False])
@awaited
async def test_an_append_after_an_interrupt_waits_for_the_disk_whatever_was_interrupted(
    tmp_path: Path, interrupt: str, is_for_merge: bool
) -> None:
    """The setting was just changed, or was about to be: which of both is not known."""
    async with opened(tmp_path) as (log, connection):
        if not is_for_merge:
            await log._writer.do(rearranging())
        connection.interrupt = interrupt
        request: Request = rearranging() if is_for_merge else Appends([Append(P, record(), 1, None, (), None)], 1)
        with pytest.raises(KeyboardInterrupt):
            log._writer._set_sync([request])
        await log.append(P, record())
        assert connection.syncs[-1] == FULL
