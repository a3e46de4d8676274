"""The history in an SQL database. What differs between databases is in their `Database`."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol, TypeVar

from sqlalchemy import Connection, Insert

from shardyard.messaging.history import channels, reading, writing
from shardyard.messaging.history.channel_port import ChannelHistory
from shardyard.messaging.history.channels import ChannelRecords, SqlChannels
from shardyard.messaging.history.checks import check_storable
from shardyard.messaging.history.port import ChatList, History, Page, PlacedEntry
from shardyard.messaging.history.writing import Values
from shardyard.model import Closed, whole_number
from shardyard.model.checks import check_int64, check_text
from shardyard.runtime.group_commit import GroupCommit

T = TypeVar("T")

READERS = 3
"""Threads that read."""
CONNECTIONS = READERS + 1
"""One for each of them, and one that writes."""
_MOST_STORES = 32
"""Calls of `store` that share a transaction."""


class Database(Protocol):
    """A database with the tables of a history, as far as databases differ. It raises the database's errors as ours."""

    def read(self, work: Callable[[Connection], T]) -> T:
        """The result of `work`, which only reads, on one state of the database. `work` may run twice."""
        ...

    def write(self, work: Callable[[Connection], T]) -> T:
        """The result of `work`, in a transaction that is durable on return. `work` may run twice, but is committed
        once."""
        ...

    def run_each(
        self, connection: Connection, statement: Insert, rows: Sequence[Values], /
    ) -> list[tuple[Any, ...] | None]:
        """Run `statement`, which inserts one row and returns one or none, for each of the rows. Returns what it
        returned for each.

        Every entry takes three of them, so it is worth the shortest way to the driver: SQLAlchemy takes longer to pass
        a row on than the database to store it.
        """
        ...

    def close(self) -> None: ...


class SqlHistory(History):
    """A history in `database`, which it closes. A few threads read, and one writes."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="shardyard-history-reader")
        self._writer: GroupCommit[Sequence[PlacedEntry] | ChannelRecords] = GroupCommit(
            "shardyard-history", self._carry_out, most=_MOST_STORES
        )
        self._channels = SqlChannels(self._write, self._query)
        self._closed = False

    @property
    def channels(self) -> ChannelHistory:
        return self._channels

    async def store(self, entries: Sequence[PlacedEntry]) -> None:
        for placed in entries:
            check_storable(placed.entry)
        if entries or self._closed:
            await self._write(entries)

    async def page(self, user: str, peer: str, *, before: int | None = None, limit: int = 50) -> Page:
        check_text("peer", peer)
        return await self._read(user, limit, lambda db: reading.page(db, user, peer, before, limit))

    async def chats(self, user: str, *, before: int | None = None, limit: int = 50) -> ChatList:
        return await self._read(user, limit, lambda db: reading.chats(db, user, before, limit))

    async def addressed_to(self, user: str, epoch: int, first: int, end: int, limit: int) -> Sequence[PlacedEntry]:
        for name, number in {"epoch": epoch, "first": first, "end": end}.items():
            check_int64(name, number)
        return await self._read(user, limit, lambda db: reading.addressed_to(db, user, epoch, first, end, limit))

    async def sent_by(self, user: str, after: int, limit: int) -> Sequence[PlacedEntry]:
        return await self._read(user, limit, lambda db: reading.sent_by(db, user, after, limit))

    def close(self) -> None:
        """Finish what is in progress, then release all resources."""
        self._closed = True
        self._writer.close()
        self._readers.shutdown()
        self._database.close()

    async def _read(self, user: str, limit: int, work: Callable[[Connection], T]) -> T:
        check_text("user", user)
        whole_number("limit", limit, at_least=1)
        return await self._query(work)

    async def _query(self, work: Callable[[Connection], T]) -> T:
        if self._closed:
            raise Closed("the history")
        return await asyncio.wrap_future(self._readers.submit(self._database.read, work))

    async def _write(self, records: Sequence[PlacedEntry] | ChannelRecords) -> None:
        if self._closed:
            raise Closed("the history")
        await self._writer.do(records)

    def _carry_out(self, stores: list[Sequence[PlacedEntry] | ChannelRecords]) -> list[None]:
        self._database.write(partial(self._store_all, stores=stores))
        return [None] * len(stores)

    def _store_all(self, connection: Connection, stores: list[Sequence[PlacedEntry] | ChannelRecords]) -> None:
        of_channels = [each for each in stores if isinstance(each, ChannelRecords)]
        entries = [placed for each in stores if not isinstance(each, ChannelRecords) for placed in each]
        if entries:
            writing.store(connection, entries, self._database.run_each)
        if of_channels:
            channels.store(connection, of_channels, self._database.run_each)
