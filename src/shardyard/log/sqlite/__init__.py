"""The embedded log: Arrow batches in one SQLite file.

SQLite makes it safe: a transaction is there as a whole or not at all, whatever is killed when. Arrow makes it fast:
a batch is stored and read as it lies in memory. Each process has one thread that writes, for all its producers in one
commit (`writer`), a few that read, and one that looks for what other processes wrote (`tail`). Readers never block
writers, nor the other way round: that is SQLite's write-ahead log.
"""

from shardyard.log.sqlite.engine import SqliteLog
from shardyard.log.sqlite.files import Durability

__all__ = ["Durability", "SqliteLog"]
