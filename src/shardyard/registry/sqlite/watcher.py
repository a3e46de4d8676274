"""Calls the watches of a registry in SQLite, which has no notifications: a thread polls."""

import logging
import sqlite3
import threading
from collections.abc import Callable

from shardyard.model import Closed
from shardyard.registry.sqlite.file import RegistryFile, is_locked
from shardyard.registry.watches import Watches, watched_by

_POLL_SECONDS = 0.005
"""Between two checks for commits of other processes. A commit of this process is noticed at once."""
_JOIN_SECONDS = 1.0
"""How long `close` waits for a callback in progress."""

_log = logging.getLogger(__name__)


class Watcher:
    """While there are watches, its thread polls for commits on a connection of its own. Touches are numbered, and
    `changes` has the last number of each name: a poll reads the names with a number above the last one that it saw."""

    def __init__(self, file: RegistryFile) -> None:
        self._file = file
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
        self._wake = threading.Event()

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
                self._thread = threading.Thread(target=self._run, name="shardyard-registry-watch", daemon=True)
                self._thread.start()

        def end() -> None:
            with self._lock:
                end_watch()
                if name not in self._watches:
                    self._since.pop(name, None)
            self._wake.set()

        return end

    def wake(self, touched: set[str]) -> None:
        """Poll at once if these names, which this process has just committed, are watched."""
        if any(watched in self._since for name in touched for watched in watched_by(name)):
            self._wake.set()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._watches.clear()
            self._since.clear()
            thread = self._thread
        self._wake.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join(_JOIN_SECONDS)

    def _run(self) -> None:
        polled_version, failing = None, False
        while True:
            self._wake.wait(_POLL_SECONDS)
            self._wake.clear()
            with self._lock:
                connection = self._connection
                if not self._watches or connection is None:
                    self._stop()
                    return
                try:
                    # SQLite's own number of the last commit of another connection: far cheaper to read than a table
                    (data_version,) = connection.execute("PRAGMA data_version").fetchone()
                    changed = set() if data_version == polled_version else self._changed(connection)
                    polled_version, failing = data_version, False
                except sqlite3.Error as error:
                    if not failing and not is_locked(error):
                        _log.warning("cannot read the changes in %s: %s; will be retried", self._file.path, error)
                        failing = True
                    continue
            self._watches.call(changed)

    def _changed(self, connection: sqlite3.Connection) -> set[str]:
        """The watched names that were touched since the last poll."""
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
        self._connection = self._thread = None


def _last_number(connection: sqlite3.Connection) -> int:
    return int(connection.execute("SELECT coalesce(max(version), 0) FROM changes").fetchone()[0])
