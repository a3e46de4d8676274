"""The registry in memory: the twin of the real engines, for tests and simulations. Its rows are lost when the process
ends."""

import itertools
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Generic, NoReturn, Self, TypeVar, cast

from shardyard.model import Busy, Closed, Partition, whole_number
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
from shardyard.registry.schema import from_json, to_json
from shardyard.registry.watches import Watches, watched_by
from shardyard.runtime.clock import Clock, SystemClock

_SYSTEM_CLOCK = SystemClock()

Key = TypeVar("Key", str, Partition)
Row = TypeVar("Row")


class _Table(Generic[Key, Row]):
    """Rows by their identity. Only the transaction that created the table changes it; after the commit nobody does."""

    __slots__ = ("_is_ordered", "rows", "writer")

    def __init__(self, rows: dict[Key, Row], writer: object, *, is_ordered: bool = True) -> None:
        self.rows: dict[Key, Row] = rows
        self.writer = writer
        self._is_ordered = is_ordered

    def writable(self, writer: object) -> "_Table[Key, Row]":
        """The table itself if it is the writer's own, or else a copy that is."""
        if self.writer is writer:
            return self
        is_ordered = self._is_ordered  # before the rows, as a snapshot may be ordering them
        return _Table(self.rows.copy(), writer, is_ordered=is_ordered)

    def put(self, key: Key, row: Row) -> None:
        if self._is_ordered and key not in self.rows:
            self._is_ordered = False
        self.rows[key] = row

    def in_order(self) -> list[Row]:
        if not self._is_ordered:  # only after an insertion, which is rare compared to a replacement
            self.rows = {key: self.rows[key] for key in sorted(self.rows)}
            self._is_ordered = True
        return list(self.rows.values())


_NO_MEMBERS = _Table[str, MemberRow]({}, None)
_NO_OWNERSHIPS = _Table[Partition, OwnershipRow]({}, None)


@dataclass(frozen=True, slots=True)
class _Setting:
    """A setting as it is stored: JSON, or None for a deleted setting, whose version is kept."""

    value: str | None
    version: int


_NO_SETTINGS = _Table[str, _Setting]({}, None)


class _State:
    """All rows at one time. Rows that are read by group or scope have a table for each of them."""

    __slots__ = ("audit", "audit_length", "groups", "leases", "members", "ownerships", "settings")

    groups: _Table[str, GroupRow]
    members: _Table[str, _Table[str, MemberRow]]
    """`metadata` as JSON, unless it is None."""
    ownerships: _Table[str, _Table[Partition, OwnershipRow]]
    leases: _Table[str, LeaseRow]
    settings: _Table[str, _Table[str, _Setting]]
    audit: list[AuditRow]
    """`detail` as JSON. All states share one list that is only appended to; this state has the first
    `audit_length` entries."""
    audit_length: int

    @classmethod
    def empty(cls) -> Self:
        state = cls()
        state.groups = _Table({}, None)
        state.members = _Table({}, None)
        state.ownerships = _Table({}, None)
        state.leases = _Table({}, None)
        state.settings = _Table({}, None)
        state.audit = []
        state.audit_length = 0
        return state

    def copy(self) -> "_State":
        state = _State()
        state.groups = self.groups
        state.members = self.members
        state.ownerships = self.ownerships
        state.leases = self.leases
        state.settings = self.settings
        state.audit = self.audit
        state.audit_length = self.audit_length
        return state


class _Ended:
    """In the place of the state when a block has ended."""

    def __getattr__(self, name: str) -> NoReturn:
        raise Closed("transaction")


_ENDED = cast(_State, _Ended())


