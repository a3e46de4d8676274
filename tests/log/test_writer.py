"""The embedded log's writer: what it keeps in memory between transactions, and groups that fail."""

import asyncio
import errno
import os
import sqlite3
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from shardyard.log.appending import Append, Appending
from shardyard.log.sqlite import SqliteLog
from shardyard.log.sqlite import writer as writing
from shardyard.model import (
    Appended,
    Damaged,
    Fence,
    Fenced,
    InvalidCall,
    Partition,
    PartitionOutOfRange,
    Record,
    ShardyardError,
    Stamp,
    Topic,
)
from shardyard.runtime import group_commit
from tests.log.samples import TIMEOUT_SECONDS, awaited

P = Partition("t", 0)


@asynccontextmanager
async def opened_twice(folder: Path) -> AsyncIterator[tuple[SqliteLog, SqliteLog]]:
    """Two instances of a log, as two processes have them."""
    async with SqliteLog(folder / "log", maintain_every=None) as one:
        await one.create_topic("t", 2)
        async with SqliteLog(folder / "log", maintain_every=None) as other:
            yield one, other


def record(text: str = "x") -> list[Record]:
    return [Record.new(text)]


@awaited
async def test_offsets_continue_after_what_another_process_has_appended(tmp_path: Path) -> None:
    async with opened_twice(tmp_path) as (one, other):
        offsets = [(await log.append(P, record())).first.offset for log in (one, other, one, one, other)]
        assert offsets == [0, 1, 2, 3, 4]


@awaited
async def test_a_stamp_that_another_process_has_stored_is_recognised(tmp_path: Path) -> None:
    async with opened_twice(tmp_path) as (one, other):
        await one.append(P, record(), stamp=Stamp("p", 0))
        stored = await other.append(P, record(), stamp=Stamp("p", 1))
        again = await one.append(P, record(), stamp=Stamp("p", 1))
        assert (again.duplicate, again.first) == (True, stored.first)


@awaited
async def test_a_fence_that_another_process_has_raised_holds(tmp_path: Path) -> None:
    async with opened_twice(tmp_path) as (one, other):
        await one.append(P, record(), fence=Fence("owner", 4))
        await other.set_fence(Fence("owner", 5))
        with pytest.raises(Fenced):
            await one.append(P, record(), fence=Fence("owner", 4))


@awaited
async def test_a_fence_that_was_raised_by_the_same_process_holds(tmp_path: Path) -> None:
    async with opened_twice(tmp_path) as (one, _other):
        await one.append(P, record(), fence=Fence("owner", 4))
        await one.append(P, record(), fence=Fence("owner", 5))
        with pytest.raises(Fenced):
            await one.append(P, record(), fence=Fence("owner", 4))


@awaited
async def test_a_topic_that_another_process_has_expanded_has_its_new_partitions(tmp_path: Path) -> None:
    async with opened_twice(tmp_path) as (one, other):
        new = Partition("t", 2)
        with pytest.raises(PartitionOutOfRange):
            await one.append(new, record())
        await other.expand_topic("t", 3)
        assert (await one.append(new, record())).first.offset == 0


@awaited
async def test_what_is_kept_in_memory_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened_twice(tmp_path) as (one, _other):
        monkeypatch.setattr("shardyard.log.sqlite.lookup_cache.MOST", 10)
        for number in range(50):
            await one.append(P, record(), stamp=Stamp(f"producer {number}", 0), fence=Fence(f"owner {number}", 1))
        cache = one._writer._lookup
        assert max(len(cache._last), len(cache._fences)) <= 10
        assert (await one.append(P, record(), stamp=Stamp("producer 0", 0))).duplicate


@awaited
async def test_an_append_that_fails_unexpectedly_fails_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened_twice(tmp_path) as (one, other):
        append = Appending.append

        def fail(self: Appending, request: Append) -> Appended:
            if not isinstance(request.records, tuple) or request.records[0].value == b"bad":
                raise RuntimeError("a bug")
            return append(self, request)

        monkeypatch.setattr(Appending, "append", fail)
        texts = ["good", "bad", "fine"]
        outcomes = await asyncio.gather(*(one.append(P, record(text)) for text in texts), return_exceptions=True)
        assert [isinstance(outcome, Appended) for outcome in outcomes] == [True, False, True]
        assert [each.value for each in (await other.read(P, 0)).records()] == [b"good", b"fine"]


