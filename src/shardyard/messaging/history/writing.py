"""What storing entries does to the tables, in one transaction."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, Insert, Row, Table, bindparam, func, select, tuple_, update
from sqlalchemy.dialects import postgresql, sqlite

from shardyard.messaging.history.port import PlacedEntry
from shardyard.messaging.history.schema import CHATS, ENTRIES, IS_MESSAGE
from shardyard.wire.inbox import InboxEntry, Mark, encode_entry

ChatKey = tuple[str, str]
"""A user, and the peer."""
Values = dict[str, Any]

_KEYS_AT_ONCE = 500
"""Chats that one statement looks up."""

_UPDATE_CHAT = (
    update(CHATS)
    .where(CHATS.c.user_name == bindparam("of_user"), CHATS.c.peer == bindparam("of_peer"))
    .values({name: bindparam(f"new_{name}") for name in ("last", "unread", "seen", "peer_delivered", "peer_seen")})
)


def store(connection: Connection, entries: Iterable[PlacedEntry]) -> None:
    """Store entries that are not stored yet, and what follows from them for chats."""
    changes = _changes(_insert_new(connection, entries))
    if not changes:
        return
    rows = [_changed(connection, chat, changes[chat.user_name, chat.peer]) for chat in _locked(connection, changes)]
    connection.execute(_UPDATE_CHAT, rows)


def _insert_new(connection: Connection, entries: Iterable[PlacedEntry]) -> list[InboxEntry]:
    """Insert the entries that are not stored yet, and return them."""
    by_key: dict[tuple[int, bool], PlacedEntry] = {}
    for placed in entries:
        by_key.setdefault((placed.entry.id, placed.entry.copy), placed)
    if not by_key:
        return []
    # Sorted: two processes that store the same entries, or chats, wait for each other without a deadlock.
    rows = [_row(by_key[key]) for key in sorted(by_key)]
    statement = _insert_or_ignore(connection, ENTRIES).returning(ENTRIES.c.id, ENTRIES.c.copy)
    return [by_key[id_, copy].entry for id_, copy in connection.execute(statement, rows)]


def _row(placed: PlacedEntry) -> Values:
    entry = placed.entry
    return {
        "id": entry.id,
        "copy": entry.copy,
        "message": not entry.copy and not isinstance(entry.content, Mark),
        "addressee": entry.sender if entry.copy else entry.recipient,
        "sender": entry.sender,
        "topic": placed.partition.topic,
        "partition_index": placed.partition.index,
        "epoch": placed.epoch,
        "offset": placed.offset,
        "value": encode_entry(entry),
    }


def _insert_or_ignore(connection: Connection, table: Table) -> Insert:
    if connection.dialect.name == "postgresql":
        return postgresql.insert(table).on_conflict_do_nothing()
    return sqlite.insert(table).on_conflict_do_nothing()


@dataclass(slots=True)
class _Change:
    """What new entries change in a chat."""

    last: int | None = None
    incoming: list[int] = field(default_factory=list)
    """Messages of the peer."""
    seen: int | None = None
    peer_delivered: int | None = None
    peer_seen: int | None = None


def _changes(entries: Iterable[InboxEntry]) -> dict[ChatKey, _Change]:
    changes: dict[ChatKey, _Change] = {}
    for entry in entries:
        if entry.copy:
            continue
        own = changes.setdefault((entry.sender, entry.recipient), _Change())
        peers = changes.setdefault((entry.recipient, entry.sender), _Change())
        match entry.content:
            case Mark(kind="seen", upto=upto):
                own.seen = _later(own.seen, upto)
                peers.peer_seen = _later(peers.peer_seen, upto)
            case Mark(upto=upto):
                peers.peer_delivered = _later(peers.peer_delivered, upto)
            case _:
                own.last = _later(own.last, entry.id)
                peers.last = _later(peers.last, entry.id)
                if entry.sender != entry.recipient:  # one's own message is not unread
                    peers.incoming.append(entry.id)
    return changes


def _later(a: int | None, b: int | None) -> int | None:
    """The larger one; marks never go backwards."""
    if a is None or b is None:
        return b if a is None else a
    return max(a, b)


def _locked(connection: Connection, keys: Iterable[ChatKey]) -> list[Row[Any]]:
    """The rows of these chats, created if they do not exist, and locked until the end of the transaction: another
    process may store what the same chat's other user sent."""
    wanted = sorted(keys)
    found = _select_for_update(connection, wanted)
    missing = sorted({*wanted} - {(chat.user_name, chat.peer) for chat in found})
    if missing:
        blank = [{"user_name": user, "peer": peer, "unread": 0} for user, peer in missing]
        connection.execute(_insert_or_ignore(connection, CHATS), blank)
        found += _select_for_update(connection, missing)
    return found


def _select_for_update(connection: Connection, keys: Sequence[ChatKey]) -> list[Row[Any]]:
    rows: list[Row[Any]] = []
    for first in range(0, len(keys), _KEYS_AT_ONCE):
        those = tuple_(CHATS.c.user_name, CHATS.c.peer).in_(keys[first : first + _KEYS_AT_ONCE])
        ordered = select(CHATS).where(those).order_by(CHATS.c.user_name, CHATS.c.peer)
        rows += connection.execute(ordered.with_for_update())
    return rows


def _changed(connection: Connection, chat: Row[Any], change: _Change) -> Values:
    """The parameters of `_UPDATE_CHAT`."""
    seen = _later(chat.seen, change.seen)
    if seen == chat.seen:
        unread = chat.unread + sum(seen is None or id_ > seen for id_ in change.incoming)
    else:
        unread = _count_unread(connection, chat.user_name, chat.peer, seen)
    return {
        "of_user": chat.user_name,
        "of_peer": chat.peer,
        "new_last": _later(chat.last, change.last),
        "new_unread": unread,
        "new_seen": seen,
        "new_peer_delivered": _later(chat.peer_delivered, change.peer_delivered),
        "new_peer_seen": _later(chat.peer_seen, change.peer_seen),
    }


def _count_unread(connection: Connection, user: str, peer: str, seen: int | None) -> int:
    """Count anew, after the mark has advanced: then there are few."""
    if user == peer:
        return 0
    unseen = (IS_MESSAGE, ENTRIES.c.addressee == user, ENTRIES.c.sender == peer, ENTRIES.c.id > seen)
    return connection.execute(select(func.count()).select_from(ENTRIES).where(*unseen)).scalar_one()
