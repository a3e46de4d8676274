"""Snapshots and transactions of a registry in an SQL database, through SQLAlchemy Core."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, NoReturn, cast

from sqlalchemy import (
    Connection,
    CursorResult,
    Delete,
    Insert,
    Table,
    Update,
    and_,
    bindparam,
    delete,
    func,
    insert,
    literal_column,
    or_,
    select,
    update,
)

from shardyard.model import Closed, Partition, Position, whole_number
from shardyard.registry.port import (
    AuditRow,
    GroupRow,
    GroupTimes,
    Heartbeat,
    LeaseRow,
    MemberRow,
    OwnershipRow,
    PositionCommit,
    SettingRow,
)
from shardyard.registry.schema import AUDIT, GROUPS, LEASES, MEMBERS, OWNERSHIPS, SETTINGS, from_json, to_json

_BEYOND_ANY = 2**63 - 1

Values = Mapping[str, object]
UpdateEach = Callable[[Connection, Update, Sequence[Values]], list[bool]]
"""See `Store.update_each`."""
UpdateAll = Callable[[Connection, Update, Sequence[Values]], int]
"""See `Store.update_all`."""


# Statements are built once, as building one takes longer than running it. A column's value is bound as `its_<column>`,
# because SQLAlchemy reserves the bare name.


def _its(table: Table, *columns: str) -> Any:
    return and_(*(table.c[column] == bindparam(f"its_{column}") for column in columns))


def _put(table: Table) -> tuple[Update, Insert]:
    """An upsert in every database: an update, and an insert for when the update matched no row."""
    same = _its(table, *table.primary_key.columns.keys())
    return update(table).where(same).values(_bound(table)), insert(table).values(_bound(table))


def _bound(table: Table, *, without: str | None = None) -> dict[str, Any]:
    return {column.name: bindparam(f"its_{column.name}") for column in table.columns if column.name != without}


def _delete(table: Table, *columns: str) -> Delete:
    return delete(table).where(_its(table, *columns))


_GROUP = select(GROUPS).where(_its(GROUPS, "name"))
_ALL_GROUPS = select(GROUPS).order_by(GROUPS.c.name)
_PUT_GROUP = _put(GROUPS)
_DELETE_GROUP = _delete(GROUPS, "name")

_MEMBER = select(MEMBERS).where(_its(MEMBERS, "group_name", "name"))
_MEMBERS_IN = select(MEMBERS).where(_its(MEMBERS, "group_name")).order_by(MEMBERS.c.name)
_PUT_MEMBER = _put(MEMBERS)
_DELETE_MEMBER = _delete(MEMBERS, "group_name", "name")
_DELETE_MEMBERS_IN = _delete(MEMBERS, "group_name")
_SUBSCRIPTIONS = select(MEMBERS.c.group_name, MEMBERS.c.topics).distinct()
_LAST_HEARTBEAT = MEMBERS.c.expires_at - MEMBERS.c.session_timeout
_GROUP_TIMES = (
    select(MEMBERS.c.group_name, func.min(MEMBERS.c.expires_at), func.max(_LAST_HEARTBEAT))
    .group_by(MEMBERS.c.group_name)
    .order_by(MEMBERS.c.group_name)
)
_THIS_MEMBERSHIP = _its(MEMBERS, "group_name", "name", "epoch")
_RENEW = update(MEMBERS).where(_THIS_MEMBERSHIP).values(expires_at=bindparam("its_now") + MEMBERS.c.session_timeout)

_OWNERSHIP = select(OWNERSHIPS).where(_its(OWNERSHIPS, "group_name", "topic", "partition_index"))
_OWNERSHIPS_IN = (
    select(OWNERSHIPS)
    .where(_its(OWNERSHIPS, "group_name"))
    .order_by(OWNERSHIPS.c.group_name, OWNERSHIPS.c.topic, OWNERSHIPS.c.partition_index)
)
_IN_GROUP = OWNERSHIPS.c.group_name.concat(literal_column("''")) == bindparam("its_group_name")
"""In a group, for rows that are found by their owner or target. Written like this, it keeps SQLite from reading all
rows of the group instead."""
_OWNERSHIPS_OF = (
    select(OWNERSHIPS)
    .where(_IN_GROUP, (OWNERSHIPS.c.owner == bindparam("member")) | (OWNERSHIPS.c.target == bindparam("member")))
    .order_by(OWNERSHIPS.c.topic, OWNERSHIPS.c.partition_index)
)
_PARTITIONS_IN = select(OWNERSHIPS.c.topic, OWNERSHIPS.c.partition_index).where(_its(OWNERSHIPS, "group_name"))
_PUT_OWNERSHIP = _put(OWNERSHIPS)
_DELETE_OWNERSHIP = _delete(OWNERSHIPS, "group_name", "topic", "partition_index")
_DELETE_OWNERSHIPS_IN = _delete(OWNERSHIPS, "group_name")

_LAST_PROGRESS = (
    select(OWNERSHIPS.c.group_name, func.min(OWNERSHIPS.c.progress_at))
    .where(OWNERSHIPS.c.owner.is_not(None))
    .group_by(OWNERSHIPS.c.group_name)
)
_COMMIT = (
    update(OWNERSHIPS)
    .where(
        _its(OWNERSHIPS, "group_name", "topic", "partition_index", "owner", "epoch"),
        or_(
            OWNERSHIPS.c.committed_epoch.is_(None),
            OWNERSHIPS.c.committed_epoch < bindparam("its_committed_epoch"),
            (OWNERSHIPS.c.committed_epoch == bindparam("its_committed_epoch"))
            & (OWNERSHIPS.c.committed_offset <= bindparam("its_committed_offset")),
        ),
    )
    .values(
        committed_epoch=bindparam("its_committed_epoch"),
        committed_offset=bindparam("its_committed_offset"),
        progress_at=bindparam("its_now"),
    )
)
_NOTE_PROGRESS = (
    update(OWNERSHIPS)
    .where(_its(OWNERSHIPS, "group_name", "topic", "partition_index", "owner"))
    .values(progress_at=bindparam("its_now"))
)
_NOTE_RECENT = (
    update(OWNERSHIPS)
    .where(
        _IN_GROUP,
        OWNERSHIPS.c.owner == bindparam("its_name"),
        OWNERSHIPS.c.progress_at > select(_LAST_HEARTBEAT).where(_THIS_MEMBERSHIP).scalar_subquery(),
    )
    .values(progress_at=bindparam("its_now"))
)

_LEASE = select(LEASES).where(_its(LEASES, "name"))
_PUT_LEASE = _put(LEASES)

_SETTING = select(SETTINGS).where(_its(SETTINGS, "scope", "name"))
_SETTINGS_IN = select(SETTINGS).where(_its(SETTINGS, "scope") & SETTINGS.c.value.is_not(None)).order_by(SETTINGS.c.name)
_SCOPES = select(SETTINGS.c.scope).where(SETTINGS.c.value.is_not(None)).distinct().order_by(SETTINGS.c.scope)
_PUT_SETTING = _put(SETTINGS)
_DELETE_SETTING = update(SETTINGS).where(_its(SETTINGS, "scope", "name")).values(value=None)

_ADD_AUDIT = insert(AUDIT).values(_bound(AUDIT, without="number")).inline()
_AUDIT_LOG = (
    select(AUDIT)
    .where(AUDIT.c.number < bindparam("before"))
    .order_by(AUDIT.c.number.desc())
    .limit(bindparam("limit", type_=AUDIT.c.number.type))
)


class SqlSnapshot:
    """A snapshot on a connection that has begun a transaction."""

    def __init__(self, connection: Connection, now: float) -> None:
        self._execute: Callable[..., CursorResult[*tuple[Any, ...]]] = connection.execute
        self.now = now

    def end(self) -> None:
        """From now on every call raises `Closed`: the connection is used by the next transaction."""
        self._execute = _ended

    def group(self, name: str) -> GroupRow | None:
        row = self._execute(_GROUP, {"its_name": name}).first()
        return None if row is None else GroupRow(*row)

    def groups(self) -> list[GroupRow]:
        return [GroupRow(*row) for row in self._execute(_ALL_GROUPS)]

    def member(self, group: str, name: str) -> MemberRow | None:
        row = self._execute(_MEMBER, {"its_group_name": group, "its_name": name}).first()
        return None if row is None else _member(row)

    def members(self, group: str) -> list[MemberRow]:
        return [_member(row) for row in self._execute(_MEMBERS_IN, {"its_group_name": group})]

    def ownership(self, group: str, partition: Partition) -> OwnershipRow | None:
        row = self._execute(_OWNERSHIP, _identity(group, partition)).first()
        return None if row is None else _ownership(row)

    def ownerships(self, group: str) -> list[OwnershipRow]:
        return [_ownership(row) for row in self._execute(_OWNERSHIPS_IN, {"its_group_name": group})]

    def ownerships_of(self, group: str, member: str) -> list[OwnershipRow]:
        rows = self._execute(_OWNERSHIPS_OF, {"its_group_name": group, "member": member})
        return [_ownership(row) for row in rows]

    def subscriptions(self) -> dict[str, set[str]]:
        found: defaultdict[str, set[str]] = defaultdict(set)
        for group, topics in self._execute(_SUBSCRIPTIONS):
            found[group] |= set(cast(list[str], from_json(topics)))
        return dict(found)

    def group_times(self) -> list[GroupTimes]:
        return [GroupTimes(*row) for row in self._execute(_GROUP_TIMES)]

    def last_progress(self) -> dict[str, float]:
        return dict(row for row in self._execute(_LAST_PROGRESS))

    def lease(self, name: str) -> LeaseRow | None:
        row = self._execute(_LEASE, {"its_name": name}).first()
        return None if row is None else LeaseRow(*row)

    def setting(self, scope: str, name: str) -> SettingRow | None:
        row = self._execute(_SETTING, {"its_scope": scope, "its_name": name}).first()
        return None if row is None or row[2] is None else _setting(row)

    def settings(self, scope: str) -> list[SettingRow]:
        return [_setting(row) for row in self._execute(_SETTINGS_IN, {"its_scope": scope})]

    def scopes(self) -> list[str]:
        return [scope for (scope,) in self._execute(_SCOPES)]

    def audit_log(self, limit: int = 100, before: int | None = None) -> list[AuditRow]:
        page = {
            "limit": whole_number("limit", limit, at_least=0),
            "before": _BEYOND_ANY if before is None else before,
        }
        return [_audit(row) for row in self._execute(_AUDIT_LOG, page)]


class SqlTransaction(SqlSnapshot):
    """A transaction on a connection that has begun one."""

    def __init__(self, connection: Connection, now: float, update_each: UpdateEach, update_all: UpdateAll) -> None:
        super().__init__(connection, now)
        self.touched: set[str] = set()
        self._connection = connection
        self._update_each = update_each
        self._update_all = update_all

    def end(self) -> None:
        super().end()
        self._update_each = self._update_all = _ended

    def put_group(self, row: GroupRow) -> None:
        self._put(
            _PUT_GROUP,
            {
                "its_name": row.name,
                "its_epoch": row.epoch,
                "its_inputs": row.inputs,
                "its_assigned": row.assigned,
                "its_shape": row.shape,
                "its_assignor": row.assignor,
                "its_max_active": row.max_active,
                "its_release_after": row.release_after,
                "its_broadcast": row.broadcast,
            },
        )

    def delete_group(self, name: str) -> None:
        self._execute(_DELETE_GROUP, {"its_name": name})
        self._execute(_DELETE_MEMBERS_IN, {"its_group_name": name})
        self._execute(_DELETE_OWNERSHIPS_IN, {"its_group_name": name})

    def put_member(self, row: MemberRow) -> None:
        manual = None if row.manual is None else [[partition.topic, partition.index] for partition in row.manual]
        self._put(
            _PUT_MEMBER,
            {
                "its_group_name": row.group,
                "its_name": row.name,
                "its_epoch": row.epoch,
                "its_weight": row.weight,
                "its_topics": to_json("topics", row.topics),
                "its_static": row.static,
                "its_manual": None if manual is None else to_json("manual", manual),
                "its_session_timeout": row.session_timeout,
                "its_expires_at": row.expires_at,
                "its_address": row.address,
                "its_metadata": None if row.metadata is None else to_json("metadata", row.metadata),
                "its_prepare_seconds": row.prepare_seconds,
                "its_instance": row.instance,
            },
        )

    def delete_member(self, group: str, name: str) -> None:
        self._execute(_DELETE_MEMBER, {"its_group_name": group, "its_name": name})

    def put_ownerships(self, rows: Iterable[OwnershipRow]) -> None:
        latest = {(row.group, row.partition.topic, row.partition.index): row for row in rows}
        if not latest:
            return
        change, add = _PUT_OWNERSHIP
        changed = self._execute(change, [_ownership_values(row) for row in latest.values()]).rowcount
        if changed == len(latest):
            return
        if changed:  # the database does not say which rows it found
            for group in {group for group, _, _ in latest}:
                for topic, index in self._execute(_PARTITIONS_IN, {"its_group_name": group}):
                    latest.pop((group, topic, index), None)
        self._execute(add, [_ownership_values(row) for row in latest.values()])

    def delete_ownerships(self, group: str, partitions: Iterable[Partition]) -> None:
        identities = [_identity(group, partition) for partition in partitions]
        if identities:
            self._execute(_DELETE_OWNERSHIP, identities)

    def commit_positions(self, commits: Sequence[PositionCommit]) -> list[bool]:
        stored: list[bool] = []
        for is_one_row, some in groupby(commits, key=lambda commit: len(commit.positions) == 1):
            if is_one_row:
                stored += self._commit_each(some)
            else:
                stored += [self._commit_all(commit) for commit in some]
        return stored

    def _commit_each(self, commits: Iterable[PositionCommit]) -> list[bool]:
        rows = [
            {
                "its_group_name": commit.group,
                "its_topic": partition.topic,
                "its_partition_index": partition.index,
                "its_owner": commit.owner,
                "its_epoch": _known_epoch(epoch),
                "its_committed_epoch": position.epoch,
                "its_committed_offset": position.offset,
                "its_now": self.now,
            }
            for commit in commits
            for partition, (epoch, position) in commit.positions.items()
        ]
        return self._update_each(self._connection, _COMMIT, rows)

    def _commit_all(self, commit: PositionCommit) -> bool:
        with self._connection.begin_nested() as savepoint:
            stored = all(self._commit_each([commit]))
            if not stored:
                savepoint.rollback()
        return stored

    def renew_sessions(self, heartbeats: Sequence[Heartbeat]) -> list[bool]:
        members: list[Values] = [
            {"its_group_name": h.group, "its_name": h.member, "its_epoch": _known_epoch(h.epoch), "its_now": self.now}
            for h in heartbeats
        ]
        self._update_all(self._connection, _NOTE_RECENT, members)  # before the time of the last heartbeat is replaced
        renewed = [True] * len(members)
        if self._update_all(self._connection, _RENEW, members) < len(members):  # then find out whose
            renewed = self._update_each(self._connection, _RENEW, members)
        progressed = [
            _identity(heartbeat.group, partition) | {"its_owner": heartbeat.member, "its_now": self.now}
            for heartbeat, is_member in zip(heartbeats, renewed, strict=True)
            if is_member
            for partition in heartbeat.progress
        ]
        self._update_all(self._connection, _NOTE_PROGRESS, progressed)
        return renewed

    def put_lease(self, row: LeaseRow) -> None:
        self._put(
            _PUT_LEASE,
            {
                "its_name": row.name,
                "its_holder": row.holder,
                "its_token": row.token,
                "its_expires_at": row.expires_at,
            },
        )

    def put_setting(self, scope: str, name: str, value: object) -> SettingRow:
        text = to_json("value", value)
        old = self._execute(_SETTING, {"its_scope": scope, "its_name": name}).first()
        version = 1 if old is None else old[3] + 1
        self._put(_PUT_SETTING, {"its_scope": scope, "its_name": name, "its_value": text, "its_version": version})
        self.touch(f"setting/{scope}")
        return SettingRow(scope, name, from_json(text), version)

    def delete_setting(self, scope: str, name: str) -> None:
        self._execute(_DELETE_SETTING, {"its_scope": scope, "its_name": name})
        self.touch(f"setting/{scope}")

    def audit(self, who: str, action: str, subject: str, detail: object = None) -> None:
        self._execute(
            _ADD_AUDIT,
            {
                "its_at": self.now,
                "its_who": who,
                "its_action": action,
                "its_subject": subject,
                "its_detail": to_json("detail", detail),
            },
        )

    def touch(self, name: str) -> None:
        self.touched.add(name)

    def _put(self, statements: tuple[Update, Insert], values: Values) -> None:
        if not self._execute(statements[0], values).rowcount:
            self._execute(statements[1], values)


def _ended(*_: object) -> NoReturn:
    raise Closed("transaction")


def _member(row: Sequence[Any]) -> MemberRow:
    group, name, epoch, weight, topics, static, manual, session_timeout, expires_at, address, metadata, *last = row
    partitions = None
    if manual is not None:
        partitions = tuple(Partition(topic, index) for topic, index in cast(list[Any], from_json(manual)))
    names = tuple(cast(list[str], from_json(topics)))
    return MemberRow(
        group,
        name,
        epoch,
        weight,
        names,
        static,
        partitions,
        session_timeout,
        expires_at,
        address,
        None if metadata is None else from_json(metadata),
        *last,
    )


def _known_epoch(epoch: int) -> int:
    """`epoch`, or one that no row has if it is too large for a database: a caller may claim any."""
    return epoch if 0 <= epoch <= _BEYOND_ANY else -1


def _identity(group: str, partition: Partition) -> dict[str, object]:
    return {"its_group_name": group, "its_topic": partition.topic, "its_partition_index": partition.index}


def _ownership(row: Sequence[Any]) -> OwnershipRow:
    group, topic, index, owner, epoch, target, committed_epoch, committed_offset, progress_at, handover_at = row
    committed = None if committed_epoch is None else Position(committed_epoch, committed_offset)
    return OwnershipRow(group, Partition(topic, index), owner, epoch, target, committed, progress_at, handover_at)


def _ownership_values(row: OwnershipRow) -> dict[str, object]:
    return {
        "its_group_name": row.group,
        "its_topic": row.partition.topic,
        "its_partition_index": row.partition.index,
        "its_owner": row.owner,
        "its_epoch": row.epoch,
        "its_target": row.target,
        "its_committed_epoch": None if row.committed is None else row.committed.epoch,
        "its_committed_offset": None if row.committed is None else row.committed.offset,
        "its_progress_at": row.progress_at,
        "its_handover_at": row.handover_at,
    }


def _setting(row: Sequence[Any]) -> SettingRow:
    scope, name, text, version = row
    return SettingRow(scope, name, from_json(text), version)


def _audit(row: Sequence[Any]) -> AuditRow:
    number, at, who, action, subject, text = row
    return AuditRow(number, at, who, action, subject, from_json(text))
