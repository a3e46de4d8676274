"""Group commit: one thread writes for all producers of the process, as many appends as wait in one commit."""

import asyncio  # noqa: TC003 dataclasses look their annotations up
import logging
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from shardyard.log.batch import from_records, now_ms
from shardyard.log.port import Appended, Fence, Stamp, check_partition
from shardyard.log.sqlite import store
from shardyard.log.sqlite.files import PAGE_BYTES, Durability, connect, translate
from shardyard.model import Busy, Partition, Position, Record, ShardyardError

_log = logging.getLogger(__name__)

GROUP_BYTES = 32 * 1024 * 1024
"""What one commit takes at the most."""
CHECKPOINT_BYTES = 16 * 1024 * 1024
"""How far the write-ahead log grows before its pages go to their places."""
_RETRY_SECONDS = 0.0005
"""How often to ask for the write lock that another process holds."""

Outcome = Any  # the result of a request, or the error it ended with


@dataclass(slots=True)
class Append:
    """Records (checked before) for a partition."""

    partition: Partition
    records: Sequence[Record] | pa.RecordBatch
    size: int
    stamp: Stamp | None
    fence: Fence | None
    answer: "asyncio.Future[Appended]"


@dataclass(slots=True)
class Operation:
    """Anything else that writes: a function on the connection, which checks before it changes."""

    work: Callable[[sqlite3.Connection], Any]
    answer: "asyncio.Future[Any]"
    size: int = 0


@dataclass(slots=True)
class _Tail:
    """What a transaction adds to one partition."""

    found: store.Found
    parts: list[tuple[int, Sequence[Record] | pa.RecordBatch]] = field(default_factory=list)


