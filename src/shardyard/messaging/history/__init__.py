"""The history of conversations: who said what to whom, and who has seen it.

Importing this package loads no engine: `open_history` loads the one that the URL names.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from shardyard.messaging.history.channel_port import ChannelHistory, ChannelPost, MemberChange, MemberPage, PostPage
from shardyard.messaging.history.port import ChatList, History, Page, PlacedEntry
from shardyard.model.extras import require
from shardyard.model.url import EngineUrl, parse_url

if TYPE_CHECKING:
    from shardyard.messaging.history.sql import SqlHistory

__all__ = [
    "ChannelHistory",
    "ChannelPost",
    "ChatList",
    "History",
    "MemberChange",
    "MemberPage",
    "Page",
    "PlacedEntry",
    "PostPage",
    "open_history",
]


@asynccontextmanager
async def open_history(url: str) -> AsyncIterator[History]:
    """The history at `url`, created if it does not exist, and closed at the end of the block.

    `sqlite:///data/history.db` is relative to the working directory, `sqlite:////data/history.db` is absolute;
    `postgresql://user:password@host/database` is for several machines; `memory://` lasts as long as the block.
    """
    parsed = parse_url("history", url)
    require("server", "open_history", "sqlalchemy")
    if parsed.engine == "postgresql":
        require("postgresql", "a history at postgresql://")
    history = await asyncio.to_thread(_opened, parsed)
    try:
        yield history
    finally:
        await asyncio.to_thread(history.close)


def _opened(url: EngineUrl) -> "SqlHistory":
    from shardyard.messaging.history.sql import SqlHistory  # noqa: PLC0415 only the engine that is used is loaded

    if url.engine == "postgresql":
        from shardyard.messaging.history.postgresql import PostgresqlDatabase  # noqa: PLC0415 likewise

        return SqlHistory(PostgresqlDatabase(url))
    from shardyard.messaging.history.sqlite import SqliteDatabase  # noqa: PLC0415 likewise

    return SqlHistory(SqliteDatabase(url.path or None))
