"""What appends depend on, kept in memory as long as no other process has changed the log."""

import sqlite3
from typing import Any

from shardyard.log.appending import Changes, PartitionState
from shardyard.log.sqlite import store
from shardyard.model import Partition, Stamp

MOST = 50_000
"""Entries of each kind. One more, and all of that kind are looked up again."""


class LookupCache:
    """An `AppendLookup` for the one connection that writes. `begin` is called in each transaction before it is used,
    `stored` with what the transaction has stored, and `clear` if the transaction failed or changed anything else.

    Only a producer's last sequence is kept, not its stamps: what is appended has a higher one, unless it is a retry.
    """

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self._lookup = store.SqliteLookup(db)
        self._version: Any = None
        """SQLite's number of changes by other connections."""
        self._partitions: dict[Partition, PartitionState] = {}
        self._fences: dict[str, int | None] = {}
        self._last: dict[tuple[int, str], int | None] = {}

    def begin(self) -> bool:
        """Forget everything if another connection has changed the log since the last transaction. Returns whether it
        has."""
        version = self._db.execute("PRAGMA data_version").fetchone()
        if version == self._version:
            return False
        self.clear()
        self._version = version
        return True

    def clear(self) -> None:
        self._partitions.clear()
        self._fences.clear()
        self._last.clear()

    def stored(self, changes: Changes) -> None:
        """These changes are in the transaction. The states of partitions were changed by `Appending` itself."""
        self._fences.update(changes.fences)
        for stamp in changes.stamps:
            key = (stamp.partition_id, stamp.producer)
            last = self._last.get(key)
            self._last[key] = stamp.sequence if last is None else max(last, stamp.sequence)
        for kept in (self._partitions, self._fences, self._last):
            if len(kept) > MOST:
                kept.clear()

    def partition(self, partition: Partition) -> PartitionState:
        state = self._partitions.get(partition)
        if state is None:
            state = self._partitions[partition] = self._lookup.partition(partition)
        return state

    def fence(self, name: str) -> int | None:
        if name not in self._fences:
            self._fences[name] = self._lookup.fence(name)
        return self._fences[name]

    def stamp(self, partition_id: int, stamp: Stamp) -> tuple[int, int] | None:
        return self._lookup.stamp(partition_id, stamp)

    def last_sequence(self, partition_id: int, producer: str) -> int | None:
        key = (partition_id, producer)
        if key not in self._last:
            self._last[key] = self._lookup.last_sequence(partition_id, producer)
        return self._last[key]
