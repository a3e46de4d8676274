"""The registry's tables as they are now; `migrations` brings older ones up to date."""

import json
from typing import Any

from sqlalchemy import BigInteger, Boolean, Column, Double, Identity, Index, Integer, MetaData, Table, Text
from sqlalchemy.types import TypeEngine

from shardyard.model import Damaged, InvalidValue

METADATA = MetaData()

_Name = Text().with_variant(Text(collation="C"), "postgresql")
"""Names are ordered by code point, which is the default of SQLite."""

_Number = BigInteger().with_variant(Integer, "sqlite")
"""A number that the database assigns. SQLite assigns only those of the type INTEGER, which has 64 bits there."""

_CLUSTERED: dict[str, Any] = {"sqlite_with_rowid": False, "postgresql_with": {"fillfactor": 50}}
"""SQLite then stores the rows in the primary key's tree: a group's rows lie together, and a change writes one page.
PostgreSQL leaves room on each page for the next version of a row, which then needs no new entry in an index."""


def _key(name: str, kind: TypeEngine[Any] = _Name) -> Column[object]:
    return Column(name, kind, primary_key=True, autoincrement=False)


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
    Column("broadcast", Boolean, nullable=False),
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
    Column("address", Text),
    Column("metadata", Text),  # JSON
    Column("prepare_seconds", Double),
    Column("instance", Text),
    **_CLUSTERED,
)

OWNERSHIPS = Table(
    "ownerships",
    METADATA,
    _key("group_name"),
    _key("topic"),
    _key("partition_index", BigInteger()),
    Column("owner", _Name),
    Column("epoch", BigInteger, nullable=False),
    Column("target", _Name),
    Column("committed_epoch", BigInteger),
    Column("committed_offset", BigInteger),
    Column("progress_at", Double, nullable=False),
    Column("handover_at", Double, nullable=False),
    # What a member owns and will own, without a look at the partitions of all others. Commits do not write these.
    Index("ownerships_by_owner", "owner"),
    Index("ownerships_by_target", "target"),
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
    Column("value", Text),  # JSON; NULL for a deleted setting, whose version is kept
    Column("version", BigInteger, nullable=False),
    **_CLUSTERED,
)

AUDIT = Table(
    "audit",
    METADATA,
    Column("number", _Number, Identity(), primary_key=True),
    Column("at", Double, nullable=False),
    Column("who", Text, nullable=False),
    Column("action", Text, nullable=False),
    Column("subject", Text, nullable=False),
    Column("detail", Text, nullable=False),  # JSON
    sqlite_autoincrement=True,  # so that the number of a deleted entry is not used again
)

CHANGES = Table(
    "changes",
    METADATA,
    _key("name"),
    Column("version", BigInteger, nullable=False, index=True),
    **_CLUSTERED,
)
"""The names that were touched, each with the number of its last touch; for SQLite, whose watchers read them."""

WRITERS = Table(
    "writers",
    METADATA,
    _key("id"),
    Column("last_commit", BigInteger, nullable=False),
    Column("used_at", Double, nullable=False),
    **_CLUSTERED,
)
"""The processes that write, each with the number of its last commit; for PostgreSQL, where the response to a commit may
be lost."""


def to_json(name: str, value: object) -> str:
    """`value` as it is stored. `InvalidValue`, with `name` in its message, if it is not a JSON value."""
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidValue(name, value, f"a value that JSON can represent ({error})") from error


def from_json(text: str) -> object:
    """The value that `to_json` stored. `Damaged` if the text is not JSON."""
    try:
        value: object = json.loads(text)
    except ValueError as error:
        raise Damaged("a row of the registry", f"{text!r} is not JSON ({error})") from error
    return value
