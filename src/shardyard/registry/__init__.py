"""The registry: groups, members, ownership, committed positions, settings, leases and the audit log.

Importing this package loads no engine: `open_registry` loads the one that the URL names.
"""

from pathlib import Path

from shardyard.model.extras import require
from shardyard.model.url import parse_url
from shardyard.registry.batcher import TransactionBatcher
from shardyard.registry.change_signal import ChangeSignal
from shardyard.registry.port import (
    AuditRow,
    GroupRow,
    GroupTimes,
    Heartbeat,
    LeaseRow,
    MemberRow,
    OwnershipRow,
    PositionCommit,
    Registry,
    SettingRow,
    Snapshot,
    Transaction,
)
from shardyard.runtime.clock import Clock, SystemClock

__all__ = [
    "AuditRow",
    "ChangeSignal",
    "GroupRow",
    "GroupTimes",
    "Heartbeat",
    "LeaseRow",
    "MemberRow",
    "OwnershipRow",
    "PositionCommit",
    "Registry",
    "SettingRow",
    "Snapshot",
    "Transaction",
    "TransactionBatcher",
    "open_registry",
    "registry_exists",
]

_SYSTEM_CLOCK = SystemClock()


def registry_exists(url: str) -> bool:
    """Whether there may be a registry that opening this URL would open. False: it would create one. A database on a
    server is not asked."""
    parsed = parse_url("registry", url)
    if parsed.engine == "sqlite":
        return Path(parsed.path).is_file()
    return parsed.engine == "postgresql"


def open_registry(url: str, *, clock: Clock = _SYSTEM_CLOCK) -> Registry:
    """Open the registry at `url`, and create it if it does not exist.

    `sqlite:///data/registry.db` is relative to the working directory, `sqlite:////data/registry.db` is absolute;
    `postgresql://user:password@host/database` is for several machines; `memory://` lasts as long as the object. `clock`
    is for engines whose time is the machine's, and replaces PostgreSQL's own if it is not the system's.
    """
    parsed = parse_url("registry", url)
    require("server", "open_registry", "sqlalchemy")
    if parsed.engine == "postgresql":
        require("postgresql", "a registry at postgresql://")
    if parsed.engine == "memory":
        from shardyard.registry.memory import MemoryRegistry  # noqa: PLC0415 only the engine that is used is loaded

        return MemoryRegistry(clock)
    from shardyard.registry.sql import SqlRegistry  # noqa: PLC0415 only the engine that is used is loaded

    if parsed.engine == "postgresql":
        from shardyard.registry.postgresql import PostgresqlStore  # noqa: PLC0415 likewise

        return SqlRegistry(PostgresqlStore(parsed, None if isinstance(clock, SystemClock) else clock))
    from shardyard.registry.sqlite import SqliteStore  # noqa: PLC0415 likewise

    return SqlRegistry(SqliteStore(parsed.path, clock))
