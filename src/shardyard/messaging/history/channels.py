"""Posts and memberships in an SQL database: what storing them does, and their queries."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from sqlalchemy import Connection, and_, or_, select
from sqlalchemy.dialects import postgresql, sqlite

from shardyard.messaging.history.channel_port import (
    ChannelHistory,
    ChannelPost,
    MemberChange,
    MemberPage,
    PostPage,
)
from shardyard.messaging.history.checks import check_change, check_post
from shardyard.messaging.history.schema import IS_MEMBER, MEMBERS, POSTS
from shardyard.messaging.history.writing import RunEach
from shardyard.model import whole_number
from shardyard.model.checks import check_text
from shardyard.wire.channels import ChannelEvent, decode_event, encode_event
from shardyard.wire.messaging import Posted

T = TypeVar("T")

USERS_PER_QUERY = 500
"""Databases limit the parameters of a statement."""
_MAX_ID = 2**63 - 1


@dataclass(frozen=True, slots=True)
class ChannelRecords:
    """What is stored together."""

    posts: Sequence[ChannelPost] = ()
    changes: Sequence[MemberChange] = ()


class Store(Protocol):
    """Stores records of channels. Returns when they are durable."""

    async def __call__(self, records: ChannelRecords, /) -> None: ...


class Read(Protocol):
    """The result of a query."""

    async def __call__(self, work: Callable[[Connection], T], /) -> T: ...


class SqlChannels(ChannelHistory):
    """The part of a history in an SQL database that is about channels."""

    def __init__(self, store: Store, read: Read) -> None:
        self._store = store
        self._read = read

    async def store_posts(self, posts: Sequence[ChannelPost]) -> None:
        for post in posts:
            check_post(post)
        if posts:
            await self._store(ChannelRecords(posts=posts))

    async def store_changes(self, changes: Sequence[MemberChange]) -> None:
        for change in changes:
            check_change(change)
        if changes:
            await self._store(ChannelRecords(changes=changes))

    async def posts(self, channel: str, *, before: int | None = None, limit: int = 50) -> PostPage:
        check_text("channel", channel)
        whole_number("limit", limit, at_least=1)
        return await self._read(lambda db: posts(db, channel, before, limit))

    async def channels_of(self, users: Sequence[str]) -> Mapping[str, set[str]]:
        for user in users:
            check_text("user", user)
        found: dict[str, set[str]] = {}
        for first in range(0, len(users), USERS_PER_QUERY):
            some = users[first : first + USERS_PER_QUERY]
            for user, channel in await self._read(lambda db, some=some: channels_of(db, some)):  # type: ignore[misc]
                found.setdefault(user, set()).add(channel)
        return found

    async def members_of(self, channel: str, *, after: str = "", limit: int = 50) -> MemberPage:
        check_text("channel", channel)
        if after:
            check_text("after", after)
        whole_number("limit", limit, at_least=1)
        return await self._read(lambda db: members_of(db, channel, after, limit))


def posted(channel: str, event: ChannelEvent, offset: int | None = None) -> Posted:
    """An event as clients get it."""
    return Posted(str(event.id), channel, event.sender, event.text, event.at, offset)


# Storing, in one transaction. Rows are written in the order of their keys, as in `writing`.


def store(connection: Connection, records: Iterable[ChannelRecords], run_each: RunEach) -> None:
    """Store posts that are not stored yet, and changes that are newer than what is stored."""
    by_id: dict[tuple[str, int], ChannelPost] = {}
    newest: dict[tuple[str, str], MemberChange] = {}
    for each in records:
        for post in each.posts:
            by_id.setdefault((post.channel, post.event.id), post)
        for change in each.changes:
            last = newest.get((change.user, change.channel))
            if last is None or (last.epoch, last.offset) < (change.epoch, change.offset):
                newest[change.user, change.channel] = change
    dialect = connection.dialect.name
    if by_id:
        ordered = [by_id[key] for key in sorted(by_id)]
        rows = [{"channel": p.channel, "id": p.event.id, "value": encode_event(p.event)} for p in ordered]
        run_each(connection, _INSERT_POST[dialect], rows)
    if newest:
        changes = [newest[key] for key in sorted(newest)]
        run_each(
            connection,
            _CHANGE_MEMBER[dialect],
            [
                {"user_name": c.user, "channel": c.channel, "joined": c.joined, "epoch": c.epoch, "offset": c.offset}
                for c in changes
            ],
        )


_INSERT_POST = {
    dialect.dialect.name: dialect.insert(POSTS).on_conflict_do_nothing().returning(POSTS.c.id)
    for dialect in (sqlite, postgresql)
}


def _change_member(insert: Any) -> Any:
    new, old = insert.excluded, MEMBERS.c
    changed = insert.on_conflict_do_update(
        index_elements=[old.user_name, old.channel],
        set_={"joined": new.joined, "epoch": new.epoch, "offset": new.offset},
        where=or_(new.epoch > old.epoch, and_(new.epoch == old.epoch, new.offset > old.offset)),
    )
    return changed.returning(old.epoch)


_CHANGE_MEMBER = {dialect.dialect.name: _change_member(dialect.insert(MEMBERS)) for dialect in (sqlite, postgresql)}


# Queries. Each reads as many rows of an index as it returns, and one more.


def posts(connection: Connection, channel: str, before: int | None, limit: int) -> PostPage:
    """See `ChannelHistory.posts`."""
    upto = _MAX_ID if before is None else min(before - 1, _MAX_ID)
    wanted = (
        select(POSTS.c.value)
        .where(POSTS.c.channel == channel, POSTS.c.id <= upto)
        .order_by(POSTS.c.id.desc())
        .limit(limit + 1)
    )
    rows = connection.execute(wanted).all()
    return PostPage([posted(channel, decode_event(row.value)) for row in rows[:limit]], len(rows) > limit)


def channels_of(connection: Connection, users: Sequence[str]) -> list[tuple[str, str]]:
    """See `ChannelHistory.channels_of`."""
    wanted = select(MEMBERS.c.user_name, MEMBERS.c.channel).where(IS_MEMBER, MEMBERS.c.user_name.in_(users))
    return [(row.user_name, row.channel) for row in connection.execute(wanted)]


def members_of(connection: Connection, channel: str, after: str, limit: int) -> MemberPage:
    """See `ChannelHistory.members_of`."""
    wanted = (
        select(MEMBERS.c.user_name)
        .where(IS_MEMBER, MEMBERS.c.channel == channel, MEMBERS.c.user_name > after)
        .order_by(MEMBERS.c.user_name)
        .limit(limit + 1)
    )
    rows = connection.execute(wanted).all()
    return MemberPage([row.user_name for row in rows[:limit]], len(rows) > limit)
