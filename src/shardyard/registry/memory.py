"""The registry in memory: the twin of the real ones, for tests and simulations. It is gone when it is closed."""

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from shardyard.model import Busy, Closed, Partition, whole_number
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
from shardyard.registry.schema import from_json, to_json
from shardyard.registry.watches import Watches
from shardyard.runtime.clock import Clock, SystemClock

_SYSTEM_CLOCK = SystemClock()
_log = logging.getLogger(__name__)

Key = TypeVar("Key", str, Partition)
Row = TypeVar("Row")


class _Table(Generic[Key, Row]):
    """Rows by their identity, which can be had in its order."""

    __slots__ = ("_ordered", "rows")

    def __init__(self) -> None:
        self.rows: dict[Key, Row] = {}
        self._ordered = True

    def put(self, key: Key, row: Row | None) -> Row | None:
        """Put a row in the place of the old one, which is returned; None for none."""
        old = self.rows.get(key)
        if row is None:
            self.rows.pop(key, None)
        else:
            self._ordered = self._ordered and old is not None
            self.rows[key] = row
        return old

    def in_order(self) -> list[Row]:
        if not self._ordered:  # only after an insertion, and those are rare beside the replacements
            self.rows = {key: self.rows[key] for key in sorted(self.rows)}
            self._ordered = True
        return list(self.rows.values())


@dataclass(frozen=True, slots=True)
class _Setting:
    """A setting as it is kept: a deleted one has no value, and still its version."""

    value: str | None
    version: int


class _Tables:
    """All rows; those that are asked for by group or scope lie together."""

    def __init__(self) -> None:
        self.groups = _Table[str, GroupRow]()
        self.members = defaultdict[str, _Table[str, MemberRow]](_Table[str, MemberRow])
        self.ownerships = defaultdict[str, _Table[Partition, OwnershipRow]](_Table[Partition, OwnershipRow])
        self.leases = _Table[str, LeaseRow]()
        self.settings = defaultdict[str, _Table[str, _Setting]](_Table[str, _Setting])
        self.audit: list[AuditRow] = []
        """`detail` as JSON."""


