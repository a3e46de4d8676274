"""The contract of the history of channels for every engine, and the upgrade of histories from before."""

import asyncio
import sqlite3
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import Connection, event

from shardyard.messaging.history import ChannelHistory, ChannelPost, MemberChange, PostPage, channels, open_history
from shardyard.messaging.history.layered import LayeredHistory
from shardyard.messaging.history.schema import MIGRATIONS, VERSION_TABLE
from shardyard.messaging.history.sqlite import SqliteDatabase
from shardyard.model import Closed, InvalidValue
from shardyard.runtime.sqlite import migrate
from shardyard.wire.channels import ChannelEvent
from tests.messaging.history_model import message, placed

Run = Callable[[Callable[[ChannelHistory], Coroutine[Any, Any, None]]], None]


@pytest.fixture(params=["memory", "sqlite", pytest.param("postgresql", marks=pytest.mark.server)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgresql":
        database: str = request.getfixturevalue("postgresql_url")
        return database
    return "memory://" if request.param == "memory" else f"sqlite:///{tmp_path / 'history.db'}"


@pytest.fixture
def run(url: str) -> Iterator[Run]:
    manager = open_history(url)
    with asyncio.Runner() as runner:
        history = runner.run(manager.__aenter__())
        assert history.channels is not None
        of_channels = history.channels
        yield lambda scenario: runner.run(scenario(of_channels))
        runner.run(manager.__aexit__(None, None, None))


def posted(channel: str, *ids: int) -> list[ChannelPost]:
    return [ChannelPost(channel, ChannelEvent(id_, "a", "phone", id_, 1000 + id_, f"m{id_}")) for id_ in ids]


def changed(channel: str, user: str, joined: bool, offset: int, epoch: int = 1) -> MemberChange:
    return MemberChange(channel, user, joined, epoch, offset)


def texts(page: PostPage) -> list[str]:
    return [each.text for each in page.posts]


def test_pages_have_the_newest_posts_of_one_channel_first(run: Run) -> None:
    async def scenario(history: ChannelHistory) -> None:
        await history.store_posts([*posted("news", 3, 1, 2), *posted("other", 1, 9)])
        page = await history.posts("news", limit=2)
        assert (texts(page), page.more) == (["m3", "m2"], True)
        first = page.posts[0]
        assert (first.id, first.channel, first.sender, first.at, first.offset) == ("3", "news", "a", 1003, None)
        page = await history.posts("news", before=2, limit=2)
        assert (texts(page), page.more) == (["m1"], False)
        assert texts(await history.posts("news", before=2**70)) == ["m3", "m2", "m1"]
        assert await history.posts("unknown") == PostPage([], False)

    run(scenario)


def test_a_post_is_stored_once_whatever_is_delivered_again(run: Run) -> None:
    async def scenario(history: ChannelHistory) -> None:
        again = ChannelPost("news", ChannelEvent(1, "b", "", 0, 5, "another text"))
        await history.store_posts([*posted("news", 1), again])
        await history.store_posts([again, *posted("news", 2, 1)])
        assert texts(await history.posts("news")) == ["m2", "m1"]
        await history.store_posts([])

    run(scenario)


def test_the_change_with_the_greatest_position_counts_in_any_order(run: Run) -> None:
    async def scenario(history: ChannelHistory) -> None:
        await history.store_changes([changed("news", "a", True, 1), changed("news", "a", False, 5)])
        await history.store_changes([changed("news", "a", True, 4)])  # by one that had lost the partition
        assert await history.channels_of(["a"]) == {}
        await history.store_changes([changed("news", "a", True, 0, epoch=2)])  # the topic was created anew
        await history.store_changes([changed("news", "a", False, 9)])
        assert await history.channels_of(["a"]) == {"a": {"news"}}
        await history.store_changes([])

    run(scenario)


def test_channels_of_many_users_and_members_of_a_channel_by_page(run: Run) -> None:
    async def scenario(history: ChannelHistory) -> None:
        users = [f"user{number:04}" for number in range(1_200)]
        await history.store_changes([changed("news", user, True, at) for at, user in enumerate(users)])
        await history.store_changes([changed("few", user, True, at) for at, user in enumerate(users[:3])])
        await history.store_changes([changed("news", users[1], False, 5_000)])
        found = await history.channels_of([*users, "nobody"])
        assert len(found) == 1_200
        assert (found[users[0]], found[users[1]], found[users[9]]) == ({"news", "few"}, {"few"}, {"news"})
        assert await history.channels_of([]) == {}
        page = await history.members_of("few", limit=2)
        assert (page.members, page.more) == (users[:2], True)
        page = await history.members_of("few", after=users[1])
        assert (page.members, page.more) == ([users[2]], False)
        assert (await history.members_of("news", limit=2)).members == [users[0], users[2]]

    run(scenario)


def test_what_no_database_can_take_is_refused(run: Run) -> None:
    async def scenario(history: ChannelHistory) -> None:
        for post in (ChannelPost("a\0b", ChannelEvent(1, "", "", 0, 0, "")), *posted("a", 2**63), *posted("a", -1)):
            with pytest.raises(InvalidValue):
                await history.store_posts([post])
        for change in (
            changed("a\0b", "u", True, 1),
            changed("a", "u\0", True, 1),
            changed("a", "u", True, 2**63),
            changed("a", "u", True, -1),
        ):
            with pytest.raises(InvalidValue):
                await history.store_changes([change])
        for call in (
            lambda: history.posts("a\0"),
            lambda: history.channels_of(["\ud800"]),
            lambda: history.members_of("a", after="\0"),
            lambda: history.posts("a", limit=0),
        ):
            with pytest.raises(InvalidValue):
                await call()

    run(scenario)


def test_a_closed_history_says_so() -> None:
    async def scenario() -> None:
        async with open_history("memory://") as history:
            of_channels = history.channels
        assert of_channels is not None
        with pytest.raises(Closed):
            await of_channels.store_posts(posted("a", 1))
        with pytest.raises(Closed):
            await of_channels.posts("a")

    asyncio.run(scenario())


@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.sampled_from("uv"), st.booleans(), st.integers(0, 5), st.integers(1, 2)),
        max_size=30,
    ),
    st.randoms(),
)
def test_any_order_of_changes_gives_the_same_members(rows: list[tuple[str, str, bool, int, int]], chance: Any) -> None:
    newest: dict[tuple[str, str], tuple[int, int]] = {}
    joined: dict[tuple[str, str, int, int], bool] = {}
    for channel, user, is_joined, offset, epoch in rows:
        key = (channel, user, epoch, offset)
        joined.setdefault(key, is_joined)  # a position has one change
        newest[channel, user] = max(newest.get((channel, user), (0, 0)), (epoch, offset))
    changes = [changed(c, u, joined[c, u, e, o], o, e) for c, u, _, o, e in rows]
    chance.shuffle(changes)
    expected: dict[str, set[str]] = {}
    for (channel, user), (epoch, offset) in newest.items():
        if joined[channel, user, epoch, offset]:
            expected.setdefault(user, set()).add(channel)

    async def scenario() -> None:
        async with open_history("memory://") as history:
            assert history.channels is not None
            for first in range(0, len(changes), 4):
                await history.channels.store_changes(changes[first : first + 4])
            assert await history.channels.channels_of(["u", "v"]) == expected

    asyncio.run(scenario())