class MemorySnapshot:
    """The state that was current when it was opened. States do not change, so there is nothing to lock."""

    __slots__ = ("_registry", "_state", "now")

    def __init__(self, registry: "MemoryRegistry") -> None:
        self._registry = registry
        self._state = _ENDED
        self.now = 0.0

    def __enter__(self) -> Self:
        self._state, self.now = self._registry.current()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._state = _ENDED

    def group(self, name: str) -> GroupRow | None:
        return self._state.groups.rows.get(name)

    def groups(self) -> list[GroupRow]:
        return self._state.groups.in_order()

    def member(self, group: str, name: str) -> MemberRow | None:
        row = self._state.members.rows.get(group, _NO_MEMBERS).rows.get(name)
        return None if row is None else _with_metadata(row)

    def members(self, group: str) -> list[MemberRow]:
        return [_with_metadata(row) for row in self._state.members.rows.get(group, _NO_MEMBERS).in_order()]

    def ownership(self, group: str, partition: Partition) -> OwnershipRow | None:
        return self._state.ownerships.rows.get(group, _NO_OWNERSHIPS).rows.get(partition)

    def ownerships(self, group: str) -> list[OwnershipRow]:
        return self._state.ownerships.rows.get(group, _NO_OWNERSHIPS).in_order()

    def ownerships_of(self, group: str, member: str) -> list[OwnershipRow]:
        return [row for row in self.ownerships(group) if row.owner == member or row.target == member]  # noqa: PLR1714 - a set per row is slower

    def subscriptions(self) -> dict[str, set[str]]:
        return {
            group: {topic for member in table.rows.values() for topic in member.topics}
            for group, table in self._state.members.rows.items()
            if table.rows
        }

    def group_times(self) -> list[GroupTimes]:
        return [
            GroupTimes(
                group,
                min(m.expires_at for m in members),
                max(m.expires_at - m.session_timeout for m in members),
            )
            for group, table in sorted(self._state.members.rows.items())
            if (members := table.rows.values())
        ]

    def last_progress(self) -> dict[str, float]:
        owned = {
            group: [row.progress_at for row in table.rows.values() if row.owner is not None]
            for group, table in self._state.ownerships.rows.items()
        }
        return {group: min(times) for group, times in owned.items() if times}

    def lease(self, name: str) -> LeaseRow | None:
        return self._state.leases.rows.get(name)

    def setting(self, scope: str, name: str) -> SettingRow | None:
        stored = self._state.settings.rows.get(scope, _NO_SETTINGS).rows.get(name)
        if stored is None or stored.value is None:
            return None
        return SettingRow(scope, name, from_json(stored.value), stored.version)

    def settings(self, scope: str) -> list[SettingRow]:
        rows = (self.setting(scope, name) for name in sorted(self._state.settings.rows.get(scope, _NO_SETTINGS).rows))
        return [row for row in rows if row is not None]

    def scopes(self) -> list[str]:
        return [scope for scope in sorted(self._state.settings.rows) if self.settings(scope)]

    def audit_log(self, limit: int = 100, before: int | None = None) -> list[AuditRow]:
        log, end = self._state.audit, self._state.audit_length
        if before is not None:
            end = bisect_left(log, before, hi=end, key=lambda row: row.number)
        rows = log[max(end - whole_number("limit", limit, at_least=0), 0) : end]
        return [replace(row, detail=from_json(str(row.detail))) for row in reversed(rows)]


