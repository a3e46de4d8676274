"""Calls the watches of a registry in SQLite: a thread looks for changes when a process signals that it committed."""

import logging
import sqlite3
import threading
import time
from collections.abc import Callable

from shardyard.model import Closed
from shardyard.registry.sqlite.file import RegistryFile
from shardyard.registry.watches import Watches, watched_by
from shardyard.runtime.process_signal import Listener, Sender
from shardyard.runtime.sqlite import is_locked

_RETRY_SECONDS = 0.005
"""Until the next attempt to read the changes, when one has failed."""
_JOIN_SECONDS = 1.0
"""How long `close` waits for a callback in progress."""

_log = logging.getLogger(__name__)


class Watcher:
    """While there are watches, its thread looks for commits on a connection of its own. Touches are numbered, and
    `changes` has the last number of each name: the thread reads the names with a number above the last one that it saw.
    """

    def __init__(self, file: RegistryFile) -> None:
        self._file = file
        self._listeners = file.path.with_name(file.path.name + "-listeners")
        self._sender = Sender(self._listeners)
        self._listener: Listener | None = None
        self._watches = Watches()
        self._since: dict[str, int] = {}
        """For each watched name, the number of the last touch before the watch began."""
        self._seen = 0
        """The number up to which the thread has read `changes`."""
        self._connection: sqlite3.Connection | None = None
        self._thread: threading.Thread | None = None
        self._closed = False
        self._lock = threading.Lock()
        """Guards all of the above. Not held while callbacks run."""

    def watch(self, name: str, callback: Callable[[], None]) -> Callable[[], None]:
        with self._lock, self._file.translated_errors():
            if self._closed:
                raise Closed("registry")
            connection = self._connection = self._connection or self._file.open()
            if name not in self._since:
                self._since[name] = self._file.retry_while_locked(lambda: _last_number(connection))
            end_watch = self._watches.add(name, callback)
            if self._thread is None:
                self._seen = self._since[name]
                self._listener = Listener(self._listeners)
                self._thread = threading.Thread(
                    target=self._run, args=(self._listener,), name="shardyard-registry-watch", daemon=True
                )
                self._thread.start()

        def end() -> None:
            with self._lock:
                end_watch()
                if name not in self._watches:
                    self._since.pop(name, None)
                self._wake()

        return end

    def committed(self, touched: set[str]) -> None:
        """Let the watchers of all processes look for changes, because this one has just committed touches of these
        names. It looks itself only if it watches one of them."""
        listener = self._listener
        if listener is not None and any(watched in self._since for name in touched for watched in watched_by(name)):
            listener.wake()
        self._sender.send(but=listener)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._watches.clear()
            self._since.clear()
            thread = self._thread
            self._wake()
        self._sender.close()
        if thread is not None and thread is not threading.current_thread():
            thread.join(_JOIN_SECONDS)

    def _wake(self) -> None:
        if self._listener is not None:
            self._listener.wake()

    def _run(self, listener: Listener) -> None:
        looked_version, failing = None, False
        while True:
            with self._lock:
                connection = self._connection
                if not self._watches or connection is None:
                    self._stop()
                    return
                changed: set[str] | None
                try:
                    # SQLite's own number of the last commit of another connection: far cheaper to read than a table
                    (data_version,) = connection.execute("PRAGMA data_version").fetchone()
                    changed = set() if data_version == looked_version else self._changed(connection)
                    looked_version, failing = data_version, False
                except sqlite3.Error as error:
                    if not failing and not is_locked(error):
                        _log.warning("cannot read the changes in %s: %s; will be retried", self._file.path, error)
                        failing = True
                    changed = None
            if changed is None:
                time.sleep(_RETRY_SECONDS)
            else:
                self._watches.call(changed)
                listener.wait()

    def _changed(self, connection: sqlite3.Connection) -> set[str]:
        """The watched names that were touched since the last look."""
        rows = connection.execute("SELECT name, version FROM changes WHERE version > ?", (self._seen,)).fetchall()
        self._seen = max((number for _, number in rows), default=self._seen)
        return {
            watched
            for name, number in rows
            for watched in watched_by(name)
            if watched in self._since and number > self._since[watched]
        }

    def _stop(self) -> None:
        if self._connection is not None:
            self._connection.close()
        if self._listener is not None:
            self._listener.close()
        self._connection = self._thread = self._listener = None


def _last_number(connection: sqlite3.Connection) -> int:
    return int(connection.execute("SELECT coalesce(max(version), 0) FROM changes").fetchone()[0])