def test_a_file_of_the_first_version_is_upgraded_and_keeps_what_it_has(tmp_path: Path) -> None:
    path = tmp_path / "history.db"

    async def store() -> None:
        async with open_history(f"sqlite:///{path}") as history:
            await history.store(placed(message(1, "a", "b", "from before")))

    asyncio.run(store())
    with sqlite3.connect(path) as connection:  # as version 1 left it
        for table in ("history_posts", "history_members"):
            connection.execute(f"DROP TABLE {table}")
        connection.execute(f"UPDATE {VERSION_TABLE} SET version = 1")
    connection.close()

    async def upgraded() -> None:
        async with open_history(f"sqlite:///{path}") as history:
            assert [m.text for m in (await history.page("a", "b")).messages] == ["from before"]
            assert history.channels is not None
            await history.channels.store_posts(posted("news", 1))
            await history.channels.store_changes([changed("news", "a", True, 1)])
            assert texts(await history.channels.posts("news")) == ["m1"]
            assert LayeredHistory(history, Any).channels is history.channels  # type: ignore[arg-type]

    asyncio.run(upgraded())
    asyncio.run(upgraded())


@pytest.mark.server
def test_a_postgresql_schema_of_the_first_version_is_upgraded(postgresql_url: str, monkeypatch: Any) -> None:
    async def store() -> None:
        async with open_history(postgresql_url) as history:
            await history.store(placed(message(1, "a", "b", "from before")))

    with monkeypatch.context() as patched:
        patched.setattr("shardyard.messaging.history.postgresql.MIGRATIONS", MIGRATIONS[:1])
        asyncio.run(store())

    async def upgraded() -> None:
        async with open_history(postgresql_url) as history:
            assert [m.text for m in (await history.page("a", "b")).messages] == ["from before"]
            assert history.channels is not None
            await history.channels.store_posts(posted("news", 1))
            assert texts(await history.channels.posts("news")) == ["m1"]

    asyncio.run(upgraded())


def test_the_first_migration_creates_the_first_version_only() -> None:
    database = SqliteDatabase(None)
    try:

        def tables(connection: Connection) -> set[str]:
            names = connection.exec_driver_sql("SELECT name FROM sqlite_master WHERE type = 'table'")
            return {row[0] for row in names}

        def again(connection: Connection) -> set[str]:
            for name in tables(connection) - {"sqlite_sequence"}:
                connection.exec_driver_sql(f"DROP TABLE {name}")
            migrate(connection, "here", VERSION_TABLE, MIGRATIONS[:1])
            return tables(connection)

        assert database.write(again) == {VERSION_TABLE, "history_entries", "history_chats"}
    finally:
        database.close()


@pytest.mark.parametrize(
    "query",
    [
        lambda db: channels.posts(db, "a", 5, 10),
        lambda db: channels.channels_of(db, ["a", "b"]),
        lambda db: channels.members_of(db, "a", "b", 10),
    ],
    ids=["posts", "channels_of", "members_of"],
)
def test_a_query_reads_an_index_in_its_order(tmp_path: Path, query: Callable[[Connection], object]) -> None:
    def plan(db: Connection) -> list[str]:
        sent: list[tuple[str, Any]] = []
        event.listen(db, "before_cursor_execute", lambda *args: sent.append((args[2], args[3])))
        query(db)
        ((statement, parameters),) = sent
        return [row[3] for row in db.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)]

    database = SqliteDatabase(tmp_path / "history.db")
    try:
        steps = database.read(plan)
    finally:
        database.close()
    assert all(step.startswith("SEARCH") for step in steps if "history_" in step), steps
    assert not any("TEMP B-TREE" in step for step in steps), steps
