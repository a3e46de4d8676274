"""A history whose older messages are in the tables of the pipeline job `history`."""

from collections.abc import Sequence

from shardyard.messaging.history.channel_port import ChannelHistory
from shardyard.messaging.history.port import ChatList, History, Page, PlacedEntry
from shardyard.messaging.history.tables import HistoryTables


class LayeredHistory(History):
    """Pages go on in the tables where the database has no more. Everything else is the database's."""

    def __init__(self, database: History, tables: HistoryTables) -> None:
        self._database = database
        self._tables = tables

    @property
    def channels(self) -> ChannelHistory | None:
        return self._database.channels

    async def page(self, user: str, peer: str, *, before: int | None = None, limit: int = 50) -> Page:
        newer = await self._database.page(user, peer, before=before, limit=limit)
        if newer.more:
            return newer
        if newer.messages:
            before = int(newer.messages[-1].id)
        left = limit - len(newer.messages)
        older = await self._tables.page(user, peer, before=before, limit=left or 1)
        if not left:
            return Page(newer.messages, bool(older.messages))
        return Page([*newer.messages, *older.messages], older.more)

    async def store(self, entries: Sequence[PlacedEntry]) -> None:
        await self._database.store(entries)

    async def chats(self, user: str, *, before: int | None = None, limit: int = 50) -> ChatList:
        return await self._database.chats(user, before=before, limit=limit)

    async def addressed_to(self, user: str, epoch: int, first: int, end: int, limit: int) -> Sequence[PlacedEntry]:
        return await self._database.addressed_to(user, epoch, first, end, limit)

    async def sent_by(self, user: str, after: int, limit: int) -> Sequence[PlacedEntry]:
        return await self._database.sent_by(user, after, limit)
