"""The registry in PostgreSQL: for any number of processes on any number of machines."""

from shardyard.registry.postgresql.store import PostgresqlStore

__all__ = ["PostgresqlStore"]
