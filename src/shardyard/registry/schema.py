"""The registry's tables, their version, and how an older version becomes this one."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Connection,
    Double,
    Integer,
    MetaData,
    Table,
    Text,
    insert,
    inspect,
    select,
    update,
)

from shardyard.model import Damaged, InvalidValue, WrongSchemaVersion

METADATA = MetaData()

_Name = Text
"""Names are ordered by code point. SQLite does so by itself; PostgreSQL will want the collation "C" here."""

_CLUSTERED: dict[str, Any] = {"sqlite_with_rowid": False}
"""SQLite then keeps the rows in the primary key itself: a group's rows lie together, and a change writes one page."""


def _key(name: str, kind: type[Text | BigInteger] = _Name) -> Column[object]:
    return Column(name, kind(), primary_key=True, autoincrement=False)


GROUPS = Table(
    "groups",
    METADATA,
    _key("name"),
    Column("epoch", BigInteger, nullable=False),
    Column("inputs", BigInteger, nullable=False),
    Column("assigned", BigInteger, nullable=False),
    Column("shape", BigInteger, nullable=False),
    Column("assignor", Text, nullable=False),
    Column("max_active", BigInteger),
    Column("release_after", Double),
    **_CLUSTERED,
)

MEMBERS = Table(
    "members",
    METADATA,
    _key("group_name"),
    _key("name"),
    Column("epoch", BigInteger, nullable=False),
    Column("weight", BigInteger, nullable=False),
    Column("topics", Text, nullable=False),  # JSON: a list of names
    Column("static", Boolean, nullable=False),
    Column("manual", Text),  # JSON: a list of [topic, index]
    Column("session_timeout", Double, nullable=False),
    Column("expires_at", Double, nullable=False),
    **_CLUSTERED,
)

# Without an index by owner and target: it would be written with every commit of a position, to save the reader a scan
# over one group's rows.
OWNERSHIPS = Table(
    "ownerships",
    METADATA,
    _key("group_name"),
    _key("topic"),
    _key("partition_index", BigInteger),
    Column("owner", _Name),
    Column("epoch", BigInteger, nullable=False),
    Column("target", _Name),
    Column("committed_epoch", BigInteger),
    Column("committed_offset", BigInteger),
    Column("progress_at", Double, nullable=False),
    **_CLUSTERED,
)

LEASES = Table(
    "leases",
    METADATA,
    _key("name"),
    Column("holder", _Name, nullable=False),
    Column("token", BigInteger, nullable=False),
    Column("expires_at", Double, nullable=False),
    **_CLUSTERED,
)

SETTINGS = Table(
    "settings",
    METADATA,
    _key("scope"),
    _key("name"),
    Column("value", Text),  # JSON; NULL when deleted, as the version outlives the value
    Column("version", BigInteger, nullable=False),
    **_CLUSTERED,
)

AUDIT = Table(
    "audit",
    METADATA,
    _key("number", BigInteger),
    Column("at", Double, nullable=False),
    Column("who", Text, nullable=False),
    Column("action", Text, nullable=False),
    Column("subject", Text, nullable=False),
    Column("detail", Text, nullable=False),  # JSON
)

CHANGES = Table("changes", METADATA, _key("name"), Column("version", BigInteger, nullable=False), **_CLUSTERED)
"""How often each name was touched: what the watches look at."""

VERSION_TABLE = "shardyard_registry"
_VERSION = Table(VERSION_TABLE, MetaData(), Column("version", Integer, nullable=False))


def _create(connection: Connection) -> None:
    """Version 1. Whoever changes a table above writes here what it was."""
    METADATA.create_all(connection, checkfirst=False)


MIGRATIONS: list[Callable[[Connection], None]] = [_create]
"""Number i brings the schema from version i to i + 1. Only ever added to."""


def migrate(connection: Connection, where: str, migrations: Sequence[Callable[[Connection], None]]) -> None:
    """Bring the schema up to date, in the transaction that `connection` is in.

    `WrongSchemaVersion` when it is beyond the last of `migrations`; `where` is what errors call the database.
    """
    if inspect(connection).has_table(VERSION_TABLE):
        found = connection.execute(select(_VERSION.c.version)).scalar()
        if found is None:
            raise Damaged(where, "it does not say its schema version")
    else:
        found = 0
        _VERSION.create(connection)
        connection.execute(insert(_VERSION).values(version=found))
    if found > len(migrations):
        raise WrongSchemaVersion(where, found, len(migrations))
    for migration in migrations[found:]:
        migration(connection)
    if found < len(migrations):
        connection.execute(update(_VERSION).values(version=len(migrations)))


def to_json(name: str, value: object) -> str:
    """`value` as it is stored; `InvalidValue`, which calls it `name`, when JSON can't hold it."""
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidValue(name, value, f"something JSON can hold ({error})") from error


def from_json(text: str) -> object:
    """What `to_json` stored."""
    try:
        value: object = json.loads(text)
    except ValueError as error:
        raise Damaged("a row of the registry", f"{text!r} is not JSON ({error})") from error
    return value
