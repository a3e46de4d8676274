"""Moving pages from the write-ahead log to their places in the file, out of the way of those who append.

A thread of its own does most of it beside the writer; the writer then does the rest between two commits, when no page
is added by this process, so that the write-ahead log can begin anew. Where other processes write too that may never
happen by itself: beyond a limit, everyone is kept waiting for a moment.
"""

import logging
import sqlite3
import threading
from pathlib import Path

from shardyard.log.sqlite.files import connect

_log = logging.getLogger(__name__)

CHECKPOINT_BYTES = 16 * 1024 * 1024
"""How far the write-ahead log grows before its pages go to their places."""
LIMIT_BYTES = 128 * 1024 * 1024
"""Beyond this the others are made to wait until it begins anew."""
LIMIT_WAIT_MS = 300


class Checkpoints:
    """The checkpoints of one process. `grew` and `finish` are the writer's to call."""

    def __init__(self, path: Path) -> None:
        self._wal = path.with_name(path.name + "-wal")
        self._db = connect(path, "power")
        self._bytes = 0
        self._wanted = threading.Event()
        self._unfinished = False
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="shardyard-log-checkpoint", daemon=True)
        self._thread.start()

    def grew(self, size: int) -> None:
        """Count what went into the write-ahead log; asking for its size would cost more than the guess is worth."""
        self._bytes += size
        if self._bytes > CHECKPOINT_BYTES:
            self._bytes = 0
            self._wanted.set()

    def finish(self, db: sqlite3.Connection) -> None:
        """Do the rest of what the thread did, on the writer's connection."""
        if self._unfinished:
            self._unfinished = False
            self._checkpoint(db, "PASSIVE")
            if self.wal_bytes() > LIMIT_BYTES:
                db.execute(f"PRAGMA busy_timeout = {LIMIT_WAIT_MS}")
                self._checkpoint(db, "RESTART")
                db.execute("PRAGMA busy_timeout = 0")

    def wal_bytes(self) -> int:
        try:
            return self._wal.stat().st_size
        except OSError:  # not there yet, or not any more
            return 0

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
            self._checkpoint(self._db, "PASSIVE")
            self._unfinished = True

    def _checkpoint(self, db: sqlite3.Connection, kind: str) -> None:
        try:
            db.execute(f"PRAGMA wal_checkpoint({kind})").fetchall()
        except sqlite3.Error as error:  # the pages stay in the write-ahead log, where they are as safe
            _log.warning("checkpoint of %s put off: %s", self._wal, error)
