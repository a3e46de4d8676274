"""A history in PostgreSQL, for any number of processes on any machines."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import psycopg
from sqlalchemy import Connection, Insert, create_engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import QueuePool

from shardyard.messaging.history.schema import MIGRATIONS
from shardyard.messaging.history.sql import CONNECTIONS
from shardyard.messaging.history.writing import Values
from shardyard.model import Busy, OutcomeUnknown
from shardyard.model.url import EngineUrl
from shardyard.runtime import postgresql
from shardyard.runtime.postgresql import RESPONSE_SECONDS, Aborted, connect, first_line, translated
from shardyard.runtime.retry import Backoff

T = TypeVar("T")

_BUSY_SECONDS = 20.0
"""How long a transaction that the database aborts because of others is repeated."""
_BACKOFF = Backoff(first=0.002, longest=0.1)
_RESPONSE_MS = int(RESPONSE_SECONDS * 1000)
_SETTINGS: dict[str, str | int | float] = {
    "statement_timeout": _RESPONSE_MS,
    "idle_in_transaction_session_timeout": _RESPONSE_MS,
    "lock_timeout": _RESPONSE_MS // 2,
}
"""The server does not go on with what we have given up, nor keep the locks of a process that was stopped."""


class PostgresqlDatabase:
    """The tables of a history in the schema `shardyard`, which is created if it does not exist. A connection that is
    lost is replaced."""

    def __init__(self, url: EngineUrl) -> None:
        self._url = url
        self._engine = create_engine(
            "postgresql+psycopg://",
            creator=lambda: connect(url, "history", settings=_SETTINGS),
            poolclass=QueuePool,
            pool_size=CONNECTIONS,
            max_overflow=0,
            pool_pre_ping=True,
            use_native_hstore=False,
        )
        self._compiled: dict[Insert, str] = {}
        """The SQL of the statements of `run_each`."""
        try:
            self._migrate()
        except BaseException:
            self.close()
            raise

    def read(self, work: Callable[[Connection], T]) -> T:
        return self._repeated("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY", work)

    def write(self, work: Callable[[Connection], T]) -> T:
        """`OutcomeUnknown` if the connection is lost during the commit."""
        return self._repeated("BEGIN ISOLATION LEVEL READ COMMITTED", work)

    def run_each(
        self, connection: Connection, statement: Insert, rows: Sequence[Values], /
    ) -> list[tuple[Any, ...] | None]:
        if not rows:
            return []
        if statement not in self._compiled:
            self._compiled[statement] = str(statement.compile(dialect=connection.dialect))
        with _driver(connection).cursor() as cursor:
            cursor.executemany(self._compiled[statement].encode(), rows, returning=True)
            returned = [cursor.fetchone()]
            while cursor.nextset():
                returned.append(cursor.fetchone())
        return returned

    def close(self) -> None:
        self._engine.dispose()

    def _migrate(self) -> None:
        def step(migration: Callable[[Connection], None]) -> postgresql.Migration:
            return lambda _driver_connection: migration(connection)

        with self._translated_errors(), self._engine.connect() as connection:
            steps = [step(migration) for migration in MIGRATIONS]
            postgresql.migrate(_driver(connection), self._url, "history", steps)

    def _repeated(self, begin: str, work: Callable[[Connection], T]) -> T:
        """The result of a transaction, which is run again while the database aborts it because of others."""
        deadline = time.monotonic() + _BUSY_SECONDS
        attempt = 0
        while True:
            attempt += 1
            try:
                with self._translated_errors():
                    return self._transact(begin, work)
            except Aborted as error:
                if time.monotonic() > deadline:
                    raise Busy(str(self._url), _BUSY_SECONDS) from error
            time.sleep(_BACKOFF.delay(attempt))

    def _transact(self, begin: str, work: Callable[[Connection], T]) -> T:
        with self._engine.connect() as connection, connection.begin() as transaction:
            connection.exec_driver_sql(begin)
            try:
                result = work(connection)
            except psycopg.Error:  # of `run_each`, which SQLAlchemy does not see
                if _driver(connection).closed:
                    connection.invalidate()
                raise
            try:
                transaction.commit()
            except DBAPIError as error:
                if error.connection_invalidated:
                    raise OutcomeUnknown(str(self._url), first_line(error.orig or error)) from error
                raise
            return result

    @contextmanager
    def _translated_errors(self) -> Iterator[None]:
        """Raise the database's errors as ours. Those that are the caller's stay as they are."""
        try:
            yield
        except (DBAPIError, psycopg.Error) as error:
            cause = error.orig if isinstance(error, DBAPIError) else error
            ours = translated(cause, self._url) if isinstance(cause, psycopg.Error) else None
            if ours is None:
                raise
            raise ours from error


def _driver(connection: Connection) -> postgresql.Connection:
    return cast(postgresql.Connection, connection.connection.driver_connection)
