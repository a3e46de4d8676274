"""Group commit: everything that the tasks of an event loop have submitted is written in one transaction.

A small group is written in the thread of the event loop: another thread would take the interpreter from it with every
statement, and wait to get it back. Its commit, too, as long as the disk is quick: to hand it to a thread and to hear
from it takes longer than a sync of a good disk. Otherwise the commit is left to a thread. A large group is written by
the thread as a whole: the event loop can go on meanwhile.
"""

import asyncio
import logging
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from msgspec import Struct

from shardyard.log.appending import Append, Appending, Changes, outcome_of
from shardyard.log.sqlite import store
from shardyard.log.sqlite.checkpoints import Checkpoints
from shardyard.log.sqlite.files import Durability, connect, translate
from shardyard.log.sqlite.lookup_cache import LookupCache
from shardyard.model import Busy, Closed, InvalidCall, ShardyardError
from shardyard.runtime.group_commit import CommitTimes, Interrupted, Outcome, after_commit, outcomes_of, settle
from shardyard.runtime.metrics import GROUP_COMMIT_UNITS

_log = logging.getLogger(__name__)

NAME = "the log's writer"
GROUP_BYTES = 32 * 1024 * 1024
"""The most that one commit writes."""
GROUP_REQUESTS = 4096
SMALL_BYTES = 1024 * 1024
SMALL_REQUESTS = 512
"""A group of more is written by the thread."""
SMALL_WAIT_SECONDS = 0.001
"""How long the event loop waits for another process that writes. To leave a small group to the thread takes longer."""
_RETRY_SECONDS = 0.0002
"""How often to try for the write lock while another process holds it."""


class Operation(Struct):
    """Any other change: a function of the connection and the time in milliseconds. It raises a `ShardyardError` only
    before it has changed anything."""

    work: Callable[[sqlite3.Connection, int], Any]
    size: int = 0
    only_rearranges: bool = False
    """It changes how records are stored, and nothing else: what is known of partitions and stamps stays true. It need
    not survive a power cut, so by itself it is committed without a sync. It does not take long, so it may be carried
    out in the event loop."""


class Appends(Struct, frozen=True):
    """The appends of one call, which are committed together."""

    requests: Sequence[Append]
    size: int


class OnCommit(Protocol):
    """Called with what was appended, and whether nothing else was changed, apart from how records are stored."""

    def __call__(self, changes: Changes, *, only_appends: bool) -> None: ...


Request: TypeAlias = Appends | Operation


@dataclass(slots=True)
class _Written:
    """What a transaction has done that is to be committed."""

    outcomes: list[Outcome]
    changes: Changes
    """Of all appends."""
    has_changed: bool = False
    """Something else was changed that others have to know."""


@dataclass(slots=True)
class _Group:
    loop: asyncio.AbstractEventLoop
    requests: list[Request]
    results: list["asyncio.Future[Any]"]
    written: _Written | None = None
    """If it is only to be committed."""
    is_committed: bool = False
    """It was written in the event loop, and then committed there or by the thread."""


