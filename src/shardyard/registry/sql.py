"""The registry in an SQL database, through SQLAlchemy Core. What differs between databases is in their `Store`."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NoReturn, Protocol, cast

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
    select,
    update,
)

from shardyard.model import Closed, Partition, Position, whole_number
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
from shardyard.registry.schema import (
    AUDIT,
    CHANGES,
    GROUPS,
    LEASES,
    MEMBERS,
    OWNERSHIPS,
    SETTINGS,
    from_json,
    to_json,
)
from shardyard.runtime.clock import Clock, SystemClock

_SYSTEM_CLOCK = SystemClock()
_BEYOND_ANY = 2**63 - 1

Values = Mapping[str, object]


class Store(Protocol):
    """A database, as far as databases differ: how to be alone in it, and how to hear of changes."""

    def begin(self) -> AbstractContextManager[Connection]:
        """A serializable transaction with the schema up to date, committed on leaving the block or rolled back if it
        raised. The database's own errors come out as ours."""
        ...

    def look(self) -> AbstractContextManager[Connection]:
        """A transaction that only reads, and neither waits nor is waited for."""
        ...

    def committed(self, touched: set[str]) -> None:
        """Told after a transaction of this process that touched these names."""
        ...

    def watch(self, name: str, callback: Callable[[], None]) -> Callable[[], None]:
        """As `Registry.watch`; what counts is `CHANGES`."""
        ...

    def close(self) -> None:
        """As `Registry.close`."""
        ...


# Statements are built once, as building one takes longer than running it. A column's value is bound as `its_<column>`:
# SQLAlchemy keeps the bare name for itself.


def _its(table: Table, *columns: str) -> Any:
    return and_(*(table.c[column] == bindparam(f"its_{column}") for column in columns))


def _put(table: Table) -> tuple[Update, Insert]:
    """An upsert that every database understands: the second where the first found nothing."""
    values: dict[str, Any] = {column.name: bindparam(f"its_{column.name}") for column in table.columns}
    same = _its(table, *table.primary_key.columns.keys())
    return update(table).where(same).values(values), insert(table).values(values)


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

_OWNERSHIP = select(OWNERSHIPS).where(_its(OWNERSHIPS, "group_name", "topic", "partition_index"))
_OWNERSHIPS_IN = (
    select(OWNERSHIPS)
    .where(_its(OWNERSHIPS, "group_name"))
    .order_by(OWNERSHIPS.c.group_name, OWNERSHIPS.c.topic, OWNERSHIPS.c.partition_index)
)
_OWNERSHIPS_OF = _OWNERSHIPS_IN.where(
    (OWNERSHIPS.c.owner == bindparam("member")) | (OWNERSHIPS.c.target == bindparam("member"))
)
_PARTITIONS_IN = select(OWNERSHIPS.c.topic, OWNERSHIPS.c.partition_index).where(_its(OWNERSHIPS, "group_name"))
_PUT_OWNERSHIP = _put(OWNERSHIPS)
_DELETE_OWNERSHIP = _delete(OWNERSHIPS, "group_name", "topic", "partition_index")
_DELETE_OWNERSHIPS_IN = _delete(OWNERSHIPS, "group_name")

_LEASE = select(LEASES).where(_its(LEASES, "name"))
_PUT_LEASE = _put(LEASES)

_SETTING = select(SETTINGS).where(_its(SETTINGS, "scope", "name"))
_SETTINGS_IN = select(SETTINGS).where(_its(SETTINGS, "scope") & SETTINGS.c.value.is_not(None)).order_by(SETTINGS.c.name)
_PUT_SETTING = _put(SETTINGS)
_DELETE_SETTING = update(SETTINGS).where(_its(SETTINGS, "scope", "name")).values(value=None)

_LAST_AUDIT = select(func.max(AUDIT.c.number))
_ADD_AUDIT = _put(AUDIT)[1]
_AUDIT_LOG = (
    select(AUDIT)
    .where(AUDIT.c.number < bindparam("before"))
    .order_by(AUDIT.c.number.desc())
    .limit(bindparam("limit", type_=AUDIT.c.number.type))
)

_TOUCH = (
    update(CHANGES).where(_its(CHANGES, "name")).values(version=CHANGES.c.version + 1),
    insert(CHANGES).values(name=bindparam("its_name"), version=1),
)


