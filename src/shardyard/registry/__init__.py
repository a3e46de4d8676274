"""The registry: groups, members, ownership, committed positions, settings, leases and the audit log.

Importing this package loads no engine: `open_registry` loads the one that the URL names.
"""

import re

from shardyard.model import InvalidValue
from shardyard.registry.batcher import TransactionBatcher
from shardyard.registry.change_signal import ChangeSignal
from shardyard.registry.port import (
    AuditRow,
    GroupRow,
    LeaseRow,
    MemberRow,
    OwnershipRow,
    Registry,
    SettingRow,
    Transaction,
)
from shardyard.runtime.clock import Clock, SystemClock

__all__ = [
    "AuditRow",
    "ChangeSignal",
    "GroupRow",
    "LeaseRow",
    "MemberRow",
    "OwnershipRow",
    "Registry",
    "SettingRow",
    "Transaction",
    "TransactionBatcher",
    "open_registry",
]

_SYSTEM_CLOCK = SystemClock()
_SQLITE = "sqlite:///"


def open_registry(url: str, *, clock: Clock = _SYSTEM_CLOCK) -> Registry:
    """Open the registry at `url`, and create it if it does not exist.

    `sqlite:///data/registry.db` is relative to the working directory, `sqlite:////data/registry.db` is absolute;
    `memory://` lasts as long as the object.
    """
    if not isinstance(url, str):
        raise InvalidValue("registry URL", url, "a string")
    if url == "memory://":
        from shardyard.registry.memory import MemoryRegistry  # noqa: PLC0415 only the engine that is used is loaded

        return MemoryRegistry(clock)
    path = url.removeprefix(_SQLITE)
    if path == url or path in {"", ":memory:"} or "\0" in path:
        shown = re.sub(r"//.*@", "//***@", url)  # a password is not for error messages
        raise InvalidValue("registry URL", shown, "sqlite:///a/file.db, sqlite:////an/absolute/file.db or memory://")
    from shardyard.registry.sql import SqlRegistry  # noqa: PLC0415 only the engine that is used is loaded
    from shardyard.registry.sqlite import SqliteStore  # noqa: PLC0415 likewise

    return SqlRegistry(SqliteStore(path), clock)
