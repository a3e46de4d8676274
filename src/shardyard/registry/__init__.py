"""The registry: who is there, who owns what, how far they got."""

import re

from shardyard.model import Clock, InvalidValue, SystemClock
from shardyard.registry.memory import MemoryRegistry
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
from shardyard.registry.sql import SqlRegistry
from shardyard.registry.sqlite import SqliteStore

__all__ = [
    "AuditRow",
    "GroupRow",
    "LeaseRow",
    "MemberRow",
    "MemoryRegistry",
    "OwnershipRow",
    "Registry",
    "SettingRow",
    "SqlRegistry",
    "SqliteStore",
    "Transaction",
    "open_registry",
]

_SYSTEM_CLOCK = SystemClock()
_SQLITE = "sqlite:///"


def open_registry(url: str, *, clock: Clock = _SYSTEM_CLOCK) -> Registry:
    """Open the registry at `url`, and make it if it is not there.

    `sqlite:///data/registry.db` is relative to the working folder, `sqlite:////data/registry.db` is absolute;
    `memory://` lasts as long as the object.
    """
    if not isinstance(url, str):
        raise InvalidValue("registry URL", url, "a text")
    if url == "memory://":
        return MemoryRegistry(clock)
    path = url.removeprefix(_SQLITE)
    if path == url or path in {"", ":memory:"} or "\0" in path:
        shown = re.sub(r"//.*@", "//***@", url)  # a password is not for error messages
        raise InvalidValue("registry URL", shown, "sqlite:///a/file.db, sqlite:////an/absolute/file.db or memory://")
    return SqlRegistry(SqliteStore(path), clock)
