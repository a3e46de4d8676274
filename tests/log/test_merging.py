"""How the embedded log merges small batches: in pieces, around damage, and with rests."""

import asyncio
import random
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from shardyard.log import database, merging
from shardyard.log.sqlite import SqliteLog, engine, maintenance
from shardyard.log.sqlite.files import connect
from shardyard.model import Damaged, Record
from shardyard.runtime.clock import ManualClock
from tests.log.samples import T0, T1, arrow, awaited, contents, records

BATCHES = 20
"""Small batches of a partition. Its records are merged in pieces of five, all in one run."""


@pytest.fixture(autouse=True)
def merged_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maintenance, "PIECE_RECORDS", 5)
    monkeypatch.setattr(merging, "MERGE_BATCHES", BATCHES - 1)
    monkeypatch.setattr(random, "shuffle", lambda _: None)  # partitions are merged in their order


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "log"


def opened(folder: Path, clock: ManualClock | None = None) -> SqliteLog:
    return SqliteLog(folder, durability="process", maintain_every=None, clock=clock)


def sql(folder: Path, statement: str, *parameters: Any) -> list[Any]:
    """Look into the file, or tamper with it."""
    with closing(sqlite3.connect(folder / "log.db", isolation_level=None)) as db:
        return db.execute(statement, parameters).fetchall()


def stored(folder: Path) -> dict[int, list[tuple[int, bytes]]]:
    """The first offsets and the bytes of all batches, by the number of their partition."""
    found: dict[int, list[tuple[int, bytes]]] = {}
    statement = "SELECT number, b.first, data FROM batches b JOIN partitions p ON p.id = partition ORDER BY b.first"
    for number, first, data in sql(folder, statement):
        found.setdefault(number, []).append((first, data))
    return found


# In pieces ---------------------------------------------------------------------------------------------------------


@awaited
async def test_batches_that_are_joined_in_several_pieces_keep_their_content(folder: Path) -> None:
    given: list[Record] = []
    async with opened(folder) as log:
        await log.create_topic("t", 1)
        for number in range(BATCHES):
            more = records(*range(len(given), len(given) + 1 + number % 4))
            await log.append(T0, more if number % 3 else arrow(more))
            given += more
        await log.maintain()
        assert len(stored(folder)[0]) == 1
        assert await contents(log, T0) == given
        assert await contents(log, T0, max_records=7) == given


@awaited
async def test_the_event_loop_gets_a_turn_after_each_piece(folder: Path) -> None:
    async with opened(folder) as log:
        await log.create_topic("t", 1)
        for number in range(BATCHES):
            await log.append(T0, records(number))
        merger = maintenance.Merger()
        with closing(connect(folder / "log.db", "process")) as db:
            assert merger.plan(db)
            assert len(list(merger.join())) == BATCHES / 5


@pytest.mark.parametrize("missing", [4, 5, 6, 9, 10, 11, 14, 15, 16])
@awaited
async def test_a_batch_that_is_missing_near_a_border_of_two_pieces_is_reported_and_nothing_is_merged_across_it(
    folder: Path, missing: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(folder) as log:
        await log.create_topic("t", 2)
        for number in range(BATCHES):
            await log.append(T0, records(number))
            await log.append(T1, records(100 + number))
        wherever = "FROM batches WHERE partition = 1 AND first = ?"
        (row,) = sql(folder, f"SELECT * {wherever}", missing)
        sql(folder, f"DELETE {wherever}", missing)
        before = stored(folder)[0]

        await log.maintain()
        assert f"merging will be retried: partition 1 is damaged: offsets {missing} to {missing} are missing" in (
            caplog.text
        )
        assert stored(folder)[0] == before
        with pytest.raises(Damaged):
            await contents(log, T0)
        assert len(stored(folder)[1]) == 1, "the other partition comes later, and is merged"
        assert await contents(log, T1) == records(*range(100, 100 + BATCHES))

        sql(folder, f"INSERT INTO batches VALUES ({', '.join('?' * len(row))})", *row)
        await log.maintain()
        assert len(stored(folder)[0]) == 1, "it was tried again"
        assert await contents(log, T0) == records(*range(BATCHES))


# Rests -------------------------------------------------------------------------------------------------------------


class NotedRests(ManualClock):
    """A clock that notes for how long somebody rests, for which it takes no time."""

    def __init__(self) -> None:
        super().__init__()
        self.rests: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.rests.append(seconds)
        await self.advance(seconds)


@pytest.mark.parametrize(
    ("most_unmerged", "times_longer"),
    [(BATCHES + 1, maintenance.MERGE_REST), (BATCHES - 1, database.STEP_REST)],
    ids=["few batches wait", "many batches wait"],
)
@pytest.mark.parametrize("appends", [True, False])
@awaited
async def test_merging_rests_as_many_times_longer_than_it_has_worked_while_records_are_appended(
    folder: Path, most_unmerged: int, times_longer: float, appends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pauses, in which the event loop does other things, do not count as work."""
    clock = NotedRests()
    log = opened(folder, clock)
    appending: list[asyncio.Task[Any]] = []

    class Timed(maintenance.Merger):
        """It works for 0.25 seconds on each piece, and each of its pauses takes 100 seconds."""

        def join(self) -> Iterator[None]:
            loop = asyncio.get_running_loop()
            for _ in super().join():
                clock._pass(0.25)
                loop.call_soon(clock._pass, 100.0)
                if appends and not appending:
                    appending.append(loop.create_task(log.append(T0, records(BATCHES))))
                yield

    monkeypatch.setattr(maintenance, "Merger", Timed)
    monkeypatch.setattr(maintenance, "MOST_UNMERGED", most_unmerged)
    monkeypatch.setattr(engine, "MERGE_PAUSE_SECONDS", 0.0)
    async with log:
        await log.create_topic("t", 1)
        for number in range(BATCHES):
            await log.append(T0, records(number))
        await log._maintain(in_background=True)
        await asyncio.gather(*appending)
        assert clock.rests == ([BATCHES / 5 * 0.25 * times_longer] if appends else [])
        assert await contents(log, T0) == records(*range(BATCHES + appends))
        assert len(stored(folder)[0]) == 1 + appends
