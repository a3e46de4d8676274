"""`PostgresqlStore`: transactions in a registry's PostgreSQL database."""

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager

from sqlalchemy import Connection, Update, text

from shardyard.model import Closed
from shardyard.model.url import EngineUrl
from shardyard.registry import migrations
from shardyard.registry.postgresql.shared_connection import NOW, SharedConnection, driver_connection
from shardyard.registry.sql_transaction import Values
from shardyard.registry.watches import Watches, watched_by
from shardyard.runtime.clock import Clock
from shardyard.runtime.postgresql import Listener

_CHANNEL = "shardyard_registry"
_MAX_PAYLOAD = 7_000
"""Bytes of a notification: PostgreSQL takes up to 7999."""
_EVERYTHING = "*"
"""The payload of a touch of a name that is too long for one."""

_NOTIFY = text("SELECT pg_notify(:channel, payload) FROM unnest(CAST(:payloads AS text[])) AS payload")


class PostgresqlStore:
    """A registry in a PostgreSQL database, in the schema `shardyard`, which is created if it does not exist.

    The transactions of one process take turns on one connection, its snapshots on another, and a third one, while there
    are watches, receives notifications. A connection that is lost is replaced. Time is the database's, unless there is
    a clock.
    """

    is_embedded = False

    def __init__(self, url: EngineUrl, clock: Clock | None = None, *, busy_wait: float = 10.0) -> None:
        """`busy_wait`: see `Registry.busy_wait`. `clock` is for tests."""
        self.busy_wait = busy_wait
        self._clock = clock
        self._compiled: dict[Update, bytes] = {}
        """The SQL of the statements of `update_each`."""
        self._watches = Watches()
        self._listener = Listener(url, "registry", {_CHANNEL: self._notified}, self._call_all)
        self._starting = threading.Lock()
        self._closed = False
        self._writing = SharedConnection(url, "registry", busy_wait)
        self._reading = SharedConnection(url, "registry read", busy_wait)
        try:
            self._writing.migrate(migrations.MIGRATIONS, time.time() if clock is None else clock.now())
        except BaseException:
            self.close()
            raise

    def begin(self, wait: float, *, guarded: bool = False) -> AbstractContextManager[Connection]:
        """A serializable transaction conflicts with others that write to the same pages, and members commit all the
        time. A guarded one locks the rows that it changes, and checks them as they are then."""
        return self._writing.transaction("READ COMMITTED" if guarded else "SERIALIZABLE", wait)

    def begin_reading(self) -> AbstractContextManager[Connection]:
        return self._reading.transaction("REPEATABLE READ READ ONLY", self.busy_wait)

    def now(self, connection: Connection) -> float:
        if self._clock is not None:
            return self._clock.now()
        now: float = connection.info[NOW]
        return now

    def update_each(self, connection: Connection, statement: Update, rows: Sequence[Values]) -> list[bool]:
        """All rows go to PostgreSQL in one round trip, and directly: SQLAlchemy takes longer to pass a row on than
        PostgreSQL to store it, and does not say which rows matched."""
        if not rows:
            return []
        with driver_connection(connection).cursor() as cursor:
            cursor.executemany(self._compile(connection, statement), rows, returning=True)
            matched = [cursor.rowcount > 0]
            while cursor.nextset():
                matched.append(cursor.rowcount > 0)
        return matched

    def update_all(self, connection: Connection, statement: Update, rows: Sequence[Values]) -> int:
        if not rows:
            return 0
        with driver_connection(connection).cursor() as cursor:
            cursor.executemany(self._compile(connection, statement), rows)
            return cursor.rowcount

    def _compile(self, connection: Connection, statement: Update) -> bytes:
        if statement not in self._compiled:
            self._compiled[statement] = str(statement.compile(dialect=connection.dialect)).encode()
        return self._compiled[statement]

    def record_touched(self, connection: Connection, names: set[str]) -> None:
        connection.execute(_NOTIFY, {"channel": _CHANNEL, "payloads": list(_payloads(names))})

    def committed(self, names: set[str]) -> None:
        """The watches of this process are called by the notification, like those of any other."""

    def watch(self, name: str, callback: Callable[[], None]) -> Callable[[], None]:
        with self._starting:
            if self._closed:
                raise Closed("registry")
            end = self._watches.add(name, callback)
            self._listener.start()  # it calls all watches when it is connected, which nobody waits for
        return end

    def close(self) -> None:
        with self._starting:
            self._closed = True
        self._watches.clear()
        self._listener.close()
        self._writing.close()
        self._reading.close()

    def _notified(self, payloads: list[str]) -> None:
        if _EVERYTHING in payloads:
            self._call_all()
            return
        for payload in payloads:
            self._watches.call({watched for name in json.loads(payload) for watched in watched_by(name)})

    def _call_all(self) -> None:
        self._watches.call(self._watches.names())


def _payloads(names: Iterable[str]) -> Iterator[str]:
    """The names as JSON lists, in as few payloads as they fit into."""
    payload: list[str] = []
    size = 0
    for name in names:
        bytes_ = len(json.dumps(name)) + 2
        if bytes_ > _MAX_PAYLOAD:
            yield _EVERYTHING
            continue
        if size + bytes_ > _MAX_PAYLOAD:
            yield json.dumps(payload)
            payload, size = [], 0
        payload.append(name)
        size += bytes_
    if payload:
        yield json.dumps(payload)
