"""The tables of a history, the same in every database.

The history's own facts are the entries. `history_chats` has what follows from them for each user and peer, so that a
list of chats reads one row for each, however many messages they have. Since version 2 it has the posts of channels, and
for each user and channel the last change of the membership.
"""

from collections.abc import Callable
from typing import Any

from sqlalchemy import BigInteger, Boolean, Column, Connection, Index, LargeBinary, MetaData, Table, Text

VERSION_TABLE = "shardyard_history"
"""Of a history in SQLite."""

_TABLES = MetaData()
_Name = Text().with_variant(Text(collation="C"), "postgresql")


NONE = -1
"""In place of the id of a message: there is none. A null would not compare with ids."""


def _number(name: str, *, key: bool = False) -> Column[Any]:
    return Column(name, BigInteger, primary_key=key, autoincrement=False, nullable=False)


ENTRIES = Table(
    "history_entries",
    _TABLES,
    _number("id", key=True),
    Column("copy", Boolean, primary_key=True),
    Column("message", Boolean, nullable=False),  # neither a mark nor a copy
    Column("addressee", _Name, nullable=False),
    Column("sender", _Name, nullable=False),
    Column("topic", Text, nullable=False),
    _number("partition_index"),
    _number("epoch"),
    _number("offset"),
    Column("value", LargeBinary, nullable=False),  # as the log has it
)
IS_MESSAGE = ENTRIES.c.message.is_(True)
IS_ORIGINAL = ENTRIES.c.copy.is_(False)


def _entries_index(name: str, *columns: Column[Any], where: Any = None) -> None:
    Index(f"history_entries_{name}", *columns, sqlite_where=where, postgresql_where=where)


_entries_index("by_offset", ENTRIES.c.addressee, ENTRIES.c.epoch, ENTRIES.c.offset)
_entries_index("by_sender", ENTRIES.c.sender, ENTRIES.c.id, where=IS_ORIGINAL)
_entries_index("by_conversation", ENTRIES.c.addressee, ENTRIES.c.sender, ENTRIES.c.id, where=IS_MESSAGE)

CHATS = Table(
    "history_chats",
    _TABLES,
    Column("user_name", _Name, primary_key=True),
    Column("peer", _Name, primary_key=True),
    _number("last"),  # none while only marks are known
    _number("unread"),
    _number("seen"),
    _number("peer_delivered"),
    _number("peer_seen"),
    Index("history_chats_by_last", "user_name", "last"),
    sqlite_with_rowid=False,
)


_CHANNEL_TABLES = MetaData()

POSTS = Table(
    "history_posts",
    _CHANNEL_TABLES,
    Column("channel", _Name, primary_key=True),
    _number("id", key=True),
    Column("value", LargeBinary, nullable=False),  # as the log has it
)
MEMBERS = Table(
    "history_members",
    _CHANNEL_TABLES,
    Column("user_name", _Name, primary_key=True),
    Column("channel", _Name, primary_key=True),
    Column("joined", Boolean, nullable=False),  # a row stays when the user leaves: older changes must not undo that
    _number("epoch"),
    _number("offset"),
    sqlite_with_rowid=False,
)
IS_MEMBER = MEMBERS.c.joined.is_(True)
Index(
    "history_members_by_channel",
    MEMBERS.c.channel,
    MEMBERS.c.user_name,
    sqlite_where=IS_MEMBER,
    postgresql_where=IS_MEMBER,
)


def _create_version_1(connection: Connection) -> None:
    _TABLES.create_all(connection, checkfirst=False)


def _add_channels(connection: Connection) -> None:
    _CHANNEL_TABLES.create_all(connection, checkfirst=False)


MIGRATIONS: list[Callable[[Connection], None]] = [_create_version_1, _add_channels]
"""Number i brings the schema from version i to i + 1. Entries are only ever added. A table that a later one changes has
to be created by the first as it was."""
