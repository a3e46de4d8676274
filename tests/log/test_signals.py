"""Readers that wait are woken by commits of other processes: by a signal, or else after a while."""

import asyncio
import functools
import sqlite3
import threading
from pathlib import Path
from typing import Any

import pytest

from shardyard.log.sqlite import SqliteLog, store
from shardyard.model import Busy, PartitionOutOfRange, Record, UnknownTopic
from shardyard.runtime import process_signal
from shardyard.runtime.process_signal import Sender
from tests.log.samples import T0, T1, TIMEOUT_SECONDS, awaited, records

quiet = functools.partial(SqliteLog, durability="process", maintain_every=None)
LONG = 100 * TIMEOUT_SECONDS


@pytest.fixture
def only_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_signal, "FALLBACK_SECONDS", LONG)


@pytest.fixture
def no_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if every writer were killed between its commit and its signal."""
    monkeypatch.setattr(Sender, "send", lambda *_, **__: None)
    monkeypatch.setattr(process_signal, "FALLBACK_SECONDS", 0.05)


@pytest.mark.usefixtures("only_signals")
@awaited
async def test_each_commit_of_another_process_wakes_the_readers_that_wait_for_it(tmp_path: Path) -> None:
    async with quiet(tmp_path) as log, quiet(tmp_path) as other:
        await log.create_topic("t", 2)
        for n in range(50):
            reading = [asyncio.create_task(log.read(partition, n, wait=LONG)) for partition in (T0, T1)]
            await other.append(T0, records(n))
            assert (await reading[0]).records() == records(n)
            assert not reading[1].done()
            await other.append(T1, records(n))
            assert (await reading[1]).records() == records(n)


@pytest.mark.usefixtures("only_signals")
@awaited
async def test_readers_of_a_partition_that_is_dropped_or_deleted_are_woken_in_every_process(tmp_path: Path) -> None:
    async with quiet(tmp_path) as log, quiet(tmp_path) as other:
        await log.create_topic("t", 2)
        await log.contract_topic("t", 1)
        for change, refusal in (
            (lambda: other.drop_partitions("t", 1), PartitionOutOfRange),
            (lambda: other.delete_topic("t"), UnknownTopic),
        ):
            partition = T1 if refusal is PartitionOutOfRange else T0
            reading = [asyncio.create_task(each.read(partition, 0, wait=LONG)) for each in (log, other)]
            await change()
            for each in reading:
                with pytest.raises(refusal):
                    await each


@pytest.mark.usefixtures("only_signals")
@pytest.mark.parametrize("writer", ["this process", "another process"])
@pytest.mark.parametrize("waited_before", [False, True])
@awaited
async def test_a_record_that_arrives_between_a_look_and_the_wait_is_not_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: str, waited_before: bool
) -> None:
    async with quiet(tmp_path) as log, quiet(tmp_path) as other:
        await log.create_topic("t", 2)
        if waited_before:  # so that the thread that looks for new records runs, and has looked
            reading = asyncio.create_task(log.read(T1, 0, wait=LONG))
            await other.append(T1, records(1))
            await reading
            keeps_waiting = asyncio.create_task(log.read(T1, 1, wait=LONG))
            await log.span(T1)
        loop, original = asyncio.get_running_loop(), store.read
        appending: list[Any] = []

        def read_then_append(*arguments: Any) -> Any:
            result = original(*arguments)
            if not appending:
                chosen = log if writer == "this process" else other
                appending.append(asyncio.run_coroutine_threadsafe(chosen.append(T0, records(0)), loop))
                appending[0].result(TIMEOUT_SECONDS)
            return result

        monkeypatch.setattr(store, "read", read_then_append)
        batch = await asyncio.wait_for(log.read(T0, 0, wait=LONG), TIMEOUT_SECONDS)
        assert batch.records() == records(0)
        if waited_before:
            keeps_waiting.cancel()


@pytest.mark.usefixtures("no_signals")
@pytest.mark.parametrize("change", ["append", "delete"])
@awaited
async def test_a_commit_whose_signal_was_never_sent_is_found_after_a_while(tmp_path: Path, change: str) -> None:
    async with quiet(tmp_path) as log, quiet(tmp_path) as other:
        await log.create_topic("t", 1)
        reading = asyncio.create_task(log.read(T0, 0, wait=LONG))
        await log.span(T0)
        if change == "append":
            await other.append(T0, records(0))
            assert (await asyncio.wait_for(reading, TIMEOUT_SECONDS)).records() == records(0)
        else:
            await other.delete_topic("t")
            with pytest.raises(UnknownTopic):
                await asyncio.wait_for(reading, TIMEOUT_SECONDS)


@pytest.mark.usefixtures("only_signals")
@awaited
async def test_a_waiting_reader_gets_all_that_arrived_however_large(tmp_path: Path) -> None:
    large = [Record(f"r{i}", None, bytes(900_000), timestamp=1) for i in range(5)]
    async with quiet(tmp_path) as log, quiet(tmp_path) as other:
        await log.create_topic("t", 1)
        reading = asyncio.create_task(log.read(T0, 0, wait=LONG))
        await other.append(T0, large)
        assert (await reading).records() == large


@awaited
async def test_a_closed_log_leaves_no_socket_behind(tmp_path: Path) -> None:
    async with quiet(tmp_path) as log:
        await log.create_topic("t", 1)
        await log.read(T0, 0, wait=0.001)
        assert list((tmp_path / "listeners").iterdir())
    assert not (tmp_path / "listeners").exists()


@awaited
async def test_readers_are_woken_although_the_log_could_not_be_opened_for_them_at_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with quiet(tmp_path) as log, quiet(tmp_path) as other:
        await log.create_topic("t", 1)
        connect, failed = log._tail._connect, threading.Event()

        def failing() -> sqlite3.Connection:
            if not failed.is_set():
                failed.set()
                raise Busy("the log", 5.0)
            return connect()

        monkeypatch.setattr(log._tail, "_connect", failing)
        reading = asyncio.create_task(log.read(T0, 0, wait=TIMEOUT_SECONDS))
        assert await asyncio.to_thread(failed.wait, TIMEOUT_SECONDS)
        await other.append(T0, records(0))
        async with asyncio.timeout(TIMEOUT_SECONDS / 2):
            assert (await reading).records() == records(0)
    assert "checking for new records failed and will be retried" in caplog.text
