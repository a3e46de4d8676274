"""Group commit: one thread writes for all producers of the process, what waits together in one commit."""

import sqlite3
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from shardyard.log.port import check_partition, check_receives, check_same_batch
from shardyard.log.sqlite import store
from shardyard.log.sqlite.checkpoints import Checkpoints
from shardyard.log.sqlite.files import PAGE_BYTES, Durability, connect, translate
from shardyard.model import Appended, Busy, Fence, Partition, Position, Record, ShardyardError, Stamp, Topic
from shardyard.model.batch import from_records, now_ms
from shardyard.runtime.group_commit import GroupCommit, Outcome

GROUP_BYTES = 32 * 1024 * 1024
"""What one commit takes at the most."""
GROUP_REQUESTS = 4096
LINGER_SECONDS = 0.001
"""How long to wait for producers that were just answered to append again."""
_RETRY_SECONDS = 0.0005
"""How often to ask for the write lock that another process holds."""


@dataclass(slots=True)
class Append:
    """Records (checked before) for a partition."""

    partition: Partition
    records: Sequence[Record] | pa.RecordBatch
    size: int
    stamp: Stamp | None
    fence: Fence | None
    placed_on: Topic | None


@dataclass(slots=True)
class Operation:
    """Anything else that writes: a function on the connection, which checks before it changes."""

    work: Callable[[sqlite3.Connection], Any]
    size: int = 0


@dataclass(slots=True)
class _Tail:
    """What a transaction adds to one partition."""

    found: store.Found
    parts: list[tuple[int, Sequence[Record] | pa.RecordBatch]] = field(default_factory=list)


class Writer:
    """Writes what the tasks of an event loop ask for, all that waits in one commit."""

    def __init__(
        self, path: Path, durability: Durability, busy_wait: float, on_commit: Callable[[dict[int, int]], None]
    ) -> None:
        """`on_commit` is told the new ends by partition id, before anyone is answered."""
        self._path = path
        self._busy_wait = busy_wait
        self._on_commit = on_commit
        self._db = connect(path, durability)
        self._db.execute("PRAGMA busy_timeout = 0")  # `_begin` asks more often than SQLite would
        self._checkpoints = Checkpoints(path)
        self._together = GroupCommit(
            "the log's writer", self._carry_out, most=GROUP_REQUESTS, most_bytes=GROUP_BYTES, linger=LINGER_SECONDS
        )

    @property
    def waiting_bytes(self) -> int:
        return self._together.waiting_bytes

    async def do(self, request: Append | Operation) -> Any:
        """Write it; when this returns, it is durable."""
        return await self._together.do(request, request.size)

    def close(self) -> None:
        """Finish what was asked for, then stop."""
        self._together.close()
        self._checkpoints.close()
        self._db.close()

    def _carry_out(self, group: list[Append | Operation]) -> list[Outcome]:
        self._checkpoints.finish(self._db)
        try:
            outcomes, ends, batches = self._commit(group)
        except sqlite3.Error as error:
            raise translate(error, self._path) from error
        if ends:
            self._on_commit(ends)
        written = sum(request.size for request in group) + batches * 2 * PAGE_BYTES
        if any(isinstance(request, Operation) for request in group):  # these may write any amount
            written = max(written, self._checkpoints.wal_bytes())
        self._checkpoints.grew(written)
        return outcomes

    def _commit(self, group: list[Append | Operation]) -> tuple[list[Outcome], dict[int, int], int]:
        """Carry out the group in one transaction: an outcome for each, the new ends, and how many batches it took."""
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
    check_partition(request.partition)
    tail = tails.get(request.partition)
    if tail is None:
        tail = tails[request.partition] = _Tail(store.find(db, request.partition))
    found = tail.found
    fence_rises = request.fence is not None and store.check_fence(db, request.fence)
    known = request.stamp and store.find_stamp(db, request.partition, found, request.stamp)
    if request.stamp and known:
        check_same_batch(request.stamp, known[1], len(request.records))
    else:
        marks = (found.sealed, found.successor, found.epoch, found.receiving)
        check_receives(request.partition, *marks, request.placed_on)
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
