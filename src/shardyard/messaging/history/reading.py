"""The queries of a history. Each reads as many rows of an index as it returns, and one more."""

from collections.abc import Iterable, Sequence
from typing import Any, cast

from sqlalchemy import Connection, Row, Select, select, union_all

from shardyard.messaging.history.port import ChatList, Page, PlacedEntry
from shardyard.messaging.history.schema import CHATS, ENTRIES, IS_MESSAGE, IS_ORIGINAL, NONE
from shardyard.model import Partition
from shardyard.wire.inbox import decode_entry
from shardyard.wire.messaging import Chat, Message

_MAX_ID = 2**63 - 1


def page(connection: Connection, user: str, peer: str, before: int | None, limit: int) -> Page:
    """See `History.page`."""
    directions = {(user, peer), (peer, user)}  # one, of messages to oneself
    newest = [_messages(addressee, sender, before, limit + 1).subquery() for addressee, sender in directions]
    both = union_all(*(select(each) for each in newest)).subquery()
    rows = connection.execute(select(both.c.value).order_by(both.c.id.desc()).limit(limit + 1)).all()
    return Page([_message(row.value) for row in rows[:limit]], len(rows) > limit)


def _messages(addressee: str, sender: str, before: int | None, limit: int) -> Select[Any]:
    return (
        select(ENTRIES.c.id, ENTRIES.c.value)
        .where(IS_MESSAGE, ENTRIES.c.addressee == addressee, ENTRIES.c.sender == sender)
        .where(ENTRIES.c.id <= _upto(before))
        .order_by(ENTRIES.c.id.desc())
        .limit(limit)
    )


def chats(connection: Connection, user: str, before: int | None, limit: int) -> ChatList:
    """See `History.chats`."""
    wanted = (
        select(CHATS, ENTRIES.c.value)
        .join(ENTRIES, (ENTRIES.c.id == CHATS.c.last) & IS_ORIGINAL)
        .where(CHATS.c.user_name == user, CHATS.c.last > NONE, CHATS.c.last <= _upto(before))
        .order_by(CHATS.c.last.desc())
        .limit(limit + 1)
    )
    rows = connection.execute(wanted).all()
    return ChatList([_chat(row) for row in rows[:limit]], len(rows) > limit)


def addressed_to(
    connection: Connection, user: str, epoch: int, first: int, end: int, limit: int
) -> Sequence[PlacedEntry]:
    """See `History.addressed_to`."""
    wanted = (
        select(ENTRIES)
        .where(ENTRIES.c.addressee == user, ENTRIES.c.epoch == epoch)
        .where(ENTRIES.c.offset >= first, ENTRIES.c.offset < end)
        .order_by(ENTRIES.c.offset)
        .limit(limit)
    )
    return _placed(connection.execute(wanted))


def sent_by(connection: Connection, user: str, after: int, limit: int) -> Sequence[PlacedEntry]:
    """See `History.sent_by`."""
    wanted = (
        select(ENTRIES)
        .where(IS_ORIGINAL, ENTRIES.c.sender == user, ENTRIES.c.id > min(after, _MAX_ID))
        .order_by(ENTRIES.c.id)
        .limit(limit)
    )
    return _placed(connection.execute(wanted))


def _upto(before: int | None) -> int:
    return _MAX_ID if before is None else min(before - 1, _MAX_ID)


def _message(value: bytes) -> Message:
    entry = decode_entry(value)
    return Message(str(entry.id), entry.sender, entry.recipient, cast(str, entry.content), entry.at)


def _chat(row: Row[Any]) -> Chat:
    return Chat(
        row.peer,
        _message(row.value),
        row.unread,
        _id(row.seen),
        _id(row.peer_delivered),
        _id(row.peer_seen),
    )


def _id(number: int) -> str | None:
    return None if number == NONE else str(number)


def _placed(rows: Iterable[Row[Any]]) -> list[PlacedEntry]:
    return [
        PlacedEntry(Partition(row.topic, row.partition_index), row.epoch, row.offset, decode_entry(row.value))
        for row in rows
    ]
