"""Waking readers that wait for new records: at once for records of this process, within milliseconds for those of other
processes, and as fast when their partition is dropped or deleted."""

import asyncio
import json
import logging
import sqlite3
import threading
from collections.abc import Callable

from shardyard.log.waiters import GONE, Waiters

_log = logging.getLogger(__name__)

POLL_SECONDS = 0.002
"""How often to check whether another process has written. A check costs some 20 µs."""

_ENDS = """
SELECT p.id, p."end" FROM partitions p JOIN topics t ON t.name = p.topic AND p.number < t.partitions
WHERE p.id IN (SELECT value FROM json_each(?))
"""


class Tail:
    """Wakes readers when a partition grows. A thread, idle while no reader waits, watches for other processes."""

    def __init__(self, connect: Callable[[], sqlite3.Connection]) -> None:
        self._connect = connect
        self._waiters = Waiters()
        self._lock = threading.Condition()
        self._new = False
        """A reader started to wait since the thread last checked. Its record may be there already."""
        self._closing = False
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def wait_for(self, partition_id: int, offset: int) -> asyncio.Future[None]:
        """A future that is done when the partition has a record at `offset` or is gone, and soon if that is so already.
        The caller cancels it when it no longer waits."""
        arrived = self._waiters.wait_for(partition_id, offset)
        with self._lock:
            self._new = True
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="shardyard-log-tail", daemon=True)
                self._thread.start()
            self._lock.notify()
        return arrived

    def notify(self, ends: dict[int, int]) -> None:
        """Wake the readers that waited for offsets below these ends, by partition id. Callable from any thread."""
        self._waiters.notify(ends)

    def close(self) -> None:
        """Stop, and wake all waiting readers: they will find the log closed."""
        with self._lock:
            self._closing = True
            self._lock.notify()
        self._waiters.notify_all()
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        db = self._connect()
        seen = None
        while not self._closing:
            with self._lock:
                while not self._waiters and not self._closing:
                    self._lock.wait()
                if self._new:
                    self._new, seen = False, None
            try:
                version = db.execute("PRAGMA data_version").fetchone()
                if version != seen:
                    awaited = self._waiters.awaited()
                    ends = dict(db.execute(_ENDS, (json.dumps(awaited),)).fetchall())
                    self.notify({partition_id: ends.get(partition_id, GONE) for partition_id in awaited})
                    seen = version
            except sqlite3.Error as error:  # busy, or no space: the next check may succeed
                _log.debug("checking for new records failed: %s", error)
            self._stopped.wait(POLL_SECONDS)
        db.close()
