"""Waking readers that wait for new records, as soon as they are committed, in this and in other processes, and as fast
when their partition is dropped or deleted."""

import asyncio
import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from shardyard.log.waiters import GONE, Waiters
from shardyard.runtime.process_signal import Listener, Sender

_log = logging.getLogger(__name__)

_RETRY_SECONDS = 0.005
"""Until the next attempt to look for new records, when one has failed."""
_ENDS = """
SELECT json_group_array(p.id), json_group_array(p."end")
FROM partitions p JOIN topics t ON t.name = p.topic AND p.number < t.partitions
WHERE p.id IN (SELECT value FROM json_each(?))
"""
"""Ids and ends, each as one value: Python takes longer for a row than SQLite."""
_json = msgspec.json.Encoder().encode
_numbers = msgspec.json.Decoder(list[int]).decode


class Tail:
    """Wakes readers when a partition grows. A thread, idle while no reader waits, is signalled by other processes."""

    def __init__(self, folder: Path, connect: Callable[[], sqlite3.Connection], on_change: Callable[[], None]) -> None:
        """`on_change` is called in the thread when another process may have changed the log, before readers wake."""
        self._folder = folder / "listeners"
        self._on_change = on_change
        self._connect = connect
        self._waiters = Waiters()
        self._sender = Sender(self._folder)
        self._listener: Listener | None = None
        self._lock = threading.Condition()
        self._unchecked = False
        """A reader started to wait whose record may be there already."""
        self._closing = False
        self._thread: threading.Thread | None = None

    @property
    def news(self) -> int:
        """What a reader notes before it reads, for `wait_for`."""
        return self._waiters.news

    def wait_for(self, places: Mapping[int, int], since: int) -> asyncio.Future[None]:
        """A future that is done when one of the partitions, given by id, has a record at its offset or is gone, and
        soon if that is so already. `since`: the `news` before the caller saw that there is no such record. The caller
        cancels the future when it no longer waits."""
        arrived = self._waiters.wait_for(places)
        with self._lock:
            if self._closing:  # since the caller read
                self._waiters.notify_all()
            elif self._thread is None:
                self._listener = Listener(self._folder)
                self._thread = threading.Thread(
                    target=self._watch, args=(self._listener,), name="shardyard-log-tail", daemon=True
                )
                self._thread.start()
            elif self.news != since:
                self._unchecked = True
                self._wake()
            self._lock.notify()
        return arrived

    def is_awaited(self, partition_id: int) -> bool:
        """Whether a reader of this process waits for the partition to grow."""
        return partition_id in self._waiters

    def committed(self, ends: dict[int, int], *, only_appends: bool) -> None:
        """Wake the readers that wait for offsets below these ends, by partition id, and those of other processes. Other
        changes than appends may have dropped partitions: then all are looked at. Callable from any thread."""
        self._waiters.notify(ends)
        if not only_appends:
            self._wake()
        self._sender.send(but=self._listener)

    def close(self) -> None:
        """Stop, and wake all waiting readers: they will find the log closed."""
        with self._lock:
            self._closing = True
            self._wake()
            self._lock.notify()
        self._waiters.notify_all()
        if self._thread is not None:
            self._thread.join()
        if self._listener is not None:
            self._listener.close()
        self._sender.close()

    def _wake(self) -> None:
        if self._listener is not None:
            self._listener.wake()

    def _watch(self, listener: Listener) -> None:
        db: sqlite3.Connection | None = None
        seen = None
        has_failed = False
        while self._readers_wait():
            with self._lock:
                if self._unchecked:
                    self._unchecked, seen = False, None
            try:
                db = db or self._connect()
                seen = self._check(db, seen)
            except sqlite3.Error as error:  # busy, or no space: the next check may succeed
                _log.debug("checking for new records failed: %s", error)
                time.sleep(_RETRY_SECONDS)
            except Exception as error:  # noqa: BLE001 without this thread readers might wait in vain
                if not has_failed:
                    _log.warning("checking for new records failed and will be retried", exc_info=error)
                has_failed = True
                time.sleep(_RETRY_SECONDS)
            else:
                has_failed = False
                listener.wait()
        if db is not None:
            db.close()

    def _readers_wait(self) -> bool:
        """True when there are readers that wait; False when the log is closed."""
        with self._lock:
            while not self._waiters and not self._closing:
                self._lock.wait()
            return not self._closing

    def _check(self, db: sqlite3.Connection, seen: Any) -> Any:
        """Wake readers if anything has changed since the version `seen`. Returns the version now."""
        version = db.execute("PRAGMA data_version").fetchone()
        if version != seen:
            self._on_change()  # first: who begins to wait after `awaited` must not rely on what was known before
            awaited = self._waiters.awaited()
            found = map(_numbers, db.execute(_ENDS, (_json(awaited).decode(),)).fetchone())
            ends = dict(zip(*found, strict=True))
            self._waiters.notify({partition_id: ends.get(partition_id, GONE) for partition_id in awaited})
        return version
