"""Pages that begin in the database and go on in the tables of the pipeline."""

import asyncio
from collections.abc import Sequence
from typing import cast

import pytest

from shardyard.messaging.history import Page, PlacedEntry, open_history
from shardyard.messaging.history.layered import LayeredHistory
from shardyard.messaging.history.tables import HistoryTables
from shardyard.model import Partition
from shardyard.wire.inbox import InboxEntry
from shardyard.wire.messaging import Message


class Tables:
    """The pages of tables with these messages from alice to bob; what they are made of is tested with the pipeline."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = sorted(ids, reverse=True)

    async def page(self, user: str, peer: str, *, before: int | None = None, limit: int = 50) -> Page:
        assert {user, peer} == {"alice", "bob"}
        found = [id_ for id_ in self._ids if before is None or id_ < before]
        return Page([Message(str(id_), "alice", "bob", "old", 0) for id_ in found[:limit]], len(found) > limit)


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 7, 50])
def test_pages_to_the_end_have_every_message_once_whether_database_or_tables_have_it(limit: int) -> None:
    asyncio.run(page_to_the_end(limit))


async def page_to_the_end(limit: int) -> None:
    async with open_history("memory://") as database:
        recent = [InboxEntry(id_, "alice", "bob", "d", id_, 0, "new") for id_ in range(6, 12)]
        await database.store([PlacedEntry(Partition("inbox", 0), 1, entry.id, entry) for entry in recent])
        history = LayeredHistory(database, cast(HistoryTables, Tables(range(1, 9))))
        seen: list[int] = []
        before, more = None, True
        while more:
            page = await history.page("bob", "alice", before=before, limit=limit)
            assert len(page.messages) <= limit
            seen += [int(message.id) for message in page.messages]
            before, more = seen[-1], page.more
        assert seen == list(range(11, 0, -1))
