"""Connections that threads of the log work with: opened when they are needed, replaced when they are lost."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from threading import Lock, local
from typing import TypeVar

import psycopg

from shardyard.model import Busy, Damaged, DatabaseUnavailable, OutcomeUnknown
from shardyard.model.url import EngineUrl
from shardyard.runtime.postgresql import RESPONSE_SECONDS, Aborted, Connection, connect, first_line, translated_errors
from shardyard.runtime.retry import Backoff

T = TypeVar("T")

BUSY_SECONDS = 20.0
"""How long a transaction that the database aborts because of others is repeated."""
_SETTINGS: dict[str, str | int | float] = {
    "tcp_keepalives_idle": 10,  # seconds; on the server's side, for the locks of a machine that is gone
    "tcp_keepalives_interval": 5,
    "tcp_keepalives_count": 2,
}
IDLE_LOSS_SECONDS = 1.0
"""A connection that was lost while it was idle fails within this time. If it takes longer, the server hangs."""
_CUT = ("08", "57P")
"""How the codes of errors begin that come with the end of a connection."""
_BACKOFF = Backoff(first=0.002, longest=0.1)


def _times(response_seconds: float) -> dict[str, str | int | float]:
    """Limits on the server's side. It does not go on with a statement that we have given up, nor keep the locks of a
    process that was stopped, for which others wait half as long at a time."""
    limit = int(response_seconds * 1000)
    return {"statement_timeout": limit, "idle_in_transaction_session_timeout": limit, "lock_timeout": limit // 2}


class Session:
    """One connection for one thread at a time."""

    def __init__(self, url: EngineUrl, purpose: str, on_reconnect: Callable[[], None] | None = None) -> None:
        """`on_reconnect` is called before a new connection is used in place of one that was lost: it may be to another
        server, which took over and may have lost the last commits."""
        self._url = url
        self._purpose = purpose
        self._on_reconnect = on_reconnect
        self._was_connected = False
        self._connection: Connection | None = None

    def transact(self, work: Callable[[Connection], T]) -> T:
        """The result of `work`, in a transaction. `work` may run twice, but is committed once.

        `OutcomeUnknown` if the connection is lost during the commit.
        """

        def transaction(connection: Connection) -> T:
            connection.execute("BEGIN")
            result = work(connection)
            self.commit(connection, lambda: connection.execute("COMMIT"))
            return result

        return self.run(transaction)

    def commit(self, connection: Connection, statements: Callable[[], object]) -> None:
        """Run the statements that end a transaction. `OutcomeUnknown` if the connection is lost meanwhile."""
        try:
            statements()
        except psycopg.OperationalError as error:
            if connection.closed or error.sqlstate is None or error.sqlstate.startswith(_CUT):
                connection.close()
                raise OutcomeUnknown(str(self._url), first_line(error)) from error
            raise

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def run(self, work: Callable[[Connection], T]) -> T:
        """The result of statements that may run twice: when the database aborts them because of others, and when the
        connection turns out to have been lost while it was idle."""
        started = time.monotonic()
        attempt = 0
        while True:
            attempt += 1
            used_before = self._connection is not None
            try:
                with translated_errors(self._url):
                    return work(self._connected())
            except Aborted as error:
                if time.monotonic() - started > BUSY_SECONDS:
                    raise Busy(str(self._url), BUSY_SECONDS) from error
                time.sleep(_BACKOFF.delay(attempt))
            except DatabaseUnavailable:
                if not used_before or time.monotonic() - started > IDLE_LOSS_SECONDS:
                    raise
            except psycopg.IntegrityError as error:  # our statements are right, so what is stored is not
                raise Damaged(str(self._url), first_line(error)) from error
            finally:
                self._leave()

    def _connected(self) -> Connection:
        if self._connection is None:
            settings = _SETTINGS | _times(RESPONSE_SECONDS)
            self._connection = connect(self._url, self._purpose, response_seconds=RESPONSE_SECONDS, settings=settings)
            if self._was_connected and self._on_reconnect is not None:
                self._on_reconnect()
            self._was_connected = True
        return self._connection

    def _leave(self) -> None:
        """Keep the connection if it can be used again, outside of any transaction."""
        connection = self._connection
        if connection is None:
            return
        if not connection.closed and connection.info.transaction_status != psycopg.pq.TransactionStatus.IDLE:
            with suppress(psycopg.Error):
                connection.execute("ROLLBACK")
        if connection.closed or connection.info.transaction_status != psycopg.pq.TransactionStatus.IDLE:
            self.close()


class Sessions:
    """A few threads with a session each, for reads and changes from an event loop."""

    def __init__(self, url: EngineUrl, threads: int, on_reconnect: Callable[[], None]) -> None:
        """`on_reconnect`: see `Session`. It is called in any of the threads."""
        self._url = url
        self._on_reconnect = on_reconnect
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="shardyard-log")
        self._local = local()
        self._sessions: list[Session] = []
        self._lock = Lock()

    async def run(self, work: Callable[[Connection], T]) -> T:
        return await asyncio.wrap_future(self.submit(lambda session: session.run(work)))

    async def transact(self, work: Callable[[Connection], T]) -> T:
        return await asyncio.wrap_future(self.submit(lambda session: session.transact(work)))

    def submit(self, work: Callable[[Session], T]) -> "Future[T]":
        return self._threads.submit(self._run, work)

    def close(self) -> None:
        """Finish what was submitted, then close all connections."""
        self._threads.shutdown()
        for session in self._sessions:
            session.close()

    def _run(self, work: Callable[[Session], T]) -> T:
        session: Session | None = getattr(self._local, "session", None)
        if session is None:
            session = self._local.session = Session(self._url, "log", self._on_reconnect)
            with self._lock:
                self._sessions.append(session)
        return work(session)
