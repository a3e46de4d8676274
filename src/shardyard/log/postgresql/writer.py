"""Group commit: a thread writes for all producers of the process, everything that is waiting in one commit."""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import chain, islice

from shardyard.log.appending import Append, Appending, outcome_of
from shardyard.log.database import LINGER_SECONDS
from shardyard.log.postgresql import appends
from shardyard.log.postgresql.sessions import Session
from shardyard.model import Appended, ShardyardError
from shardyard.model.url import EngineUrl
from shardyard.runtime.group_commit import GroupCommit, Outcome, after_commit
from shardyard.runtime.postgresql import Aborted, Connection

GROUP_BYTES = 16 * 1024 * 1024
"""The most that one commit writes."""
GROUP_CALLS = 4096
MISSING_SECONDS = 0.5
"""How long partitions are looked for that their topic should have. Then appends to them are refused."""


class Writer:
    """Writes what the tasks of an event loop submit, everything that is waiting in one commit."""

    def __init__(
        self, url: EngineUrl, now: Callable[[], int] | None, on_commit: Callable[[dict[int, int]], None]
    ) -> None:
        """`now`: the time in milliseconds; None for the database's. `on_commit` is called with the new ends by
        partition id, before any caller gets its result."""
        self._now = now
        self._on_commit = on_commit
        self._session = Session(url, "log writer")
        self._group_commit = GroupCommit(
            "the log's writer", self._carry_out, most=GROUP_CALLS, most_bytes=GROUP_BYTES, linger=LINGER_SECONDS
        )

    @property
    def waiting_bytes(self) -> int:
        return self._group_commit.waiting_bytes

    async def append(self, requests: Sequence[Append]) -> list[Appended | ShardyardError]:
        """Append in one commit. Returns when the records are durable."""
        outcomes: list[Appended | ShardyardError]
        outcomes = await self._group_commit.do(requests, sum(request.size for request in requests))
        return outcomes

    def close(self) -> None:
        """Finish what was submitted, then stop."""
        self._group_commit.close()
        self._session.close()

    def _carry_out(self, group: list[Sequence[Append]]) -> list[Outcome]:
        deadline = time.monotonic() + MISSING_SECONDS
        appends_ = list(chain.from_iterable(group))
        outcomes, ends = self._session.run(lambda connection: self._write(connection, appends_, deadline))
        if ends:
            after_commit(lambda: self._on_commit(ends))
        remaining = iter(outcomes)
        return [list(islice(remaining, len(requests))) for requests in group]

    def _write(
        self, connection: Connection, group: list[Append], deadline: float
    ) -> tuple[list[Outcome], dict[int, int]]:
        with ExitStack() as stack:
            pipeline = stack.enter_context(connection.pipeline())
            stored = appends.PostgresqlLookup(connection, pipeline, group)
            if stored.missing and time.monotonic() < deadline:
                raise Aborted(str(stored.missing[0]), "its topic was deleted and created again meanwhile")
            now = stored.now if self._now is None else self._now()
            appending = Appending(stored, now)
            outcomes = [outcome_of(appending.append, request) for request in group]
            changes = appending.changes()
            leave_pipeline = stack.pop_all()
        self._session.commit(connection, lambda: appends.put(connection, leave_pipeline, changes, now))
        return outcomes, changes.ends
