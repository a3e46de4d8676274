"""`SharedConnection`: a connection to PostgreSQL for one transaction at a time, which is replaced when it is lost."""

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import cast

import psycopg
from psycopg.pq import TransactionStatus
from sqlalchemy import Connection, create_engine
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.pool import NullPool

from shardyard.model import Busy, Closed, DatabaseUnavailable, OutcomeUnknown
from shardyard.model.url import EngineUrl
from shardyard.registry.migrations import Migration
from shardyard.registry.port import TransactionAborted
from shardyard.runtime import postgresql
from shardyard.runtime.postgresql import Aborted, connect, translated

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
_NOW = "SELECT extract(epoch FROM clock_timestamp())::float8, NULL"
_NOW_AND_NUMBER = "SELECT extract(epoch FROM clock_timestamp())::float8, pg_current_xact_id()::text"
_TIMELINE = "SELECT left(pg_walfile_name(pg_current_wal_insert_lsn()), 8)"
"""Changes when a standby takes over or a backup is restored: transaction numbers may then mean other transactions."""

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
        self._timeline: object = None
        self._in_use = threading.Lock()
        self._closed = False

    @contextmanager
    def transaction(self, mode: str, wait: float) -> Iterator[Connection]:
        """A transaction of this isolation level; see `Store.begin`.

        A connection that is lost before the commit leaves nothing behind, so the transaction may be run again
        (`TransactionAborted`). When it is lost during the commit, the server is asked on a new connection whether the
        transaction was committed; `OutcomeUnknown` if it does not know, or can't be reached in time.
        """
        with self._turn(wait):
            connection, number = self._begin(mode, wait)
            raw = driver_connection(connection)
            try:
                try:
                    yield connection
                    self._commit(raw, number)
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
            connection = self._engine.connect()
            try:
                self._timeline = driver_connection(connection).execute(_TIMELINE).fetchone()
            except psycopg.Error as error:
                connection.close()
                raise self._translated(error, None) from error
            self._connection = connection
        return self._connection

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(SQLAlchemyError, psycopg.Error):  # of a connection that is lost anyway
                connection.close()

    def _begin(self, mode: str, wait: float) -> tuple[Connection, str]:
        """Begin a transaction, and get its number. A connection that was lost since its last use is replaced."""
        # A lock that others have for too long aborts the transaction, which is run again if there is time left.
        lock_milliseconds = max(1, int(min(wait, _RESPONSE_SECONDS * 0.8) * 1000))
        statement = f"BEGIN ISOLATION LEVEL {mode}; SET LOCAL lock_timeout = {lock_milliseconds}; " + (
            _NOW if mode.endswith("READ ONLY") else _NOW_AND_NUMBER
        )
        is_new = self._connection is None
        connection = self._connected()
        raw = driver_connection(connection)
        try:
            cursor = raw.execute(statement.encode())
            while cursor.nextset():
                pass
            connection.info[NOW], number = cast(tuple[float, str], cursor.fetchone())
        except psycopg.Error as error:
            self._drop()
            if is_new or not raw.closed:
                raise self._translated(error, None) from error
            return self._begin(mode, wait)
        return connection, number

    def _commit(self, raw: psycopg.Connection, number: str) -> None:
        if raw.info.transaction_status == TransactionStatus.INERROR:  # PostgreSQL would roll back, and report no error
            raise psycopg.errors.InFailedSqlTransaction("the work went on after an error")
        try:
            raw.commit()
        except psycopg.Error as error:
            if not raw.closed:
                raise
            self._settle(number, error)

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

    def _settle(self, number: str, cause: psycopg.Error) -> None:
        """Return if the transaction was committed. `TransactionAborted` if it was not."""
        deadline = time.monotonic() + self._busy_wait
        timeline = self._timeline
        while True:
            self._drop()
            try:
                status = self._status(number, timeline)
            except DatabaseUnavailable:
                status = "in progress"
            if status == "committed":
                return
            if status == "aborted":
                raise TransactionAborted(self._name, str(cause)) from cause
            if status is None or time.monotonic() > deadline:
                raise OutcomeUnknown(str(self._url), str(cause).strip()) from cause
            time.sleep(_RETRY_SECONDS)

    def _status(self, number: str, timeline: object) -> str | None:
        raw = driver_connection(self._connected())
        if self._timeline != timeline:
            return None
        try:
            row = raw.execute("SELECT pg_xact_status(%s::xid8)", [number]).fetchone()
        except psycopg.Error as error:
            raise DatabaseUnavailable(str(self._url), str(error)) from error
        return None if row is None else row[0]

    def _translated(self, error: DBAPIError | psycopg.Error, raw: psycopg.Connection | None) -> Exception:
        """Our error for PostgreSQL's; `raw` is the connection of a transaction that was not committed."""
        cause = error.orig if isinstance(error, DBAPIError) else error
        if not isinstance(cause, psycopg.Error):
            return error
        # Two transactions that put the same new row: the second one is to see the row of the first.
        if (raw is not None and raw.closed) or isinstance(cause, psycopg.errors.UniqueViolation):
            return TransactionAborted(self._name, str(cause).strip())
        ours = translated(cause, self._url)
        if isinstance(ours, Aborted):
            return TransactionAborted(self._name, ours.why)
        return error if ours is None else ours


def driver_connection(connection: Connection) -> postgresql.Connection:
    """The connection of psycopg below SQLAlchemy's."""
    return cast(postgresql.Connection, connection.connection.driver_connection)