class Writer:
    """The thread that writes. `submit` from the event loop; answers arrive there, those of one commit together."""

    def __init__(
        self, path: Path, durability: Durability, busy_wait: float, on_commit: Callable[[dict[int, int]], None]
    ) -> None:
        self._path = path
        self._busy_wait = busy_wait
        self._on_commit = on_commit
        self._db = connect(path, durability)
        self._db.execute("PRAGMA busy_timeout = 0")  # `_begin` asks more often than SQLite would
        self._checkpoints = connect(path, "power")
        self._waiting: deque[Append | Operation] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._wal = path.with_name(path.name + "-wal")
        self._wal_bytes = 0
        self._checkpoint_wanted = threading.Event()
        self._finish_checkpoint = False
        self._threads = [
            threading.Thread(target=self._run, name="shardyard-log-writer", daemon=True),
            threading.Thread(target=self._checkpoint, name="shardyard-log-checkpoint", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, request: Append | Operation) -> None:
        with self._wake:
            self._waiting.append(request)
            self._wake.notify()

    def close(self) -> None:
        """Finish what was submitted, then stop."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._threads[0].join()
        self._checkpoint_wanted.set()
        self._threads[1].join()
        self._checkpoints.close()
        self._db.close()

    # The writing thread

    def _run(self) -> None:
        while group := self._next_group():
            try:
                outcomes, ends = self._commit(group)
            except sqlite3.Error as error:
                outcomes, ends = [translate(error, self._path)] * len(group), {}
            except ShardyardError as error:
                outcomes, ends = [error] * len(group), {}
            except Exception as error:  # noqa: BLE001 whatever it is, who asked must hear of it and the thread go on
                _log.exception("an append failed in an unforeseen way")
                outcomes, ends = [error] * len(group), {}
            if ends:
                self._on_commit(ends)
            _answer(group, outcomes)
            if self._finish_checkpoint:
                self._finish_checkpoint = False
                self._passive_checkpoint(self._db)

    def _next_group(self) -> list[Append | Operation]:
        group: list[Append | Operation] = []
        size = 0
        with self._wake:
            while not self._waiting and not self._closing:
                self._wake.wait()
            while self._waiting and (not group or size + self._waiting[0].size <= GROUP_BYTES):
                group.append(self._waiting.popleft())
                size += group[-1].size
        return group

    def _commit(self, group: list[Append | Operation]) -> tuple[list[Outcome], dict[int, int]]:
        """Carry out the group in one transaction. Returns an outcome for each request, and the new ends."""
        db = self._db
        now = now_ms()
        self._begin()
        try:
            tails: dict[Partition, _Tail] = {}
            ends: dict[int, int] = {}
            outcomes: list[Outcome] = []
            batches = 0
            for request in group:
                try:
                    if isinstance(request, Append):
                        outcomes.append(_append(db, tails, request, now))
                    else:
                        batches += _write(db, tails, ends, now)
                        outcomes.append(request.work(db))
                except ShardyardError as error:  # refused before it changed anything: the others go on
                    outcomes.append(error)
            batches += _write(db, tails, ends, now)
            db.execute("COMMIT")
        except BaseException:
            if db.in_transaction:
                db.execute("ROLLBACK")
            raise
        written = sum(request.size for request in group) + batches * 2 * PAGE_BYTES
        if any(isinstance(request, Operation) for request in group):  # these may write any amount
            written = max(written, self._wal.stat().st_size)
        self._grow_wal(written)
        return outcomes, ends

    def _begin(self) -> None:
        deadline = time.monotonic() + self._busy_wait
        while True:
            try:
                self._db.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
                    raise
                if time.monotonic() > deadline:
                    raise Busy(str(self._path), self._busy_wait) from error
                time.sleep(_RETRY_SECONDS)
            else:
                return

    # Checkpoints: a thread of its own does the work beside the writer, which then does the rest when it is free

    def _grow_wal(self, size: int) -> None:
        """Count what goes into the write-ahead log; asking for its size would cost more than the guess is worth."""
        self._wal_bytes += size
        if self._wal_bytes > CHECKPOINT_BYTES:
            self._wal_bytes = 0
            self._checkpoint_wanted.set()

    def _checkpoint(self) -> None:
        while True:
            self._checkpoint_wanted.wait()
            self._checkpoint_wanted.clear()
            if self._closing:
                break
            self._passive_checkpoint(self._checkpoints)
            self._finish_checkpoint = True

    def _passive_checkpoint(self, db: sqlite3.Connection) -> None:
        try:
            db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
        except sqlite3.Error as error:  # the pages stay in the write-ahead log, where they are as safe
            _log.warning("checkpoint of %s put off: %s", self._path, error)


def _append(db: sqlite3.Connection, tails: dict[Partition, _Tail], request: Append, now: int) -> Appended:
    check_partition(request.partition)
    tail = tails.get(request.partition)
    if tail is None:
        tail = tails[request.partition] = _Tail(store.find(db, request.partition))
    found = tail.found
    fence_rises = request.fence is not None and store.check_fence(db, request.fence)
    known = request.stamp and store.find_stamp(db, request.partition, found, request.stamp)
    if request.fence is not None and fence_rises:
        store.raise_fence(db, request.fence)
    if known:
        return Appended(request.partition, Position(found.epoch, known[0]), known[1], duplicate=True)
    first, count = found.end, len(request.records)
    if request.stamp is not None:
        store.put_stamp(db, found.id, request.stamp, first, count, now)
    tail.parts.append((first, request.records))
    found.end = first + count
    return Appended(request.partition, Position(found.epoch, first), count)


def _write(db: sqlite3.Connection, tails: dict[Partition, _Tail], ends: dict[int, int], now: int) -> int:
    """Store what was gathered, and return in how many batches.

    Single records that came together become one batch a partition; for speed, all of them become Arrow in one go.
    """
    loose: list[Record] = []
    runs: list[tuple[int, int, int, int]] = []  # partition, first offset, where in `loose`, how many
    batches: list[tuple[int, int, pa.RecordBatch]] = []
    for tail in tails.values():
        joins = False
        for first, records in tail.parts:
            if isinstance(records, pa.RecordBatch):
                batches.append((tail.found.id, first, records))
                joins = False
                continue
            if joins:
                partition, start, at, count = runs.pop()
                runs.append((partition, start, at, count + len(records)))
            else:
                runs.append((tail.found.id, first, len(loose), len(records)))
            loose.extend(records)
            joins = True
        if tail.parts:
            ends[tail.found.id] = tail.found.end
    if loose:
        data = from_records(loose, now)
        batches.extend((partition, first, data.slice(at, count)) for partition, first, at, count in runs)
    for partition, first, part in batches:
        store.put_batch(db, partition, first, part)
    store.set_ends(db, [(tail.found.end, tail.found.id) for tail in tails.values() if tail.parts])
    tails.clear()
    return len(batches)


def _answer(group: list[Append | Operation], outcomes: list[Outcome]) -> None:
    """Hand the outcomes to the event loop that waits for them, in one go."""
    loop = group[0].answer.get_loop()

    def settle() -> None:
        for request, outcome in zip(group, outcomes, strict=True):
            if request.answer.done():  # who asked was cancelled
                continue
            if isinstance(outcome, BaseException):
                request.answer.set_exception(outcome)
            else:
                request.answer.set_result(outcome)

    if not loop.is_closed():
        loop.call_soon_threadsafe(settle)
