"""The embedded log: Arrow batches in one SQLite file.

SQLite makes it safe: a transaction is stored as a whole or not at all, whatever is killed and when. Arrow makes it
fast: a batch is stored and read in the form it has in memory. Each process writes for all its producers in one
commit (`writer`), and has a few threads that read, and one that watches for records of other processes
(`tail`). Thanks to SQLite's write-ahead log, readers do not block writers, and writers do not block readers.
"""

from shardyard.log.sqlite.engine import SqliteLog
from shardyard.log.sqlite.files import Durability

__all__ = ["Durability", "SqliteLog"]
