"""Reading the log's file: each thread that reads has a connection of its own."""

import asyncio
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from shardyard.log.sqlite.files import connect, translated
from shardyard.model import Busy

T = TypeVar("T")

READERS = 3
"""Threads."""


class Snapshots:
    """Runs functions of a connection that only read, each on one state of the log."""

    def __init__(self, path: Path, check_open: Callable[[], None]) -> None:
        """`check_open` raises `Closed` once the log is closed."""
        self._path = path
        self._check_open = check_open
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="shardyard-log-reader")
        self._local = threading.local()
        self._connections: list[sqlite3.Connection] = []

    async def look(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """The result of `work`, which runs in a thread."""
        self._check_open()
        return await asyncio.get_running_loop().run_in_executor(self._readers, self.run, work)

    async def look_inline(self, work: Callable[[sqlite3.Connection], T], *, in_transaction: bool = True) -> T:
        """The same in this thread. For what is in memory, because it was just written or is in the cache, going to
        another thread and back would take ten times as long as reading it. A single statement needs no transaction."""
        self._check_open()
        try:
            return self.run(work, wait=False, in_transaction=in_transaction)
        except Busy:
            return await self.look(work)

    def run(self, work: Callable[[sqlite3.Connection], T], *, wait: bool = True, in_transaction: bool = True) -> T:
        """The result of `work`, with this thread's own connection. `wait`: while the file is busy."""
        with translated(self._path):
            db: sqlite3.Connection | None = getattr(self._local, "db", None)
            if db is None:
                db = self._local.db = connect(self._path, "process")
                if not wait:
                    db.execute("PRAGMA busy_timeout = 0")
                self._connections.append(db)
            if not in_transaction:
                return work(db)
            db.execute("BEGIN")
            try:
                return work(db)
            finally:
                if db.in_transaction:  # SQLite ends it by itself after some errors
                    db.execute("COMMIT")

    def close(self) -> None:
        """Finish what is in progress, and close the connections."""
        self._readers.shutdown()
        for connection in self._connections:
            connection.close()
