"""Waking readers that wait for new records: at once for records of this process, within milliseconds for those of other
processes, and as fast when their partition is dropped or deleted."""

import asyncio
import json
import logging
import sqlite3
import threading
from collections import defaultdict
from collections.abc import Callable

_log = logging.getLogger(__name__)

POLL_SECONDS = 0.002
"""How often to check whether another process has written. A check costs some 20 µs."""

_ENDS = """
SELECT p.id, p."end" FROM partitions p JOIN topics t ON t.name = p.topic AND p.number < t.partitions
WHERE p.id IN (SELECT value FROM json_each(?))
"""
_GONE = 2**63
"""An end beyond every offset: readers that wait for a partition that is gone are woken, and find that out."""


class Tail:
    """Wakes readers when a partition grows. A thread, idle while no reader waits, watches for other processes."""

    def __init__(self, connect: Callable[[], sqlite3.Connection]) -> None:
        self._connect = connect
        self._waiters: defaultdict[int, set[tuple[int, asyncio.Future[None]]]] = defaultdict(set)
        self._lock = threading.Condition()
        self._new = False
        """A reader started to wait since the thread last checked. Its record may be there already."""
        self._closing = False
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def wait_for(self, partition_id: int, offset: int) -> "asyncio.Future[None]":
        """A future that is done when the partition has a record at `offset` or is gone, and soon if that is so already.
        The caller cancels it when it no longer waits."""
        arrived: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiter = (offset, arrived)
        arrived.add_done_callback(lambda _: self._forget(partition_id, waiter))
        with self._lock:
            self._waiters[partition_id].add(waiter)
            self._new = True
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="shardyard-log-tail", daemon=True)
                self._thread.start()
            self._lock.notify()
        return arrived

    def notify(self, ends: dict[int, int]) -> None:
        """Wake the readers that waited for offsets below these ends, by partition id. Callable from any thread."""
        with self._lock:
            arrived = [
                future
                for partition_id, end in ends.items()
                for offset, future in self._waiters.get(partition_id, ())
                if offset < end
            ]
        _wake(arrived)

    def close(self) -> None:
        """Stop, and wake all waiting readers: they will find the log closed."""
        with self._lock:
            self._closing = True
            self._lock.notify()
            waiting = [future for waiters in self._waiters.values() for _, future in waiters]
        _wake(waiting)
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    def _forget(self, partition_id: int, waiter: tuple[int, "asyncio.Future[None]"]) -> None:
        with self._lock:
            self._waiters[partition_id].discard(waiter)
            if not self._waiters[partition_id]:
                del self._waiters[partition_id]

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
                    awaited = list(self._waiters)
                    ends = dict(db.execute(_ENDS, (json.dumps(awaited),)).fetchall())
                    self.notify({partition_id: ends.get(partition_id, _GONE) for partition_id in awaited})
                    seen = version
            except sqlite3.Error as error:  # busy, or no space: the next check may succeed
                _log.debug("checking for new records failed: %s", error)
            self._stopped.wait(POLL_SECONDS)
        db.close()


def _wake(futures: "list[asyncio.Future[None]]") -> None:
    for future in futures:
        loop = future.get_loop()
        if not loop.is_closed():
            loop.call_soon_threadsafe(_settle, future)


def _settle(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)
