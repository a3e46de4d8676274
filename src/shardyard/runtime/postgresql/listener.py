"""`Listener`: a thread that receives PostgreSQL's notifications."""

import logging
import select
import socket
import threading
from collections.abc import Callable, Mapping

import psycopg
from psycopg import sql

from shardyard.model import ShardyardError
from shardyard.model.url import EngineUrl
from shardyard.runtime.postgresql.connection import Connection, connect
from shardyard.runtime.postgresql.errors import translated
from shardyard.runtime.retry import Backoff

_BACKOFF = Backoff(first=0.05, longest=2.0)
"""Between two attempts to connect, in seconds."""
_CHECK_SECONDS = 10.0
"""How often an idle connection is checked: a server that was stopped, or is gone, sends no notifications."""
_JOIN_SECONDS = 1.0
"""How long `close` waits for a callback in progress."""

_log = logging.getLogger(__name__)


class Listener:
    """Listens to some channels on a connection of its own, from `start` until `close`.

    `on_notify` gets the payloads of a channel, several at once if they arrived together. `on_gap` is called after each
    connect, the first included: notifications may have been missed before it, so the caller looks at everything. Both
    are called from the listener's thread, and must return soon. A connection that is lost is replaced, and nothing is
    kept in memory meanwhile.
    """

    def __init__(
        self,
        url: EngineUrl,
        purpose: str,
        channels: Mapping[str, Callable[[list[str]], None]],
        on_gap: Callable[[], None],
    ) -> None:
        """`channels`: for each channel, the function that gets its payloads."""
        self._url = url
        self._purpose = purpose
        self._channels = dict(channels)
        self._on_gap = on_gap
        self._listening = threading.Event()
        self._closed = threading.Event()
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name=f"shardyard-{purpose}-listen", daemon=True)

    def start(self) -> None:
        """Start the thread. Calling it again does nothing."""
        if self._thread.ident is None:
            self._thread.start()

    def wait_until_listening(self, seconds: float) -> bool:
        """Wait until notifications are received, and `on_gap` was called. Returns whether they are."""
        return self._listening.wait(seconds)

    def close(self) -> None:
        """Stop the thread. Calling it twice is fine."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._wake.close()
        if self._thread.ident is None:
            self._woken.close()
        elif self._thread is not threading.current_thread():
            self._thread.join(_JOIN_SECONDS)

    def _run(self) -> None:
        attempt = 0
        while not self._closed.is_set():
            try:
                with connect(self._url, f"{self._purpose} watch") as connection:
                    self._listen(connection)
                    attempt = 0
                    self._receive(connection)
            except (ShardyardError, psycopg.Error) as error:
                self._listening.clear()
                attempt += 1
                if attempt == 1 and not self._closed.is_set():
                    ours = (isinstance(error, psycopg.Error) and translated(error, self._url)) or error
                    _log.warning("notifications are interrupted, will reconnect: %s", ours)
                self._closed.wait(_BACKOFF.delay(attempt))
        self._woken.close()

    def _listen(self, connection: Connection) -> None:
        listens = [sql.SQL("LISTEN {}").format(sql.Identifier(channel)) for channel in self._channels]
        connection.execute(sql.SQL("; ").join(listens))
        self._call(self._on_gap)
        self._listening.set()

    def _receive(self, connection: Connection) -> None:
        arrivals = select.poll()
        arrivals.register(connection.fileno(), select.POLLIN)
        arrivals.register(self._woken.fileno(), select.POLLIN)
        while not self._closed.is_set():
            if not arrivals.poll(_CHECK_SECONDS * 1000):
                connection.execute("")
            payloads: dict[str, list[str]] = {}
            for notification in connection.notifies(timeout=0):
                payloads.setdefault(notification.channel, []).append(notification.payload)
            for channel, those in payloads.items():
                self._call(lambda channel=channel, those=those: self._channels[channel](those))  # type: ignore[misc]

    def _call(self, callback: Callable[[], None]) -> None:
        try:
            callback()
        except Exception:  # noqa: BLE001 the thread must survive, whatever a callback does
            _log.warning("a callback for notifications of %s raised an exception", self._url, exc_info=True)