class SqlTransaction:
    """A transaction on a connection that is in one."""

    def __init__(self, connection: Connection, now: float) -> None:
        self._execute: Callable[..., CursorResult[*tuple[Any, ...]]] = connection.execute
        self.now = now
        self.touched: set[str] = set()

    def end(self) -> None:
        """From now on it raises `Closed`: the connection goes to the next one."""
        self._execute = _ended

    def _put(self, statements: tuple[Update, Insert], values: Values) -> None:
        if not self._execute(statements[0], values).rowcount:
            self._execute(statements[1], values)

    def group(self, name: str) -> GroupRow | None:
        row = self._execute(_GROUP, {"its_name": name}).first()
        return None if row is None else GroupRow(*row)

    def groups(self) -> list[GroupRow]:
        return [GroupRow(*row) for row in self._execute(_ALL_GROUPS)]

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
            },
        )

    def delete_group(self, name: str) -> None:
        self._execute(_DELETE_GROUP, {"its_name": name})
        self._execute(_DELETE_MEMBERS_IN, {"its_group_name": name})
        self._execute(_DELETE_OWNERSHIPS_IN, {"its_group_name": name})

    def member(self, group: str, name: str) -> MemberRow | None:
        row = self._execute(_MEMBER, {"its_group_name": group, "its_name": name}).first()
        return None if row is None else _member(row)

    def members(self, group: str) -> list[MemberRow]:
        return [_member(row) for row in self._execute(_MEMBERS_IN, {"its_group_name": group})]

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
            },
        )

    def delete_member(self, group: str, name: str) -> None:
        self._execute(_DELETE_MEMBER, {"its_group_name": group, "its_name": name})

    def ownership(self, group: str, partition: Partition) -> OwnershipRow | None:
        row = self._execute(_OWNERSHIP, _identity(group, partition)).first()
        return None if row is None else _ownership(row)

    def ownerships(self, group: str) -> list[OwnershipRow]:
        return [_ownership(row) for row in self._execute(_OWNERSHIPS_IN, {"its_group_name": group})]

    def ownerships_of(self, group: str, member: str) -> list[OwnershipRow]:
        rows = self._execute(_OWNERSHIPS_OF, {"its_group_name": group, "member": member})
        return [_ownership(row) for row in rows]

    def put_ownerships(self, rows: Iterable[OwnershipRow]) -> None:
        latest = {(row.group, row.partition.topic, row.partition.index): row for row in rows}
        if not latest:
            return
        change, add = _PUT_OWNERSHIP
        changed = self._execute(change, [_ownership_values(row) for row in latest.values()]).rowcount
        if changed == len(latest):
            return
        if changed:  # which ones it found, the database does not say
            for group in {group for group, _, _ in latest}:
                for topic, index in self._execute(_PARTITIONS_IN, {"its_group_name": group}):
                    latest.pop((group, topic, index), None)
        self._execute(add, [_ownership_values(row) for row in latest.values()])

    def delete_ownerships(self, group: str, partitions: Iterable[Partition]) -> None:
        doomed = [_identity(group, partition) for partition in partitions]
        if doomed:
            self._execute(_DELETE_OWNERSHIP, doomed)

    def lease(self, name: str) -> LeaseRow | None:
        row = self._execute(_LEASE, {"its_name": name}).first()
        return None if row is None else LeaseRow(*row)

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

    def setting(self, scope: str, name: str) -> SettingRow | None:
        row = self._execute(_SETTING, {"its_scope": scope, "its_name": name}).first()
        return None if row is None or row[2] is None else _setting(row)

    def settings(self, scope: str) -> list[SettingRow]:
        return [_setting(row) for row in self._execute(_SETTINGS_IN, {"its_scope": scope})]

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
        text = to_json("detail", detail)
        last = self._execute(_LAST_AUDIT).scalar()
        self._execute(
            _ADD_AUDIT,
            {
                "its_number": (last or 0) + 1,
                "its_at": self.now,
                "its_who": who,
                "its_action": action,
                "its_subject": subject,
                "its_detail": text,
            },
        )

    def audit_log(self, limit: int = 100, before: int | None = None) -> list[AuditRow]:
        page = {
            "limit": whole_number("limit", limit, at_least=0),
            "before": _BEYOND_ANY if before is None else before,
        }
        return [_audit(row) for row in self._execute(_AUDIT_LOG, page)]

    def touch(self, name: str) -> None:
        if name not in self.touched:
            self.touched.add(name)
            self._put(_TOUCH, {"its_name": name})


def _ended(*_: object) -> NoReturn:
    raise Closed("transaction")


def _member(row: Sequence[Any]) -> MemberRow:
    group, name, epoch, weight, topics, static, manual, session_timeout, expires_at = row
    partitions = None
    if manual is not None:
        partitions = tuple(Partition(topic, index) for topic, index in cast(list[Any], from_json(manual)))
    names = tuple(cast(list[str], from_json(topics)))
    return MemberRow(group, name, epoch, weight, names, static, partitions, session_timeout, expires_at)


def _identity(group: str, partition: Partition) -> dict[str, object]:
    return {"its_group_name": group, "its_topic": partition.topic, "its_partition_index": partition.index}


def _ownership(row: Sequence[Any]) -> OwnershipRow:
    group, topic, index, owner, epoch, target, committed_epoch, committed_offset, progress_at = row
    committed = None if committed_epoch is None else Position(committed_epoch, committed_offset)
    return OwnershipRow(group, Partition(topic, index), owner, epoch, target, committed, progress_at)


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
    }


def _setting(row: Sequence[Any]) -> SettingRow:
    scope, name, text, version = row
    return SettingRow(scope, name, from_json(text), version)


def _audit(row: Sequence[Any]) -> AuditRow:
    number, at, who, action, subject, text = row
    return AuditRow(number, at, who, action, subject, from_json(text))


class SqlRegistry(Registry):
    """A registry in the database that `store` opened; the registry closes it."""

    def __init__(self, store: Store, clock: Clock = _SYSTEM_CLOCK) -> None:
        self._store = store
        self._clock = clock

    @contextmanager
    def transaction(self) -> Iterator[Transaction]:
        with self._store.begin() as connection:
            transaction = SqlTransaction(connection, self._clock.now())
            try:
                yield transaction
            finally:
                transaction.end()
        if transaction.touched:
            self._store.committed(transaction.touched)

    @contextmanager
    def snapshot(self) -> Iterator[Transaction]:
        with self._store.look() as connection:
            transaction = SqlTransaction(connection, self._clock.now())
            try:
                yield transaction
            finally:
                transaction.end()

    def watch(self, name: str, callback: Callable[[], None]) -> Callable[[], None]:
        return self._store.watch(name, callback)

    def close(self) -> None:
        self._store.close()
