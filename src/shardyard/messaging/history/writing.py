"""What storing entries does to the tables, in one transaction."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from sqlalchemy import Connection, Insert, bindparam, case, func, select, update
from sqlalchemy.dialects import postgresql, sqlite

from shardyard.messaging.history.port import PlacedEntry
from shardyard.messaging.history.schema import CHATS, ENTRIES, IS_MESSAGE, NONE
from shardyard.wire.inbox import InboxEntry, Mark, encode_entry

ChatKey = tuple[str, str]
"""A user, and the peer."""
Values = dict[str, Any]


class RunEach(Protocol):
    """See `Database.run_each`."""

    def __call__(
        self, connection: Connection, statement: Insert, rows: Sequence[Values], /
    ) -> list[tuple[Any, ...] | None]: ...


def store(connection: Connection, entries: Iterable[PlacedEntry], run_each: RunEach) -> None:
    """Store entries that are not stored yet, and what follows from them for chats.

    Rows are written in the order of their keys: then two processes that write the same ones wait for each other
    without a deadlock.
    """
    changes = _changes(_insert_new(connection, entries, run_each))
    if changes:
        _apply(connection, changes, run_each)


def _insert_new(connection: Connection, entries: Iterable[PlacedEntry], run_each: RunEach) -> list[InboxEntry]:
    """Insert the entries that are not stored yet, and return them."""
    by_key: dict[tuple[int, bool], PlacedEntry] = {}
    for placed in entries:
        by_key.setdefault((placed.entry.id, placed.entry.copy), placed)
    ordered = [by_key[key] for key in sorted(by_key)]
    inserted = run_each(connection, _INSERT_ENTRY[connection.dialect.name], [_row(placed) for placed in ordered])
    return [placed.entry for placed, row in zip(ordered, inserted, strict=True) if row is not None]


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


@dataclass(slots=True)
class _Change:
    """What new entries change in a chat."""

    last: int = NONE
    incoming: list[int] = field(default_factory=list)
    """Messages of the peer."""
    seen: int = NONE
    peer_delivered: int = NONE
    peer_seen: int = NONE


def _changes(entries: Iterable[InboxEntry]) -> dict[ChatKey, _Change]:
    changes: dict[ChatKey, _Change] = {}
    for entry in entries:
        if entry.copy:
            continue
        own = changes.setdefault((entry.sender, entry.recipient), _Change())
        peers = changes.setdefault((entry.recipient, entry.sender), _Change())
        match entry.content:
            case Mark(kind="seen", upto=upto):
                own.seen = max(own.seen, upto)
                peers.peer_seen = max(peers.peer_seen, upto)
            case Mark(upto=upto):
                peers.peer_delivered = max(peers.peer_delivered, upto)
            case _:
                own.last = max(own.last, entry.id)
                peers.last = max(peers.last, entry.id)
                if entry.sender != entry.recipient:  # one's own message is not unread
                    peers.incoming.append(entry.id)
    return changes


def _apply(connection: Connection, changes: dict[ChatKey, _Change], run_each: RunEach) -> None:
    """Change the chats. Where a mark advanced, or comes before its messages, unread messages are counted anew: there
    are few then. That is a statement of its own, when the row is locked, because it must see what others have
    committed until then."""
    ordered = sorted(changes.items(), key=lambda item: item[0])
    rows: list[Values] = [
        {
            "user_name": user,
            "peer": peer,
            "last": change.last,
            "unread": len(change.incoming),
            "seen": change.seen,
            "peer_delivered": change.peer_delivered,
            "peer_seen": change.peer_seen,
        }
        for (user, peer), change in ordered
    ]
    changed = run_each(connection, _CHANGE_CHAT[connection.dialect.name], rows)
    uncertain = []
    for ((user, peer), change), row in zip(ordered, changed, strict=True):
        (seen,) = cast(tuple[int], row)
        if user != peer and (change.seen > NONE or any(id_ <= seen for id_ in change.incoming)):
            uncertain.append({"of_user": user, "of_peer": peer})
    if uncertain:
        connection.execute(_COUNT_UNREAD, uncertain)


_INSERT_ENTRY = {
    dialect.dialect.name: dialect.insert(ENTRIES).on_conflict_do_nothing().returning(ENTRIES.c.id)
    for dialect in (sqlite, postgresql)
}
"""By the name of the database's dialect, as all statements that are not the same for all."""


def _change_chat(insert: Any) -> Any:
    new = insert.excluded
    advanced = {
        name: case((new[name] > CHATS.c[name], new[name]), else_=CHATS.c[name])  # marks never go backwards
        for name in ("last", "seen", "peer_delivered", "peer_seen")
    }
    changed = insert.on_conflict_do_update(
        index_elements=[CHATS.c.user_name, CHATS.c.peer], set_={**advanced, "unread": CHATS.c.unread + new.unread}
    )
    return changed.returning(CHATS.c.seen)


_CHANGE_CHAT = {dialect.dialect.name: _change_chat(dialect.insert(CHATS)) for dialect in (sqlite, postgresql)}

_COUNT_UNREAD = (
    update(CHATS)
    .where(CHATS.c.user_name == bindparam("of_user"), CHATS.c.peer == bindparam("of_peer"))
    .values(
        unread=select(func.count())
        .select_from(ENTRIES)
        .where(IS_MESSAGE, ENTRIES.c.addressee == bindparam("of_user"), ENTRIES.c.sender == bindparam("of_peer"))
        .where(ENTRIES.c.id > CHATS.c.seen)
        .correlate(CHATS)
        .scalar_subquery()
    )
)
