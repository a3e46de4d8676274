"""What everything on PostgreSQL shares: connections, errors, schema versions and notifications."""

from shardyard.runtime.postgresql.connection import RESPONSE_SECONDS, SCHEMA, Connection, connect
from shardyard.runtime.postgresql.errors import Aborted, first_line, translated, translated_errors
from shardyard.runtime.postgresql.listener import Listener
from shardyard.runtime.postgresql.migrations import Migration, migrate

__all__ = [
    "RESPONSE_SECONDS",
    "SCHEMA",
    "Aborted",
    "Connection",
    "Listener",
    "Migration",
    "connect",
    "first_line",
    "migrate",
    "translated",
    "translated_errors",
]
