"""The versions of the registry's schema, and how each becomes the next.

Every version is written out here as it was: `schema` has the tables of the last one, which a test compares with the
result of all migrations.
"""

import json
from collections.abc import Callable
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Connection,
    Double,
    Identity,
    Integer,
    MetaData,
    Table,
    Text,
    text,
)
from sqlalchemy.types import TypeEngine

from shardyard.model import Damaged

VERSION_TABLE = "shardyard_registry"
"""Of a registry in SQLite."""

Migration = Callable[[Connection, float], None]
"""Takes the connection and the registry's time."""


def migrations_at(now: float) -> list[Callable[[Connection], None]]:
    """All of `MIGRATIONS`, with the registry's time."""

    def at_now(migration: Migration) -> Callable[[Connection], None]:
        return lambda connection: migration(connection, now)

    return [at_now(migration) for migration in MIGRATIONS]


_Name = Text().with_variant(Text(collation="C"), "postgresql")


def _key(name: str, kind: TypeEngine[Any] = _Name) -> Column[Any]:
    return Column(name, kind, primary_key=True, autoincrement=False)


def _required(name: str, kind: type[Text | BigInteger | Double[float] | Boolean]) -> Column[Any]:
    return Column(name, kind(), nullable=False)


def _create_version_1(connection: Connection, _now: float) -> None:
    tables = MetaData()

    def table(name: str, *columns: Column[Any], rowid: bool = False) -> None:
        Table(name, tables, *columns, sqlite_with_rowid=rowid, postgresql_with={"fillfactor": 50})

    table(
        "groups",
        _key("name"),
        *(_required(name, BigInteger) for name in ("epoch", "inputs", "assigned", "shape")),
        _required("assignor", Text),
        Column("max_active", BigInteger),
        Column("release_after", Double),
    )
    table(
        "members",
        _key("group_name"),
        _key("name"),
        _required("epoch", BigInteger),
        _required("weight", BigInteger),
        _required("topics", Text),
        _required("static", Boolean),
        Column("manual", Text),
        _required("session_timeout", Double),
        _required("expires_at", Double),
    )
    table(
        "ownerships",
        _key("group_name"),
        _key("topic"),
        _key("partition_index", BigInteger()),
        Column("owner", Text),
        _required("epoch", BigInteger),
        Column("target", Text),
        Column("committed_epoch", BigInteger),
        Column("committed_offset", BigInteger),
        _required("progress_at", Double),
    )
    table(
        "leases",
        _key("name"),
        _required("holder", Text),
        _required("token", BigInteger),
        _required("expires_at", Double),
    )
    table("settings", _key("scope"), _key("name"), Column("value", Text), _required("version", BigInteger))
    table(
        "audit",
        _key("number", BigInteger()),
        _required("at", Double),
        *(_required(name, Text) for name in ("who", "action", "subject", "detail")),
        rowid=True,
    )
    table("changes", _key("name"), _required("version", BigInteger))
    tables.create_all(connection, checkfirst=False)


def _migrate_to_version_2(connection: Connection, now: float) -> None:
    """Adds columns, lets the database assign audit numbers, and stores a group's configuration in `groups` alone.
    `changes.version` was a count for each name, and is now a number for all names, which continues above the
    highest."""
    for statement in (
        "ALTER TABLE groups ADD COLUMN broadcast BOOLEAN NOT NULL DEFAULT FALSE",
        "ALTER TABLE members ADD COLUMN address TEXT",
        "ALTER TABLE members ADD COLUMN metadata TEXT",
        "ALTER TABLE members ADD COLUMN prepare_seconds DOUBLE PRECISION",
        "ALTER TABLE ownerships ADD COLUMN handover_at DOUBLE PRECISION NOT NULL DEFAULT 0",
        "CREATE INDEX ix_changes_version ON changes (version)",
        "ALTER TABLE audit RENAME TO audit_1",
    ):
        connection.execute(text(statement))
    Table(
        "audit",
        MetaData(),
        Column("number", BigInteger().with_variant(Integer, "sqlite"), Identity(), primary_key=True),
        _required("at", Double),
        *(_required(name, Text) for name in ("who", "action", "subject", "detail")),
        sqlite_autoincrement=True,
    ).create(connection)
    connection.execute(text("INSERT INTO audit SELECT number, at, who, action, subject, detail FROM audit_1"))
    connection.execute(text("DROP TABLE audit_1"))
    _move_group_settings(connection, now)


def _move_group_settings(connection: Connection, now: float) -> None:
    """Version 1 stored four settings of a group twice, in `groups` and in the settings of the queue server."""
    stored = text(
        "SELECT scope, value FROM settings WHERE scope LIKE 'group/%' AND name = 'queue' AND value IS NOT NULL"
    )
    for scope, value in connection.execute(stored).all():
        try:
            settings = json.loads(value)
        except ValueError as error:
            raise Damaged(f"the setting 'queue' of {scope!r} in the registry", f"it is not JSON ({error})") from error
        moved = {
            name: settings.pop(name)
            for name in ("assignor", "max_active", "release_after", "broadcast")
            if name in settings
        }
        if not moved:
            continue
        group = scope.removeprefix("group/")
        connection.execute(
            text("UPDATE settings SET value = :value WHERE scope = :scope AND name = 'queue'"),
            {"value": json.dumps(settings), "scope": scope},
        )
        if connection.execute(text("SELECT 1 FROM groups WHERE name = :name"), {"name": group}).first() is None:
            new_group = text(
                "INSERT INTO groups (name, epoch, inputs, assigned, shape, assignor)"
                " VALUES (:name, :epoch, 0, -1, -1, 'sticky')"
            )
            connection.execute(new_group, {"name": group, "epoch": int(now * 1000)})
        columns = ", ".join(f"{name} = :{name}" for name in moved)
        change = text(f"UPDATE groups SET {columns}, inputs = inputs + 1 WHERE name = :name")  # noqa: S608 - of four names
        connection.execute(change, {**moved, "name": group})


def _migrate_to_version_3(connection: Connection, _now: float) -> None:
    """Tells the processes apart that join under one name, and those that commit."""
    connection.execute(text("ALTER TABLE members ADD COLUMN instance TEXT"))
    Table(
        "writers",
        MetaData(),
        _key("id"),
        _required("last_commit", BigInteger),
        _required("used_at", Double),
        sqlite_with_rowid=False,
        postgresql_with={"fillfactor": 50},
    ).create(connection)


def _migrate_to_version_4(connection: Connection, _now: float) -> None:
    """Finds the partitions of a member without a look at those of all others."""
    connection.execute(text("CREATE INDEX ownerships_by_owner ON ownerships (owner)"))
    connection.execute(text("CREATE INDEX ownerships_by_target ON ownerships (target)"))


def _migrate_to_version_5(connection: Connection, _now: float) -> None:
    """Lets PostgreSQL use these indexes: it does so only for comparisons by the collation of the column."""
    if connection.dialect.name == "postgresql":
        for table, column in (("ownerships", "owner"), ("ownerships", "target"), ("leases", "holder")):
            connection.execute(text(f'ALTER TABLE {table} ALTER COLUMN {column} TYPE text COLLATE "C"'))


MIGRATIONS: list[Migration] = [
    _create_version_1,
    _migrate_to_version_2,
    _migrate_to_version_3,
    _migrate_to_version_4,
    _migrate_to_version_5,
]
"""Number i brings the schema from version i to i + 1. Entries are only ever added."""