class Writer:
    """Writes what the tasks of an event loop submit, everything that is waiting in one commit.

    A group is what was submitted while the last one was written. Requests whose callers were cancelled before it began
    are skipped.
    """

    def __init__(
        self,
        path: Path,
        durability: Durability,
        busy_wait: float,
        now: Callable[[], int],
        on_commit: OnCommit,
        on_change_elsewhere: Callable[[], None],
    ) -> None:
        """`busy_wait`: seconds to wait for other processes. `now`: the time in milliseconds. `on_commit` is called
        before any caller gets its result, in the event loop or in the thread, if something was changed that others have
        to know; `on_change_elsewhere` before a commit if something else has changed the log since the last one."""
        self._path = path
        self._now = now
        self._busy_wait = busy_wait
        self._on_commit = on_commit
        self._on_change_elsewhere = on_change_elsewhere
        self._db = connect(path, durability)
        self._db.execute("PRAGMA busy_timeout = 0")  # `_begin` tries more often than SQLite would
        self._survives_power_cuts = durability == "power"
        self._is_synced: bool | None = self._survives_power_cuts
        """Whether the connection syncs its commits now. None if that is not known."""
        self._lookup = LookupCache(self._db)
        self._checkpoints = Checkpoints(path)
        self.waiting_bytes = 0
        """The size of the requests that have not started."""
        self._waiting: list[tuple[Request, asyncio.Future[Any]]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_busy = False
        """A group is being written, or is about to be."""
        self._busy_since = 0.0
        """When the group began, or the last commit of a part of it."""
        self._commits = CommitTimes()
        self._closing = False
        self._groups: queue.SimpleQueue[_Group | threading.Event | None] = queue.SimpleQueue()
        """What the thread is to do: write a group, say that it has done everything before, or stop."""
        self._thread = threading.Thread(target=self._run, name=NAME, daemon=True)
        self._thread.start()

    async def do(self, request: Request) -> Any:
        """Carry out a request. It is durable when this returns, unless it `only_rearranges`."""
        return await self.submit(request)

    def submit(self, request: Request) -> "asyncio.Future[Any]":
        """The same. The future is done when the request is durable, or has the error that refuses it."""
        if self._closing:
            raise Closed(NAME)
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._adopt(loop)
        result: asyncio.Future[Any] = loop.create_future()
        self._waiting.append((request, result))
        self.waiting_bytes += request.size
        if not self._is_busy:
            self._is_busy = True
            loop.call_soon(self._start_group)
        return result

    def close(self) -> None:
        """Finish what was submitted, then stop. Called in another thread than the event loop's."""
        self._closing = True
        loop = self._loop
        try:
            if loop is None:
                self._groups.put(None)
            else:
                loop.call_soon_threadsafe(self._stop_if_idle)
        except RuntimeError:  # the loop is closed, and nobody waits any more
            self._groups.put(None)
        self._thread.join()
        self._checkpoints.close()
        self._db.close()

    # In the event loop

    def _adopt(self, loop: asyncio.AbstractEventLoop) -> None:
        """Work for another event loop from now on; the one before is closed, and so nobody waits for what it has
        submitted."""
        if self._loop is not None:
            if not self._loop.is_closed():
                raise InvalidCall(
                    f"{self._path} is in use in another event loop: open the log once for each event loop that uses it"
                )
            self._finish_for_closed_loop()
            self._waiting.clear()
            self.waiting_bytes = 0
            self._is_busy = False
        self._loop = loop

    def _finish_for_closed_loop(self) -> None:
        """Wait for the thread, which may still write a group of the event loop that was closed: both use one
        connection."""
        done = threading.Event()
        self._groups.put(done)
        done.wait()
        self._on_change_elsewhere()  # what follows a commit is not done if the event loop is closed before that

    def _start_group(self) -> None:
        group = self._next_group()
        if not group.requests:
            self._is_busy = False
            self._stop_if_idle()
            return
        self._busy_since = time.monotonic()
        count = sum(map(_count, group.requests))
        GROUP_COMMIT_UNITS.observe(count)
        if (
            not self._checkpoints.unfinished
            and count <= SMALL_REQUESTS
            and sum(request.size for request in group.requests) <= SMALL_BYTES
            and all(isinstance(request, Appends) or request.only_rearranges for request in group.requests)
        ):
            try:
                group.written = self._write_small(group.requests)
            except BaseException as error:  # such as Ctrl-C
                self._finish_group(group, [Interrupted(str(error))] * len(group.requests))
                raise
        if group.written is None:
            self._groups.put(group)
        elif self._commits.are_short:
            self._commit_here(group)
        else:
            self._commits.decay()
            self._groups.put(group)

    def _commit_here(self, group: _Group) -> None:
        started = time.perf_counter()
        try:
            outcomes = self._outcomes(group)
        except BaseException as error:  # such as Ctrl-C: whether it was committed is not known
            self._finish_group(group, [Interrupted(str(error))] * len(group.requests))
            raise
        finally:
            if self._is_synced == self._survives_power_cuts:  # others say nothing of the disk
                self._commits.took(time.perf_counter() - started)
        self._finish_group(group, outcomes)

    def _next_group(self) -> _Group:
        group = _Group(asyncio.get_running_loop(), [], [])
        size = count = taken = 0
        for request, result in self._waiting:
            if count >= GROUP_REQUESTS or (group.requests and size + request.size > GROUP_BYTES):
                break
            taken += 1
            self.waiting_bytes -= request.size
            if not result.done():  # its caller still waits
                group.requests.append(request)
                group.results.append(result)
                size += request.size
                count += _count(request)
        del self._waiting[:taken]
        return group

    def _write_small(self, requests: list[Request]) -> _Written | None:
        """Everything but the commit; None if the thread has to do all of it, because another process is writing, or
        because something is wrong: it finds out for which of the requests."""
        try:
            self._set_sync(requests)
            self._begin(SMALL_WAIT_SECONDS)
            return self._write(requests)
        except Exception as error:  # noqa: BLE001 the thread tries again, and tells the callers what is wrong
            _log.debug("%d requests are left to the thread: %s", len(requests), error)
            return None

    def _finish_group(self, group: _Group, outcomes: list[Outcome]) -> None:
        self._after_commit(group)
        settle(group.results, outcomes)
        if self._waiting:
            group.loop.call_soon(self._start_group)  # after the callers that were just woken
        else:
            self._is_busy = False
            self._stop_if_idle()

    def _stop_if_idle(self) -> None:
        if self._closing and not self._is_busy:
            self._groups.put(None)

    # In the thread

    def _run(self) -> None:
        while (group := self._groups.get()) is not None:
            if isinstance(group, threading.Event):
                group.set()
                continue
            outcomes = self._outcomes(group)
            try:
                group.loop.call_soon_threadsafe(self._finish_group, group, outcomes)
            except RuntimeError:  # the loop is closed, and nobody waits any more
                _log.debug("a result of %d requests came after its event loop was closed", len(group.requests))
                self._after_commit(group)  # readers may wait elsewhere

    def _carry_out(self, requests: list[Request]) -> list[Outcome]:
        try:
            if self._db.in_transaction:  # it could not be rolled back then
                self._roll_back()
            self._checkpoints.finish(self._db)
            self._set_sync(requests)
            self._begin(self._busy_wait)
            written = self._write(requests)
        except sqlite3.Error as error:
            if len(apart := _apart(requests)) > 1:  # an operation that meets damage must not fail the appends
                return [outcome for part in apart for outcome in outcomes_of(NAME, self._carry_out, part)]
            raise translate(error, self._path) from error
        self._commit()
        after_commit(lambda: self._committed(requests, written))
        return written.outcomes

    # In either

    def _outcomes(self, group: _Group) -> list[Outcome]:
        written = group.written
        if written is None:
            return outcomes_of(NAME, self._carry_out, group.requests)
        try:
            self._commit()
        except ShardyardError as error:
            return [error] * len(group.requests)
        except Exception as error:  # noqa: BLE001 whatever it is, the callers must get it and the thread must survive
            _log.exception("%s failed unexpectedly", NAME)
            return [error] * len(group.requests)
        group.is_committed = True
        return written.outcomes

    def _commit(self) -> None:
        try:
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            self._roll_back()
            raise translate(error, self._path) from error

    def _after_commit(self, group: _Group) -> None:
        """What follows the commit of a group that was written in the event loop. It is done there, too: the thread has
        to wait for the interpreter, so it does only what waits for the disk."""
        written = group.written
        if group.is_committed and written is not None:
            after_commit(lambda: self._committed(group.requests, written))

    def _committed(self, requests: list[Request], written: _Written) -> None:
        if written.has_changed or written.changes.ends or written.changes.fences:
            self._on_commit(written.changes, only_appends=not written.has_changed)
        size = (
            sum(request.size for request in requests) + len(written.changes.batches) * 2 * self._checkpoints.page_bytes
        )
        if any(isinstance(request, Operation) for request in requests):  # they may write any amount
            size = max(size, self._checkpoints.grown())
        now = time.monotonic()
        self._checkpoints.grew(size, now - self._busy_since)
        self._busy_since = now

    def _write(self, requests: list[Request]) -> _Written:
        """Carry out the requests in the transaction that was begun. If this raises, it was rolled back."""
        db, now = self._db, self._now()
        written = _Written([], Changes())
        try:
            if self._lookup.begin():
                self._on_change_elsewhere()
            for are_operations, same in groupby(requests, lambda request: isinstance(request, Operation)):
                appending = Appending(self._lookup, now)
                for request in same:
                    if isinstance(request, Appends):
                        written.outcomes.append([outcome_of(appending.append, each) for each in request.requests])
                        continue
                    before = db.total_changes
                    written.outcomes.append(outcome_of(request.work, db, now))
                    if db.total_changes != before and not request.only_rearranges:
                        self._lookup.clear()
                        written.has_changed = True
                if are_operations:
                    continue
                changes = appending.changes()
                store.put(db, changes, now)
                self._lookup.stored(changes)
                written.changes.ends |= changes.ends
                written.changes.fences |= changes.fences
                written.changes.batches += changes.batches
                written.changes.loaded += changes.loaded
        except BaseException:
            self._roll_back()
            raise
        return written

    def _roll_back(self) -> None:
        self._lookup.clear()
        if self._db.in_transaction:
            self._db.execute("ROLLBACK")

    def _set_sync(self, requests: list[Request]) -> None:
        """A commit is synced unless it only rearranges what is stored: a power cut that undoes it loses nothing, and
        the sync of the next commit covers it."""
        is_needed = self._survives_power_cuts and not all(map(_only_rearranges, requests))
        if is_needed != self._is_synced:
            self._is_synced = None  # in case of an interrupt between the two
            self._db.execute(f"PRAGMA synchronous = {'FULL' if is_needed else 'NORMAL'}")
            self._is_synced = is_needed

    def _begin(self, busy_wait: float) -> None:
        """Begin a transaction. `busy_wait`: seconds to wait for other processes."""
        deadline = time.monotonic() + busy_wait
        while True:
            try:
                self._db.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
                    raise
                if time.monotonic() > deadline:
                    raise Busy(str(self._path), busy_wait) from error
                time.sleep(_RETRY_SECONDS)
            else:
                return


def _apart(requests: list[Request]) -> list[list[Request]]:
    """Each operation by itself, and the appends between two of them together."""
    runs = groupby(requests, lambda request: isinstance(request, Operation))
    parts = ([[one] for one in same] if are_operations else [list(same)] for are_operations, same in runs)
    return [part for several in parts for part in several]


def _only_rearranges(request: Request) -> bool:
    return isinstance(request, Operation) and request.only_rearranges


def _count(request: Request) -> int:
    return len(request.requests) if isinstance(request, Appends) else 1
