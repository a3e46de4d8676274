"""Group commit: one thread writes for all producers of the process, everything that is waiting in one commit."""

import sqlite3
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from shardyard.log import rules
from shardyard.log.sqlite import store
from shardyard.log.sqlite.checkpoints import Checkpoints
from shardyard.log.sqlite.files import PAGE_BYTES, Durability, connect, translate
from shardyard.model import Appended, Busy, Fence, Partition, Position, Record, ShardyardError, Stamp
from shardyard.model.batch import from_records
from shardyard.runtime.group_commit import GroupCommit, Outcome

GROUP_BYTES = 32 * 1024 * 1024
"""The most that one commit writes."""
GROUP_REQUESTS = 4096
LINGER_SECONDS = 0.001
"""How long to wait for producers whose appends have just returned to append again."""
_RETRY_SECONDS = 0.0005
"""How often to try for the write lock while another process holds it."""


@dataclass(slots=True)
class Append:
    """Validated records for a partition."""

    partition: Partition
    records: Sequence[Record] | pa.RecordBatch
    size: int
    stamp: Stamp | None
    fence: Fence | None
    generation: int | None


@dataclass(slots=True)
class Operation:
    """Any other change: a function of the connection and the time in milliseconds. It raises a `ShardyardError` only
    before it has changed anything."""

    work: Callable[[sqlite3.Connection, int], Any]
    size: int = 0


@dataclass(slots=True)
class _Tail:
    """What a transaction adds to one partition."""

    found: store.Found
    parts: list[tuple[int, Sequence[Record] | pa.RecordBatch]] = field(default_factory=list)


class OnCommit(Protocol):
    """Called with the new ends by partition id, and whether nothing else was changed."""

    def __call__(self, ends: dict[int, int], *, only_appends: bool) -> None: ...


class Writer:
    """Writes what the tasks of an event loop submit, everything that is waiting in one commit."""

    def __init__(
        self,
        path: Path,
        durability: Durability,
        busy_wait: float,
        now: Callable[[], int],
        on_commit: OnCommit,
    ) -> None:
        """`busy_wait`: seconds to wait for other processes. `now`: the time in milliseconds. `on_commit` is called with
        the new ends by partition id, before any caller gets its result."""
        self._path = path
        self._now = now
        self._busy_wait = busy_wait
        self._on_commit = on_commit
        self._db = connect(path, durability)
        self._db.execute("PRAGMA busy_timeout = 0")  # `_begin` tries more often than SQLite would
        self._checkpoints = Checkpoints(path)
        self._group_commit = GroupCommit(
            "the log's writer", self._carry_out, most=GROUP_REQUESTS, most_bytes=GROUP_BYTES, linger=LINGER_SECONDS
        )

    @property
    def waiting_bytes(self) -> int:
        return self._group_commit.waiting_bytes

    async def do(self, request: Append | Operation) -> Any:
        """Carry out a request. It is durable when this returns."""
        return await self._group_commit.do(request, request.size)

    def close(self) -> None:
        """Finish what was submitted, then stop."""
        self._group_commit.close()
        self._checkpoints.close()
        self._db.close()

    def _carry_out(self, group: list[Append | Operation]) -> list[Outcome]:
        self._checkpoints.finish(self._db)
        try:
            outcomes, ends, batches = self._commit(group)
        except sqlite3.Error as error:
            raise translate(error, self._path) from error
        only_appends = all(isinstance(request, Append) for request in group)
        self._on_commit(ends, only_appends=only_appends)
        written = sum(request.size for request in group) + batches * 2 * PAGE_BYTES
        if not only_appends:  # other requests may write any amount
            written = max(written, self._checkpoints.wal_bytes())
        self._checkpoints.grew(written)
        return outcomes

    def _commit(self, group: list[Append | Operation]) -> tuple[list[Outcome], dict[int, int], int]:
        """Carry out the group in one transaction. Returns an outcome for each request, the new ends, and the number of
        batches that were written."""
        db = self._db
        self._begin()
        now = self._now()
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
                        outcomes.append(request.work(db, now))
                except ShardyardError as error:  # refused before it changed anything: the others continue
                    outcomes.append(error)
            batches += _write(db, tails, ends, now)
            db.execute("COMMIT")
        except BaseException:
            if db.in_transaction:
                db.execute("ROLLBACK")
            raise
        return outcomes, ends, batches

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


def _append(db: sqlite3.Connection, tails: dict[Partition, _Tail], request: Append, now: int) -> Appended:
    rules.check_partition(request.partition)
    tail = tails.get(request.partition)
    if tail is None:
        tail = tails[request.partition] = _Tail(store.find(db, request.partition))
    found = tail.found
    fence_rises = request.fence is not None and store.check_fence(db, request.fence)
    known = request.stamp and store.find_stamp(db, request.partition, found, request.stamp)
    if request.stamp and known:
        rules.check_same_batch(request.stamp, known[1], len(request.records))
    else:
        if found.sealed and found.successor is None and not found.sealed_since <= now < found.sealed_until:
            store.end_seal(db, request.partition.topic)
            found.sealed = False
        rules.check_receives(
            request.partition, found.sealed, found.successor, found.receiving, found.generation, request.generation
        )
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
    """Store the records of all tails. Returns the number of batches.

    Appends of records to a partition that follow each other become one batch. For speed, the records of all partitions
    are converted to Arrow at once.
    """
    loose: list[Record] = []
    runs: list[tuple[int, int, int, int]] = []  # partition id, first offset, index in `loose`, number of records
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
