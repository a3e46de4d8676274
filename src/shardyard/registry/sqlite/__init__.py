"""The embedded registry: one SQLite file, for any number of processes on one machine."""

from shardyard.registry.sqlite.store import SqliteStore

__all__ = ["SqliteStore"]
