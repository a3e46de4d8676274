"""Group commit: one thread writes for all producers of the process, everything that is waiting in one commit."""

import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

from shardyard.log.appending import Append, Appending
from shardyard.log.sqlite import store
from shardyard.log.sqlite.checkpoints import Checkpoints
from shardyard.log.sqlite.files import PAGE_BYTES, Durability, connect, translate
from shardyard.model import Busy, ShardyardError
from shardyard.runtime.group_commit import GroupCommit, Outcome, after_commit

GROUP_BYTES = 32 * 1024 * 1024
"""The most that one commit writes."""
GROUP_REQUESTS = 4096
LINGER_SECONDS = 0.001
"""How long to wait for producers whose appends have just returned to append again."""
_RETRY_SECONDS = 0.0005
"""How often to try for the write lock while another process holds it."""


@dataclass(slots=True)
class Operation:
    """Any other change: a function of the connection and the time in milliseconds. It raises a `ShardyardError` only
    before it has changed anything."""

    work: Callable[[sqlite3.Connection, int], Any]
    size: int = 0


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
        after_commit(lambda: self._committed(group, ends, batches))
        return outcomes

    def _committed(self, group: list[Append | Operation], ends: dict[int, int], batches: int) -> None:
        only_appends = all(isinstance(request, Append) for request in group)
        self._on_commit(ends, only_appends=only_appends)
        written = sum(request.size for request in group) + batches * 2 * PAGE_BYTES
        if not only_appends:  # other requests may write any amount
            written = max(written, self._checkpoints.wal_bytes())
        self._checkpoints.grew(written)

    def _commit(self, group: list[Append | Operation]) -> tuple[list[Outcome], dict[int, int], int]:
        """Carry out the group in one transaction. Returns an outcome for each request, the new ends, and the number of
        batches that were written."""
        db = self._db
        self._begin()
        now = self._now()
        try:
            ends: dict[int, int] = {}
            outcomes: list[Outcome] = []
            batches = 0
            for _, requests in groupby(group, type):
                appending = Appending(store.Stored(db), now)
                for request in requests:
                    if isinstance(request, Append):
                        outcomes.append(_outcome(appending.append, request))
                    else:
                        outcomes.append(_outcome(request.work, db, now))
                changes = appending.changes()
                store.put(db, changes, now)
                ends |= changes.ends
                batches += len(changes.batches)
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


def _outcome(work: Callable[..., Any], *arguments: object) -> Outcome:
    try:
        return work(*arguments)
    except ShardyardError as error:  # refused before it changed anything: the others continue
        return error