def sqlite_error(text: str, code: int) -> sqlite3.Error:
    error = sqlite3.OperationalError(text)
    error.sqlite_errorcode = code
    return error


@awaited
async def test_an_operation_that_meets_damage_fails_alone(tmp_path: Path) -> None:
    def step(db: sqlite3.Connection, _: int) -> None:
        db.execute("INSERT INTO fences VALUES ('half done', 1)")
        raise sqlite_error("database disk image is malformed", sqlite3.SQLITE_CORRUPT)

    async with opened_twice(tmp_path) as (one, other):
        outcomes = await asyncio.gather(
            one.append(P, record("before")),
            one._writer.do(writing.Operation(step)),
            one.expand_topic("t", 3),
            one.append(P, record("after")),
            return_exceptions=True,
        )
        assert [type(outcome) for outcome in outcomes] == [Appended, Damaged, Topic, Appended]
        assert [each.value for each in (await other.read(P, 0)).records()] == [b"before", b"after"]
        await other.set_fence(Fence("half done", 0))  # it was not raised


class FailingCommits:
    """A connection whose next commit fails with an error of the disk."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self.fails = False
        self.delay = 0.0

    def execute(self, sql: str, *parameters: Any) -> Any:
        if sql == "COMMIT" and self.fails:
            self.fails = False
            time.sleep(self.delay)
            raise sqlite_error("disk I/O error", sqlite3.SQLITE_IOERR)
        return self._connection.execute(sql, *parameters)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


@asynccontextmanager
async def opened_with_failing_commits(folder: Path) -> AsyncIterator[tuple[SqliteLog, FailingCommits]]:
    async with SqliteLog(folder / "log", maintain_every=None) as log:
        await log.create_topic("t", 1)
        connection = FailingCommits(log._writer._db)
        log._writer._db = connection  # type: ignore[assignment]
        yield log, connection


@awaited
async def test_a_commit_that_fails_changes_nothing_and_the_next_append_gets_its_offset(tmp_path: Path) -> None:
    async with opened_with_failing_commits(tmp_path) as (log, connection):
        await log.append(P, record(), stamp=Stamp("p", 0), fence=Fence("owner", 1))
        connection.fails = True
        with pytest.raises(Damaged):
            await log.append(P, record(), stamp=Stamp("p", 1), fence=Fence("owner", 2))
        again = await log.append(P, record(), stamp=Stamp("p", 1), fence=Fence("owner", 1))
        assert (again.first.offset, again.duplicate) == (1, False)


@awaited
async def test_a_transaction_that_could_not_be_rolled_back_ends_with_the_next_append(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened_with_failing_commits(tmp_path) as (log, connection):
        roll_back = log._writer._roll_back

        def fail_once() -> None:
            monkeypatch.setattr(log._writer, "_roll_back", roll_back)
            raise sqlite_error("disk I/O error", sqlite3.SQLITE_IOERR)

        monkeypatch.setattr(log._writer, "_roll_back", fail_once)
        connection.fails = True
        with pytest.raises(Exception, match="disk I/O error"):
            await log.append(P, record())
        assert (await log.append(P, record())).first.offset == 0


@awaited
async def test_a_disk_that_is_gone_for_a_moment_fails_appends_only_as_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stale(_: object) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    async with opened_with_failing_commits(tmp_path) as (log, connection):
        connection.fails = True
        with monkeypatch.context() as patch:
            patch.setattr(os, "statvfs", stale)
            with pytest.raises(Damaged, match="disk I/O error"):
                await log.append(P, record())
        assert (await log.append(P, record())).first.offset == 0


@awaited
async def test_a_commit_that_fails_unexpectedly_fails_its_appends_and_no_later_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> ShardyardError:
        raise RuntimeError("a bug")

    async with opened_with_failing_commits(tmp_path) as (log, connection):
        connection.fails = True
        with monkeypatch.context() as patch:
            patch.setattr(writing, "translate", fail)
            with pytest.raises(RuntimeError, match="a bug"):
                await log.append(P, record())
        assert "the log's writer failed unexpectedly" in caplog.text
        assert (await log.append(P, record())).first.offset == 0


@pytest.mark.parametrize("small_bytes", [0, writing.SMALL_BYTES])
@awaited
async def test_closing_finishes_what_was_submitted(
    tmp_path: Path, small_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "SMALL_BYTES", small_bytes)
    log = SqliteLog(tmp_path / "log", maintain_every=None)
    await log.create_topic("t", 1)
    appends = [asyncio.create_task(log.append(P, record())) for _ in range(5)]
    await asyncio.sleep(0)  # they have been submitted
    await log.close()
    assert sorted([(await append).first.offset for append in appends]) == [0, 1, 2, 3, 4]
    async with SqliteLog(tmp_path / "log", maintain_every=None) as again:
        assert (await again.span(P)).end == 5


def disk_is_slow(log: SqliteLog) -> None:
    """As after many slow commits in the event loop: a thread makes the next ones."""
    for _ in range(group_commit.AVERAGED_COMMITS):
        log._writer._commits.took(1.0)


@awaited
async def test_closing_finishes_what_waits_for_a_commit_that_takes_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_closing = threading.Event()
    stop_if_idle = writing.Writer._stop_if_idle

    def stop_if_idle_then_tell(self: writing.Writer) -> None:
        stop_if_idle(self)
        if self._closing:
            is_closing.set()

    class SlowCommits(FailingCommits):
        def execute(self, sql: str, *parameters: Any) -> Any:
            if sql == "COMMIT":
                is_closing.wait(TIMEOUT_SECONDS)
            return super().execute(sql, *parameters)

    monkeypatch.setattr(writing.Writer, "_stop_if_idle", stop_if_idle_then_tell)
    log = SqliteLog(tmp_path / "log", maintain_every=None)
    await log.create_topic("t", 1)
    log._writer._db = SlowCommits(log._writer._db)  # type: ignore[assignment]
    disk_is_slow(log)
    appends = []
    for _ in range(3):
        appends.append(asyncio.create_task(log.append(P, record())))
        await asyncio.sleep(0)
        await asyncio.sleep(0)  # the first is being committed, and the next one waits for it
    await log.close()
    done, _ = await asyncio.wait(appends, timeout=TIMEOUT_SECONDS)
    assert sorted(append.result().first.offset for append in done) == [0, 1, 2]


@awaited
async def test_an_append_whose_caller_is_gone_before_it_begins_is_not_stored(tmp_path: Path) -> None:
    async with SqliteLog(tmp_path / "log", maintain_every=None) as log:
        await log.create_topic("t", 1)
        gone, stays = (asyncio.create_task(log.append(P, record(text))) for text in ("gone", "stays"))
        await asyncio.sleep(0)
        gone.cancel()
        await stays
        assert [each.value for each in (await log.read(P, 0)).records()] == [b"stays"]


@awaited
async def test_a_log_that_is_in_use_in_another_event_loop_refuses_changes_and_loses_none(tmp_path: Path) -> None:
    log = SqliteLog(tmp_path / "log")
    await log.create_topic("t", 1)
    own = asyncio.create_task(log.append(P, record("own")))
    await asyncio.sleep(0)  # it has been submitted
    for call in (log.append(P, record("other")), log.close()):
        with pytest.raises(InvalidCall, match="in use in another event loop"):
            await asyncio.to_thread(asyncio.run, call)
    assert (await own).first.offset == 0
    assert (await log.append(P, record())).first.offset == 1
    await log.close()


def test_the_next_event_loop_waits_for_what_the_thread_still_writes_for_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = SqliteLog(tmp_path / "log", maintain_every=None)
    carry_out, write_small = writing.Writer._carry_out, writing.Writer._write_small
    has_begun, has_written = threading.Event(), threading.Event()

    def carry_out_late(self: writing.Writer, requests: list[writing.Request]) -> Any:
        has_begun.set()
        has_written.wait(0.3)  # which it never gets to see: the next event loop waits, too
        return carry_out(self, requests)

    def write_small_then_tell(self: writing.Writer, requests: list[writing.Request]) -> Any:
        written = write_small(self, requests)
        has_written.set()
        return written

    async def submit_and_leave() -> None:
        monkeypatch.setattr(writing.Writer, "_carry_out", carry_out_late)
        task = asyncio.create_task(log.create_topic("late", 1))
        await asyncio.to_thread(has_begun.wait, TIMEOUT_SECONDS)
        task.cancel()

    async def append() -> Appended:
        monkeypatch.setattr(writing.Writer, "_write_small", write_small_then_tell)
        return await log.append(P, record())

    asyncio.run(log.create_topic("t", 1))
    asyncio.run(submit_and_leave())
    assert asyncio.run(append()).first.offset == 0
    assert asyncio.run(log.topic("late")).partitions == 1
    asyncio.run(log.close())


@awaited
async def test_commits_are_made_in_the_event_loop_unless_the_disk_is_slow_and_after_a_while_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_in: list[str] = []
    commit = writing.Writer._commit

    def recorded_commit(writer: writing.Writer) -> None:
        made_in.append("thread" if threading.current_thread() is writer._thread else "event loop")
        commit(writer)

    async with SqliteLog(tmp_path / "log", maintain_every=None) as log:
        await log.create_topic("t", 1)
        log._writer._commits = group_commit.CommitTimes()
        monkeypatch.setattr(writing.Writer, "_commit", recorded_commit)
        await log.append(P, record())
        log._writer._commits.took(1.0)
        await log.append(P, record())
        assert made_in == ["event loop"] * 2, "a disk may stall for once"
        disk_is_slow(log)
        for _ in range(3):
            await log.append(P, record())
        assert made_in[2:] == ["thread", "thread", "thread"]
        while made_in[-1] == "thread":
            await log.append(P, record())
            assert len(made_in) < 10_000
        assert (await log.span(P)).end == len(made_in)


@awaited
async def test_a_commit_that_fails_slowly_tells_that_the_disk_is_slow(tmp_path: Path) -> None:
    async with opened_with_failing_commits(tmp_path) as (log, connection):
        connection.delay = 2 * group_commit.MOST_SECONDS
        for _ in range(group_commit.AVERAGED_COMMITS):
            connection.fails = True
            with pytest.raises(Damaged):
                await log.append(P, record())
        assert not log._writer._commits.are_short


@pytest.mark.parametrize("step", ["_begin", "_write", "_commit"])
def test_a_group_that_is_interrupted_leaves_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def interrupt(*_: object) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    loop = asyncio.new_event_loop()
    log = SqliteLog(tmp_path / "log", maintain_every=None)
    loop.run_until_complete(log.create_topic("t", 1))
    monkeypatch.setattr(writing.Writer, step, interrupt)
    appending = loop.create_task(log.append(P, record()))
    with pytest.raises(KeyboardInterrupt):
        loop.run_until_complete(appending)
    with pytest.raises(group_commit.Interrupted):
        loop.run_until_complete(appending)
    assert loop.run_until_complete(log.append(P, record())).first.offset == 0
    loop.run_until_complete(log.close())
    loop.close()


@pytest.mark.parametrize("seconds", [0.0, 1.0])
@awaited
async def test_appends_while_another_process_writes_wait_for_it_and_not_in_the_event_loop(
    tmp_path: Path, seconds: float
) -> None:
    async with opened_twice(tmp_path) as (one, other):
        for _ in range(group_commit.AVERAGED_COMMITS):
            one._writer._commits.took(seconds)
        other._writer._db.execute("BEGIN IMMEDIATE")
        appending = asyncio.create_task(one.append(P, record()))
        for _ in range(20):
            await asyncio.sleep(0.001)  # the event loop goes on
        assert not appending.done()
        other._writer._db.execute("COMMIT")
        assert (await appending).first.offset == 0