class MemoryTransaction(MemorySnapshot):
    """The only transaction at its time. It copies each table before it first changes it, and its state becomes the
    current one with the commit."""

    __slots__ = ("_touched", "_wait", "_writer")

    def __init__(self, registry: "MemoryRegistry", wait: float) -> None:
        super().__init__(registry)
        self._wait = wait
        self._writer = object()
        """Marks the tables of this transaction."""
        self._touched: set[str] = set()

    def __enter__(self) -> Self:
        state, self.now = self._registry.begin(self._wait)
        self._state = state.copy()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        state, self._state = self._state, _ENDED
        if kind is None:
            self._registry.commit(state, self._touched)
        else:
            self._registry.roll_back(state)

    def put_group(self, row: GroupRow) -> None:
        self._state.groups = self._state.groups.writable(self._writer)
        self._state.groups.put(row.name, row)

    def delete_group(self, name: str) -> None:
        state, writer = self._state, self._writer
        state.groups = state.groups.writable(writer)
        state.groups.rows.pop(name, None)
        state.members = state.members.writable(writer)
        state.members.rows.pop(name, None)
        state.ownerships = state.ownerships.writable(writer)
        state.ownerships.rows.pop(name, None)

    def put_member(self, row: MemberRow) -> None:
        if row.metadata is not None:
            row = replace(row, metadata=to_json("metadata", row.metadata))
        self._members(row.group).put(row.name, row)

    def delete_member(self, group: str, name: str) -> None:
        self._members(group).rows.pop(name, None)

    def put_ownerships(self, rows: Iterable[OwnershipRow]) -> None:
        group, table = None, _NO_OWNERSHIPS
        for row in rows:
            if row.group != group:  # nearly always they are all of one group
                group, table = row.group, self._ownerships(row.group)
            table.put(row.partition, row)

    def delete_ownerships(self, group: str, partitions: Iterable[Partition]) -> None:
        table = self._ownerships(group)
        for partition in partitions:
            table.rows.pop(partition, None)

    def commit_positions(self, commits: Sequence[PositionCommit]) -> list[bool]:
        return [self._commit(commit) for commit in commits]

    def _commit(self, commit: PositionCommit) -> bool:
        changed = []
        for partition, (epoch, position) in commit.positions.items():
            row = self.ownership(commit.group, partition)
            if row is None or row.owner != commit.owner or row.epoch != epoch:
                return False
            if row.committed is not None and position < row.committed:
                return False
            changed.append(replace(row, committed=position, progress_at=self.now))
        self.put_ownerships(changed)
        return True

    def renew_sessions(self, heartbeats: Sequence[Heartbeat]) -> list[bool]:
        return [self._renew(heartbeat) for heartbeat in heartbeats]

    def _renew(self, heartbeat: Heartbeat) -> bool:
        group, name = heartbeat.group, heartbeat.member
        member = self._state.members.rows.get(group, _NO_MEMBERS).rows.get(name)
        if member is None or member.epoch != heartbeat.epoch:
            return False
        last_heartbeat = member.expires_at - member.session_timeout
        self._members(group).put(name, replace(member, expires_at=self.now + member.session_timeout))
        self.put_ownerships(
            replace(row, progress_at=self.now)
            for row in self.ownerships_of(group, name)
            if row.owner == name and (row.partition in heartbeat.progress or row.progress_at > last_heartbeat)
        )
        return True

    def put_lease(self, row: LeaseRow) -> None:
        self._state.leases = self._state.leases.writable(self._writer)
        self._state.leases.put(row.name, row)

    def put_setting(self, scope: str, name: str, value: object) -> SettingRow:
        text = to_json("value", value)
        table = self._settings(scope)
        stored = table.rows.get(name)
        version = 1 if stored is None else stored.version + 1
        table.put(name, _Setting(text, version))
        self.touch(f"setting/{scope}")
        return SettingRow(scope, name, from_json(text), version)

    def delete_setting(self, scope: str, name: str) -> None:
        table = self._settings(scope)
        stored = table.rows.get(name)
        if stored is not None:
            table.put(name, replace(stored, value=None))
        self.touch(f"setting/{scope}")

    def audit(self, who: str, action: str, subject: str, detail: object = None) -> None:
        text, state = to_json("detail", detail), self._state
        state.audit.append(AuditRow(self._registry.next_audit_number(), self.now, who, action, subject, text))
        state.audit_length += 1

    def touch(self, name: str) -> None:
        self._touched.add(name)

    def _members(self, group: str) -> _Table[str, MemberRow]:
        tables = self._state.members = self._state.members.writable(self._writer)
        table = tables.rows[group] = tables.rows.get(group, _NO_MEMBERS).writable(self._writer)
        return table

    def _ownerships(self, group: str) -> _Table[Partition, OwnershipRow]:
        tables = self._state.ownerships = self._state.ownerships.writable(self._writer)
        table = tables.rows[group] = tables.rows.get(group, _NO_OWNERSHIPS).writable(self._writer)
        return table

    def _settings(self, scope: str) -> _Table[str, _Setting]:
        tables = self._state.settings = self._state.settings.writable(self._writer)
        table = tables.rows[scope] = tables.rows.get(scope, _NO_SETTINGS).writable(self._writer)
        return table


def _with_metadata(row: MemberRow) -> MemberRow:
    return row if row.metadata is None else replace(row, metadata=from_json(str(row.metadata)))


class MemoryRegistry(Registry):
    """A registry within one process. Watches are called by the thread that committed, before its call returns."""

    def __init__(self, clock: Clock = _SYSTEM_CLOCK, *, busy_wait: float = 10.0) -> None:
        """`busy_wait`: see `Registry.busy_wait`."""
        self.busy_wait = busy_wait
        self._clock = clock
        self._state = _State.empty()
        self._audit_numbers = itertools.count(1)
        self._watches = Watches()
        self._writing = threading.Lock()
        self._closed = False

    def _transaction(self, wait: float) -> AbstractContextManager[Transaction]:
        return MemoryTransaction(self, wait)

    def _snapshot(self) -> AbstractContextManager[Snapshot]:
        return MemorySnapshot(self)

    def begin(self, wait: float) -> tuple[_State, float]:
        """Wait for the transaction in progress, then start one. `commit` or `roll_back` ends it. Returns `current`."""
        if not self._writing.acquire(timeout=wait):
            raise Busy("registry in memory", self.busy_wait)
        try:
            return self.current()
        except BaseException:
            self._writing.release()
            raise

    def current(self) -> tuple[_State, float]:
        """The state that was last committed, and the time."""
        if self._closed:
            raise Closed("registry")
        return self._state, self._clock.now()

    def next_audit_number(self) -> int:
        """As in a database, a number that was rolled back is not used again."""
        return next(self._audit_numbers)

    def commit(self, state: _State, touched: set[str]) -> None:
        self._state = state
        self._writing.release()
        if touched and self._watches:
            self._watches.call(set().union(*map(watched_by, touched)))

    def roll_back(self, state: _State) -> None:
        del state.audit[self._state.audit_length :]
        self._writing.release()

    def watch(self, name: str, callback: Callable[[], None]) -> Callable[[], None]:
        if self._closed:
            raise Closed("registry")
        return self._watches.add(name, callback)

    def close(self) -> None:
        self._closed = True
        self._watches.clear()
