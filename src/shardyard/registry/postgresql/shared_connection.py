"""`SharedConnection`: a connection to PostgreSQL for one transaction at a time, which is replaced when it is lost."""

import logging
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import cast

import psycopg
from psycopg.pq import TransactionStatus
from sqlalchemy import Connection, create_engine
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.pool import NullPool

from shardyard.model import Busy, Closed, OutcomeUnknown, ShardyardError
from shardyard.model.url import EngineUrl
from shardyard.registry.migrations import Migration
from shardyard.registry.port import DuplicateRow, TransactionAborted
from shardyard.runtime import postgresql
from shardyard.runtime.postgresql import Aborted, connect, first_line, translated

NOW = "now"
"""The key in `Connection.info` of the database's time when the transaction began."""

_RESPONSE_SECONDS = 5.0
"""How long a statement may go without a response. It is less than a usual session of a member, so that a member that
hangs on a lost connection can still send its heartbeat on another one."""
_RETRY_SECONDS = 0.05
"""Between two questions for the outcome of a commit."""

_SETTINGS: dict[str, str | int | float] = {
    # A scan of a whole table conflicts with every write to it, and our tables are small enough to be scanned.
    "enable_seqscan": "off",
    # A process that stops in the middle of a transaction would keep its locks.
    "idle_in_transaction_session_timeout": "10s",
}
_NOW = "SELECT extract(epoch FROM clock_timestamp())::float8"

_REGISTER = """
WITH gone AS (DELETE FROM writers WHERE used_at < extract(epoch FROM clock_timestamp()) - 86400)
INSERT INTO writers VALUES (%s, 0, extract(epoch FROM clock_timestamp()))
"""
"""Also removes the writers that have not committed for a day: most of them have ended. One that has not registers
again with its next commit."""
_COMMIT = """
WITH recorded AS (
    UPDATE writers SET last_commit = {number}, used_at = extract(epoch FROM clock_timestamp())
    WHERE id = '{writer}' AND pg_current_xact_id_if_assigned() IS NOT NULL RETURNING 1
)
SELECT 1 / CASE WHEN pg_current_xact_id_if_assigned() IS NULL THEN 1 ELSE count(*) END FROM recorded;
COMMIT
"""
"""A transaction that has changed nothing has no number in PostgreSQL, and records nothing, so that it need not be
synced to disk. One that has changed something, and whose writer is not registered, fails with a division by zero."""
_END_WRITER = "DELETE FROM writers WHERE id = %s RETURNING last_commit"
"""It waits for a commit of this writer in progress. Later ones fail."""

_log = logging.getLogger(__name__)


