"""Waiting readers of the embedded log, which get what their own process appends without asking the database."""

import asyncio
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from shardyard.log.appending import PartitionState
from shardyard.log.sqlite import SqliteLog
from shardyard.log.sqlite.known_ends import KnownEnds
from shardyard.model import Closed, Fence, Fenced, Record
from shardyard.runtime import process_signal
from tests.log.samples import T0, T1, TIMEOUT_SECONDS, awaited

if TYPE_CHECKING:
    from shardyard.model.batch import Batch


@pytest.fixture(autouse=True)
def _only_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that looks for changes of other processes does so only when it is signalled."""
    monkeypatch.setattr(process_signal, "FALLBACK_SECONDS", TIMEOUT_SECONDS)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "log"


@awaited
async def test_what_arrives_for_a_waiting_reader_is_at_hand_without_a_statement(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with SqliteLog(folder, maintain_every=None) as log:
        await log.create_topic("t", 1)
        looks = 0
        look = log._snapshots.run

        def count(*arguments: Any, **options: Any) -> Any:
            nonlocal looks
            looks += 1
            return look(*arguments, **options)

        monkeypatch.setattr(log._snapshots, "run", count)
        counts = []
        for number in range(20):  # at first the thread that looks for changes of other processes finds some
            looks = 0
            reading = asyncio.create_task(log.read(T0, number, wait=TIMEOUT_SECONDS))
            await asyncio.sleep(0)
            await log.append(T0, [Record(str(number), None, b"a", (), 1)])
            assert len(await reading) == 1
            counts.append(looks)
        assert 0 in counts


@awaited
async def test_a_waiting_reader_that_another_process_has_fenced_off_gets_nothing_more(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the signal that something has changed is lost, and the record is written by the reader's own process."""
    async with SqliteLog(folder, maintain_every=None) as log, SqliteLog(folder, maintain_every=None) as other:
        await log.create_topic("t", 1)
        monkeypatch.setattr(other._tail._sender, "send", lambda **_: None)
        reading = await waiting_at_the_end(log, Fence("f", 1))
        await other.set_fence(Fence("f", 2))
        await log.append(T0, [LATER])
        with pytest.raises(Fenced):
            await reading


LATER = Record("2", None, b"later", (), 1)


async def waiting_at_the_end(log: SqliteLog, fence: Fence | None) -> "asyncio.Task[Batch]":
    """A read that waits for the second record of a partition whose end is known."""
    await log.append(T0, [Record("1", None, b"first", (), 1)])
    while True:  # at first the thread that looks for changes of other processes finds some
        waiting = asyncio.create_task(log.read(T0, 1, wait=TIMEOUT_SECONDS, fence=fence))
        await asyncio.wait([waiting], timeout=0.02)
        if log._known.find(T0, fence) is not None:
            return waiting
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


@awaited
async def test_a_reader_that_begins_to_wait_gets_what_another_process_has_just_appended(folder: Path) -> None:
    async with SqliteLog(folder, maintain_every=None) as log, SqliteLog(folder, maintain_every=None) as other:
        await log.create_topic("t", 1)
        for number in range(20):
            await log.read(T0, number)
            await other.append(T0, [Record.new(b"%d" % number)])
            batch = await log.read(T0, number, wait=TIMEOUT_SECONDS)
            assert [record.value for record in batch.records()] == [b"%d" % number]


@awaited
async def test_a_reader_of_a_log_that_was_closed_gets_an_error_each_time(folder: Path) -> None:
    async with SqliteLog(folder, maintain_every=None) as log:
        await log.create_topic("t", 1)
        reading = await waiting_at_the_end(log, None)
        await log.close()
        with pytest.raises(Closed):
            await reading
        with pytest.raises(Closed):
            await log.read(T0, 1, wait=TIMEOUT_SECONDS)


@awaited
async def test_an_append_that_raises_the_fence_of_a_waiting_reader_ends_its_read(folder: Path) -> None:
    async with SqliteLog(folder, maintain_every=None) as log:
        await log.create_topic("t", 1)
        reading = await waiting_at_the_end(log, Fence("f", 1))
        await log.append(T0, [LATER], fence=Fence("f", 2))
        with pytest.raises(Fenced):
            await reading


@awaited
async def test_a_reader_that_begins_to_wait_while_changes_of_others_are_looked_for_is_woken(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with SqliteLog(folder, maintain_every=None) as log, SqliteLog(folder, maintain_every=None) as other:
        await log.create_topic("t", 2)
        waiting = asyncio.create_task(log.read(T0, 0, wait=TIMEOUT_SECONDS))  # so that its thread looks for changes
        while log._known.find(T1, None) is None:
            await log.read(T1, 0, wait=0.01)
        is_looking, go_on = threading.Event(), threading.Event()
        forget = log._known.clear

        def forget_slowly() -> None:
            is_looking.set()
            go_on.wait(TIMEOUT_SECONDS)
            forget()

        monkeypatch.setattr(log._tail, "_on_change", forget_slowly)
        await other.append(T1, [LATER])
        await asyncio.to_thread(is_looking.wait, TIMEOUT_SECONDS)
        reading = asyncio.create_task(log.read(T1, 0, wait=100 * TIMEOUT_SECONDS))
        await asyncio.sleep(0)
        go_on.set()
        assert len(await asyncio.wait_for(reading, TIMEOUT_SECONDS)) == 1
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


def test_an_end_is_not_set_back_by_a_commit_that_is_reported_late() -> None:
    known = KnownEnds()
    known.add(T0, state(1, end=12), None, known.version)
    known.grew({1: 11})
    found = known.find(T0, None)
    assert found is not None
    assert found.end == 12
    known.add(T0, state(2, end=0), None, known.version)  # the topic was deleted and created again
    known.grew({1: 13})
    found = known.find(T0, None)
    assert found is not None
    assert (found.id, found.end) == (2, 0)


def state(partition_id: int, end: int) -> PartitionState:
    return PartitionState(partition_id, 1, 0, end, False, None, 2, 0, 0, 0)
