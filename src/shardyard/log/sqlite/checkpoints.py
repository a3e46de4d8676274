"""Checkpoints: copying pages from the write-ahead log into the database file without delaying appends.

A separate thread copies most of them while the writer goes on. Once the write-ahead log is large, the writer copies the
rest between two commits, when this process adds no page, so that the write-ahead log can be restarted. If other
processes write too, it may never be empty by itself: beyond a limit, all writers wait for a moment.
"""

import logging
import sqlite3
import threading
import time
from pathlib import Path

from shardyard.log.sqlite import files
from shardyard.log.sqlite.files import connect

_log = logging.getLogger(__name__)

CHECKPOINT_BYTES = 1024 * 1024
"""How far the write-ahead log grows before a checkpoint, by what `grew` was told, which is about half of it. The larger
it is, the longer do commits wait for the disk meanwhile."""
BUSY_CHECKPOINT_BYTES = 16 * 1024 * 1024
"""The same while the writer is busy for most of the time: fewer checkpoints take less of it."""
FINISH_BYTES = 48 * 1024 * 1024
"""How large the write-ahead log is when the writer completes a checkpoint, for which appends wait."""
LIMIT_BYTES = 128 * 1024 * 1024
"""Beyond this size other writers wait until the write-ahead log was restarted."""
LIMIT_WAIT_MS = 300


class Checkpoints:
    """The checkpoints of one process. The writer calls `grew` and `finish`."""

    def __init__(self, path: Path) -> None:
        self._wal = path.with_name(path.name + "-wal")
        self._db = connect(path, "power")
        self.page_bytes: int = self._db.execute("PRAGMA page_size").fetchone()[0]
        self._bytes = 0
        self._busy_seconds = 0.0
        self._since = time.monotonic()
        """When the last checkpoint was asked for."""
        self._size = self.wal_bytes()
        """Of the file, when it was last looked at."""
        self._wanted = threading.Event()
        self.unfinished = False
        """`finish` has something to do, which may take a while."""
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="shardyard-log-checkpoint", daemon=True)
        self._thread.start()

    def grew(self, size: int, seconds: float) -> None:
        """Count what was written to the write-ahead log, and how long that took. Asking for its size would cost more
        than this."""
        self._bytes += size
        self._busy_seconds += seconds
        if self._bytes > CHECKPOINT_BYTES and (self._bytes > BUSY_CHECKPOINT_BYTES or not self._is_busy()):
            self._bytes, self._busy_seconds, self._since = 0, 0.0, time.monotonic()
            self._wanted.set()

    def _is_busy(self) -> bool:
        """Whether the writer has spent most of the time since the last checkpoint with writing."""
        return self._busy_seconds > (time.monotonic() - self._since) / 2

    def finish(self, db: sqlite3.Connection) -> None:
        """Complete the thread's checkpoint on the writer's connection."""
        if self.unfinished:
            self.unfinished = False
            self._checkpoint(db, "PASSIVE")
            if self.wal_bytes() > LIMIT_BYTES:
                db.execute(f"PRAGMA busy_timeout = {LIMIT_WAIT_MS}")
                self._checkpoint(db, "RESTART")
                db.execute("PRAGMA busy_timeout = 0")

    def wal_bytes(self) -> int:
        try:
            return self._wal.stat().st_size
        except OSError:  # it does not exist yet, or no longer
            return 0

    def grown(self) -> int:
        """At least how many bytes were written to the write-ahead log since the last call, by the size of its file; all
        of it, if it is larger than a restart leaves it. A smaller file keeps its size when the log is restarted, so its
        size says nothing of how much is in it."""
        before, self._size = self._size, self.wal_bytes()
        return self._size if self._size > files.WAL_KEEP_BYTES else max(0, self._size - before)

    def close(self) -> None:
        self._closing = True
        self._wanted.set()
        self._thread.join()
        self._db.close()

    def _run(self) -> None:
        while True:
            self._wanted.wait()
            self._wanted.clear()
            if self._closing:
                break
            if self._checkpoint(self._db, "PASSIVE") * self.page_bytes > FINISH_BYTES:
                self.unfinished = True

    def _checkpoint(self, db: sqlite3.Connection, kind: str) -> int:
        """Returns how many pages the write-ahead log holds, also those that were copied before; none, or -1, if it
        failed or another process makes a checkpoint."""
        try:
            _, pages, _ = db.execute(f"PRAGMA wal_checkpoint({kind})").fetchone()
        except sqlite3.Error as error:  # the pages are as safe in the write-ahead log
            _log.warning("checkpoint of %s will be retried: %s", self._wal, error)
            return 0
        return int(pages)