class SharedConnection:
    """The threads of this process wait for each other here, and for other processes in PostgreSQL."""

    def __init__(self, url: EngineUrl, purpose: str, busy_wait: float) -> None:
        """It connects when it is first used."""
        self._url = url
        self._busy_wait = busy_wait
        self._name = f"registry {url}"
        self._engine = create_engine(
            "postgresql+psycopg://",
            creator=lambda: connect(url, purpose, response_seconds=_RESPONSE_SECONDS, settings=_SETTINGS),
            poolclass=NullPool,
            pool_reset_on_return=None,  # a transaction is ended here, and a connection that is lost has none
            use_native_hstore=False,
        )
        self._connection: Connection | None = None
        self._writer: str | None = None
        """The row of `writers` that this process has; None if it has none yet."""
        self._number = 0
        """Of the last commit that was attempted. Each has a new one."""
        self._in_use = threading.Lock()
        self._closed = False

    @contextmanager
    def transaction(self, mode: str, wait: float) -> Iterator[Connection]:
        """A transaction of this isolation level; see `Store.begin`.

        A connection that is lost before the commit leaves nothing behind, so the transaction may be run again
        (`TransactionAborted`). When it is lost during the commit, the database is asked on a new connection whether the
        transaction was committed; `OutcomeUnknown` if it does not know, or can't be asked in time.

        Every transaction that changes something therefore stores its own number in the process's row of `writers`.
        PostgreSQL's transaction numbers do not serve: after a crash it assigns those again that it had not yet
        written to disk, so the number of a lost transaction may be that of another one, which was committed.
        """
        writes = not mode.endswith("READ ONLY")
        with self._turn(wait):
            connection = self._begin(mode, wait, writes=writes)
            raw = driver_connection(connection)
            try:
                try:
                    yield connection
                    self._commit(raw, writes=writes)
                finally:
                    self._end(connection, raw)
            except (DBAPIError, psycopg.Error) as error:
                raise self._translated(error, raw) from error

    def migrate(self, migrations: Sequence[Migration], now: float) -> None:
        """Bring the tables up to date. `now` is the registry's time."""

        def step(migration: Migration) -> postgresql.Migration:
            return lambda _raw_connection: migration(connection, now)

        with self._turn(self._busy_wait):
            connection = self._connected()
            raw = driver_connection(connection)
            try:
                postgresql.migrate(raw, self._url, "registry", [step(migration) for migration in migrations])
            except DBAPIError as error:
                raise self._translated(error, raw) from error
            finally:
                connection.rollback()  # SQLAlchemy's own notion of a transaction

    def close(self) -> None:
        """A transaction in progress may finish."""
        self._closed = True
        self._release_if_closed()

    @contextmanager
    def _turn(self, wait: float) -> Iterator[None]:
        if not self._in_use.acquire(timeout=wait):
            raise Busy(self._name, self._busy_wait)
        try:
            if self._closed:
                raise Closed("registry")
            yield
        finally:
            self._in_use.release()
            self._release_if_closed()

    def _release_if_closed(self) -> None:
        """Either the transaction in progress or `close` closes the connection, whichever ends last."""
        if self._closed and self._in_use.acquire(blocking=False):
            try:
                self._drop()
            finally:
                self._in_use.release()

    def _connected(self) -> Connection:
        if self._connection is None:
            try:
                self._connection = self._engine.connect()
            except DBAPIError as error:  # of the first statements, by which SQLAlchemy gets to know the server
                raise self._translated(error, None) from error
        return self._connection

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(SQLAlchemyError, psycopg.Error):  # of a connection that is lost anyway
                connection.close()

    def _begin(self, mode: str, wait: float, *, writes: bool) -> Connection:
        """Begin a transaction. A connection that was lost since its last use is replaced."""
        # A lock that others have for too long aborts the transaction, which is run again if there is time left.
        lock_milliseconds = max(1, int(min(wait, _RESPONSE_SECONDS * 0.8) * 1000))
        statement = f"BEGIN ISOLATION LEVEL {mode}; SET LOCAL lock_timeout = {lock_milliseconds}; {_NOW}"
        is_new = self._connection is None
        connection = self._connected()
        raw = driver_connection(connection)
        try:
            if writes and self._writer is None:
                self._register(raw)
            cursor = raw.execute(statement.encode())
            while cursor.nextset():
                pass
            (connection.info[NOW],) = cast(tuple[float], cursor.fetchone())
        except psycopg.Error as error:
            self._drop()
            if is_new or not raw.closed:
                raise self._translated(error, None) from error
            return self._begin(mode, wait, writes=writes)
        return connection

    def _register(self, raw: psycopg.Connection) -> None:
        writer = uuid.uuid4().hex
        raw.execute(_REGISTER, [writer])
        self._writer = writer

    def _commit(self, raw: psycopg.Connection, *, writes: bool) -> None:
        if raw.info.transaction_status == TransactionStatus.INERROR:  # PostgreSQL would roll back, and report no error
            raise psycopg.errors.InFailedSqlTransaction("the work went on after an error")
        if not writes:
            raw.commit()
            return
        self._number += 1
        try:
            raw.execute(_COMMIT.format(number=self._number, writer=self._writer).encode(), prepare=False)
        except psycopg.errors.DivisionByZero as error:
            self._writer = None
            raise TransactionAborted(self._name, "this process was idle for so long that it was forgotten") from error
        except psycopg.Error as error:
            if not raw.closed:
                raise
            self._settle(error)

    def _end(self, connection: Connection, raw: psycopg.Connection) -> None:
        """Roll back what was not committed. SQLAlchemy, which did not begin the transaction, forgets about it."""
        try:
            if not raw.closed:
                raw.rollback()
                connection.rollback()
                return
        except (SQLAlchemyError, psycopg.Error) as error:
            _log.debug("%s: can't roll back, will reconnect: %s", self._name, error)
        if self._connection is connection:
            self._drop()

    def _settle(self, cause: psycopg.Error) -> None:
        """Return if the last commit was carried out. `TransactionAborted` if it was not, and never will be."""
        writer, self._writer = self._writer, None
        deadline = time.monotonic() + self._busy_wait
        while True:
            self._drop()
            try:
                row = driver_connection(self._connected()).execute(_END_WRITER, [writer]).fetchone()
                break
            except (ShardyardError, SQLAlchemyError, psycopg.Error) as error:
                if time.monotonic() > deadline:
                    why = f"{first_line(cause)}; then the database could not be asked: {first_line(error)}"
                    raise OutcomeUnknown(str(self._url), why) from cause
            time.sleep(_RETRY_SECONDS)
        if row is None:  # the response to an earlier question was lost, or the database was restored from a backup
            raise OutcomeUnknown(str(self._url), first_line(cause)) from cause
        if row[0] != self._number:
            raise TransactionAborted(self._name, first_line(cause)) from cause

    def _translated(self, error: DBAPIError | psycopg.Error, raw: psycopg.Connection | None) -> Exception:
        """Our error for PostgreSQL's; `raw` is the connection of a transaction that was not committed."""
        cause = error.orig if isinstance(error, DBAPIError) else error
        if not isinstance(cause, psycopg.Error):
            return error
        if isinstance(cause, psycopg.errors.UniqueViolation):
            return DuplicateRow(self._name, first_line(cause))
        if raw is not None and raw.closed:
            return TransactionAborted(self._name, first_line(cause))
        ours = translated(cause, self._url)
        if isinstance(ours, Aborted):
            return TransactionAborted(self._name, ours.why)
        return error if ours is None else ours


def driver_connection(connection: Connection) -> postgresql.Connection:
    """The connection of psycopg below SQLAlchemy's."""
    return cast(postgresql.Connection, connection.connection.driver_connection)
