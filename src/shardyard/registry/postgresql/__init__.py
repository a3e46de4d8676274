"""The registry in PostgreSQL: for any number of processes on any number of machines."""

import shardyard.runtime.postgresql  # noqa: F401 first of all: it says what to install if the driver is missing
from shardyard.registry.postgresql.store import PostgresqlStore

__all__ = ["PostgresqlStore"]
