"""What databases in SQLite share: their file, errors and schema versions."""

from shardyard.runtime.sqlite.file import SqliteFile, is_locked
from shardyard.runtime.sqlite.migrations import Migration, migrate

__all__ = ["Migration", "SqliteFile", "is_locked", "migrate"]