class MemoryTransaction:
    """A transaction that writes at once, and keeps what it replaced in case it has to be undone."""

    __slots__ = ("_audited", "_registry", "_tables", "_touched", "_undo", "now")

    def __init__(self, registry: "MemoryRegistry", tables: _Tables) -> None:
        self._registry = registry
        self._tables = tables
        self._undo: list[tuple[_Table[Any, Any], Any, Any]] = []
        self._audited = 0
        self._touched: set[str] = set()
        self.now = 0.0

    def __enter__(self) -> Self:
        self.now = self._registry.start()
        self._audited = len(self._tables.audit)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            for table, key, row in reversed(self._undo):
                table.put(key, row)
            del self._tables.audit[self._audited :]
            self._touched.clear()
        self._registry.end(self._touched)

    def _put(self, table: _Table[Key, Row], key: Key, row: Row | None) -> None:
        self._undo.append((table, key, table.put(key, row)))

    def group(self, name: str) -> GroupRow | None:
        return self._tables.groups.rows.get(name)

    def groups(self) -> list[GroupRow]:
        return self._tables.groups.in_order()

    def put_group(self, row: GroupRow) -> None:
        self._put(self._tables.groups, row.name, row)

    def delete_group(self, name: str) -> None:
        self._put(self._tables.groups, name, None)
        for member in list(self._tables.members[name].rows):
            self.delete_member(name, member)
        self.delete_ownerships(name, list(self._tables.ownerships[name].rows))

    def member(self, group: str, name: str) -> MemberRow | None:
        return self._tables.members[group].rows.get(name)

    def members(self, group: str) -> list[MemberRow]:
        return self._tables.members[group].in_order()

    def put_member(self, row: MemberRow) -> None:
        self._put(self._tables.members[row.group], row.name, row)

    def delete_member(self, group: str, name: str) -> None:
        self._put(self._tables.members[group], name, None)

    def ownership(self, group: str, partition: Partition) -> OwnershipRow | None:
        return self._tables.ownerships[group].rows.get(partition)

    def ownerships(self, group: str) -> list[OwnershipRow]:
        return self._tables.ownerships[group].in_order()

    def ownerships_of(self, group: str, member: str) -> list[OwnershipRow]:
        return [row for row in self.ownerships(group) if row.owner == member or row.target == member]  # noqa: PLR1714 - a set per row is slower

    def put_ownerships(self, rows: Iterable[OwnershipRow]) -> None:
        for row in rows:
            self._put(self._tables.ownerships[row.group], row.partition, row)

    def delete_ownerships(self, group: str, partitions: Iterable[Partition]) -> None:
        for partition in partitions:
            self._put(self._tables.ownerships[group], partition, None)

    def lease(self, name: str) -> LeaseRow | None:
        return self._tables.leases.rows.get(name)

    def put_lease(self, row: LeaseRow) -> None:
        self._put(self._tables.leases, row.name, row)

    def setting(self, scope: str, name: str) -> SettingRow | None:
        kept = self._tables.settings[scope].rows.get(name)
        if kept is None or kept.value is None:
            return None
        return SettingRow(scope, name, from_json(kept.value), kept.version)

    def settings(self, scope: str) -> list[SettingRow]:
        rows = (self.setting(scope, name) for name in sorted(self._tables.settings[scope].rows))
        return [row for row in rows if row is not None]

    def put_setting(self, scope: str, name: str, value: object) -> SettingRow:
        text = to_json("value", value)
        kept = self._tables.settings[scope].rows.get(name)
        version = 1 if kept is None else kept.version + 1
        self._put(self._tables.settings[scope], name, _Setting(text, version))
        self.touch(f"setting/{scope}")
        return SettingRow(scope, name, from_json(text), version)

    def delete_setting(self, scope: str, name: str) -> None:
        kept = self._tables.settings[scope].rows.get(name)
        if kept is not None:
            self._put(self._tables.settings[scope], name, replace(kept, value=None))
        self.touch(f"setting/{scope}")

    def audit(self, who: str, action: str, subject: str, detail: object = None) -> None:
        log = self._tables.audit
        log.append(AuditRow(len(log) + 1, self.now, who, action, subject, to_json("detail", detail)))

    def audit_log(self, limit: int = 100, before: int | None = None) -> list[AuditRow]:
        log = self._tables.audit
        end = len(log) if before is None else max(min(before - 1, len(log)), 0)
        rows = log[max(end - whole_number("limit", limit, at_least=0), 0) : end]
        return [replace(row, detail=from_json(str(row.detail))) for row in reversed(rows)]

    def touch(self, name: str) -> None:
        self._touched.add(name)


class MemoryRegistry(Registry):
    """A registry within one process. Watches are called by the thread that committed, before its block returns."""

    def __init__(self, clock: Clock = _SYSTEM_CLOCK, *, busy_wait: float = 10.0) -> None:
        """`busy_wait`: seconds to wait for a transaction of another thread before `Busy`."""
        self._clock = clock
        self._busy_wait = busy_wait
        self._tables = _Tables()
        self._watches = Watches()
        self._lock = threading.Lock()
        self._closed = False

    def transaction(self) -> AbstractContextManager[Transaction]:
        return MemoryTransaction(self, self._tables)

    def snapshot(self) -> AbstractContextManager[Transaction]:
        return MemoryTransaction(self, self._tables)

    def start(self) -> float:
        """Let a transaction in, alone. Returns its time."""
        if not self._lock.acquire(timeout=self._busy_wait):
            raise Busy("registry in memory", self._busy_wait)
        if self._closed:
            self._lock.release()
            raise Closed("registry")
        return self._clock.now()

    def end(self, touched: set[str]) -> None:
        """Let the next one in, and tell those who watch."""
        self._lock.release()
        if touched and self._watches:
            self._watches.call(touched)

    def watch(self, name: str, callback: Callable[[], None]) -> Callable[[], None]:
        if self._closed:
            raise Closed("registry")
        return self._watches.add(name, callback)

    def close(self) -> None:
        self._closed = True
        self._watches.clear()
