"""Group commit: a thread writes for all producers of the process, everything that is waiting in one commit."""

from collections.abc import Callable
from contextlib import ExitStack

from shardyard.log.appending import Append, Appending
from shardyard.log.postgresql import appends
from shardyard.log.postgresql.sessions import Session
from shardyard.model import Appended, ShardyardError
from shardyard.model.url import EngineUrl
from shardyard.runtime.group_commit import GroupCommit, Outcome, after_commit
from shardyard.runtime.postgresql import Connection

GROUP_BYTES = 16 * 1024 * 1024
"""The most that one commit writes."""
GROUP_APPENDS = 4096
LINGER_SECONDS = 0.001
"""How long to wait for producers whose appends have just returned to append again."""


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
            "the log's writer", self._carry_out, most=GROUP_APPENDS, most_bytes=GROUP_BYTES, linger=LINGER_SECONDS
        )

    @property
    def waiting_bytes(self) -> int:
        return self._group_commit.waiting_bytes

    async def append(self, request: Append) -> Appended:
        """Returns when the records are durable."""
        appended: Appended = await self._group_commit.do(request, request.size)
        return appended

    def close(self) -> None:
        """Finish what was submitted, then stop."""
        self._group_commit.close()
        self._session.close()

    def _carry_out(self, group: list[Append]) -> list[Outcome]:
        outcomes, ends = self._session.run(lambda connection: self._write(connection, group))
        if ends:
            after_commit(lambda: self._on_commit(ends))
        return outcomes

    def _write(self, connection: Connection, group: list[Append]) -> tuple[list[Outcome], dict[int, int]]:
        with ExitStack() as stack:
            pipeline = stack.enter_context(connection.pipeline())
            stored = appends.Stored(connection, pipeline, group)
            now = stored.now if self._now is None else self._now()
            appending = Appending(stored, now)
            outcomes = [_outcome(appending, request) for request in group]
            changes = appending.changes()
            leave_pipeline = stack.pop_all()
        self._session.commit(connection, lambda: appends.put(connection, leave_pipeline, changes, now))
        return outcomes, changes.ends


def _outcome(appending: Appending, request: Append) -> Outcome:
    try:
        return appending.append(request)
    except ShardyardError as error:  # refused: the others continue
        return error
