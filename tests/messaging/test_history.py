"""The contract of a history, for every engine."""

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from shardyard.messaging.history import History, PlacedEntry, open_history
from shardyard.model import Closed, InvalidValue, Partition
from shardyard.wire.inbox import InboxEntry, Mark
from tests.messaging.history_model import HistoryModel, mark, message, placed

Run = Callable[[Callable[[History], Coroutine[Any, Any, None]]], None]
"""Runs a scenario with an open history. What one scenario stores, the next one of the same test finds."""


@pytest.fixture(params=["memory", "sqlite", pytest.param("postgresql", marks=pytest.mark.server)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgresql":
        database: str = request.getfixturevalue("postgresql_url")
        return database
    return "memory://" if request.param == "memory" else f"sqlite:///{tmp_path / 'new' / 'history.db'}"


@pytest.fixture
def run(url: str) -> Iterator[Run]:
    manager = open_history(url)
    with asyncio.Runner() as runner:
        history = runner.run(manager.__aenter__())
        yield lambda scenario: runner.run(scenario(history))
        runner.run(manager.__aexit__(None, None, None))


async def paged(history: History, user: str, peer: str, limit: int) -> list[str]:
    """The texts of a conversation, newest first, page by page to the end."""
    texts: list[str] = []
    before: int | None = None
    while True:
        page = await history.page(user, peer, before=before, limit=limit)
        texts += [m.text for m in page.messages]
        if not page.more:
            return texts
        assert len(page.messages) == limit
        before = int(page.messages[-1].id)


def test_a_page_has_the_newest_messages_of_both_directions_first(run: Run) -> None:
    async def scenario(history: History) -> None:
        await history.store(
            placed(message(1, "a", "b", "one"), message(2, "b", "a", "two"), message(3, "a", "c", "no"))
        )
        page = await history.page("b", "a")
        assert [(m.id, m.sender, m.recipient, m.text, m.at) for m in page.messages] == [
            ("2", "b", "a", "two", 1_700_000_000_002),
            ("1", "a", "b", "one", 1_700_000_000_001),
        ]
        assert not page.more
        assert page == await history.page("a", "b")

    run(scenario)


def test_a_conversation_paged_to_its_end_has_each_message_once(run: Run) -> None:
    async def scenario(history: History) -> None:
        sent = [message(id_, "ab"[id_ % 3 == 0], "ba"[id_ % 3 == 0], str(id_)) for id_ in range(1, 11)]
        await history.store(placed(*sent))
        for limit in (1, 2, 3, 5, 10, 11):
            assert await paged(history, "a", "b", limit) == [str(id_) for id_ in range(10, 0, -1)]

    run(scenario)


def test_a_conversation_that_nobody_began_is_empty(run: Run) -> None:
    async def scenario(history: History) -> None:
        assert await history.page("a", "b") == HistoryModel().page("a", "b", None, 50)
        assert await history.chats("a") == HistoryModel().chats("a", None, 50)
        assert await history.addressed_to("a", 1, 0, 100, 100) == []
        assert await history.sent_by("a", 0, 100) == []

    run(scenario)


def test_storing_an_entry_again_changes_nothing_not_even_from_another_place(run: Run) -> None:
    async def scenario(history: History) -> None:
        entry = message(1, "a", "b", "first")
        again = structs.replace(entry, content="second")
        await history.store(placed(entry, again))
        await history.store(placed(again, first=7))
        assert [m.text for m in (await history.page("a", "b")).messages] == ["first"]
        assert (await history.chats("b")).chats[0].unread == 1
        assert await history.addressed_to("b", 1, 0, 100, 100) == placed(entry)

    run(scenario)


def test_copies_are_only_among_what_is_addressed_to_their_sender(run: Run) -> None:
    async def scenario(history: History) -> None:
        copy = message(1, "a", "b", copy=True)
        await history.store(placed(copy, mark(2, "a", "b", "seen", 9, copy=True)))
        assert (await history.page("a", "b")).messages == []
        assert (await history.chats("a")).chats == (await history.chats("b")).chats == []
        assert await history.sent_by("a", 0, 100) == []
        assert [each.entry.id for each in await history.addressed_to("a", 1, 0, 100, 100)] == [1, 2]
        assert await history.addressed_to("b", 1, 0, 100, 100) == []
        await history.store(placed(structs.replace(copy, copy=False), first=5))
        assert len((await history.page("a", "b")).messages) == 1
        assert (await history.chats("b")).chats[0].unread == 1

    run(scenario)


def test_a_chat_has_its_last_message_and_what_is_unread_delivered_and_seen(run: Run) -> None:
    async def scenario(history: History) -> None:
        await history.store(placed(*(message(id_, "a", "b") for id_ in range(1, 6)), message(6, "b", "a")))
        await history.store(placed(mark(7, "b", "a", "delivered", 4), mark(8, "b", "a", "seen", 2), first=6))
        (of_a,), (of_b,) = [(await history.chats(user)).chats for user in "ab"]
        assert (of_a.peer, of_a.last.id, of_a.unread, of_a.seen) == ("b", "6", 1, None)
        assert (of_a.peer_delivered, of_a.peer_seen) == ("4", "2")
        assert (of_b.peer, of_b.last.id, of_b.unread, of_b.seen) == ("a", "6", 3, "2")
        assert (of_b.peer_delivered, of_b.peer_seen) == (None, None)

    run(scenario)


def test_marks_never_go_backwards(run: Run) -> None:
    async def scenario(history: History) -> None:
        await history.store(placed(*(message(id_, "a", "b") for id_ in range(1, 6))))
        for id_, upto in enumerate((4, 2, 3), 10):
            await history.store(placed(mark(id_, "b", "a", "seen", upto), mark(id_ + 10, "b", "a", "delivered", upto)))
        (of_a,), (of_b,) = [(await history.chats(user)).chats for user in "ab"]
        assert (of_a.peer_delivered, of_a.peer_seen, of_b.seen, of_b.unread) == ("4", "4", "4", 1)

    run(scenario)


def test_marks_may_be_stored_before_the_messages_they_are_about(run: Run) -> None:
    async def scenario(history: History) -> None:
        await history.store(placed(mark(9, "b", "a", "seen", 2)))
        assert (await history.chats("a")).chats == (await history.chats("b")).chats == []
        await history.store(placed(*(message(id_, "a", "b") for id_ in range(1, 4)), first=1))
        (of_b,) = (await history.chats("b")).chats
        assert (of_b.unread, of_b.seen) == (1, "2")

    run(scenario)


def test_a_message_to_oneself_is_in_ones_own_conversation_once_and_never_unread(run: Run) -> None:
    async def scenario(history: History) -> None:
        await history.store(placed(message(1, "a", "a", "note"), message(1, "a", "a", "note", copy=True)))
        assert await paged(history, "a", "a", 1) == ["note"]
        (chat,) = (await history.chats("a")).chats
        assert (chat.peer, chat.unread) == ("a", 0)
        await history.store(placed(mark(2, "a", "a", "seen", 1), message(3, "a", "a"), first=2))
        (chat,) = (await history.chats("a")).chats
        assert (chat.unread, chat.seen, chat.peer_seen, chat.last.id) == (0, "1", "1", "3")
        assert len(await history.addressed_to("a", 1, 0, 100, 100)) == 4

    run(scenario)


def test_chats_are_paged_by_their_last_messages(run: Run) -> None:
    async def scenario(history: History) -> None:
        await history.store(placed(*(message(id_, f"peer {id_ % 5}", "a") for id_ in range(1, 13))))
        first = await history.chats("a", limit=2)
        assert ([int(chat.last.id) for chat in first.chats], first.more) == ([12, 11], True)
        rest = await history.chats("a", before=11, limit=3)
        assert ([int(chat.last.id) for chat in rest.chats], rest.more) == ([10, 9, 8], False)

    run(scenario)


def test_what_is_addressed_to_a_user_is_found_by_epoch_and_offset(run: Run) -> None:
    async def scenario(history: History) -> None:
        entries = [
            message(1, "a", "b"),
            mark(2, "a", "b", "seen", 9),
            message(3, "b", "c", copy=True),
            message(4, "a", "c"),
        ]
        await history.store(placed(*entries, first=10))
        later = [PlacedEntry(Partition("inbox-2", 7), 2, 11, message(5, "a", "b"))]
        await history.store(later)
        stored = placed(*entries, first=10)
        assert await history.addressed_to("b", 1, 10, 100, 100) == stored[:3]
        assert await history.addressed_to("b", 1, 11, 12, 100) == stored[1:2]
        assert await history.addressed_to("b", 1, 0, 100, 2) == stored[:2]
        assert await history.addressed_to("b", 2, 0, 100, 100) == later

    run(scenario)


def test_what_a_user_sent_is_found_by_id(run: Run) -> None:
    async def scenario(history: History) -> None:
        entries = placed(message(3, "a", "b"), mark(1, "a", "b", "seen", 9), message(2, "a", "c"), message(4, "b", "a"))
        await history.store(entries)
        assert await history.sent_by("a", 0, 100) == [entries[1], entries[2], entries[0]]
        assert await history.sent_by("a", 1, 1) == [entries[2]]
        assert await history.sent_by("a", 2**64, 100) == []

    run(scenario)


def test_the_largest_ids_and_any_text_can_be_stored(run: Run) -> None:
    async def scenario(history: History) -> None:
        entry = message(2**63 - 1, "Ä\u2028 'b'", "%s\\", "NUL \0 and \U0001f600" * 500)
        await history.store(placed(structs.replace(entry, device="\0")))
        ((shown,), more) = (page := await history.page(entry.sender, entry.recipient, before=2**65)).messages, page.more
        assert (shown.text, shown.id, more) == (entry.content, str(2**63 - 1), False)

    run(scenario)


@pytest.mark.parametrize(
    "entry",
    [
        message(2**63, "a", "b"),
        message(1, "a\0", "b"),
        message(1, "a", ""),
        message(1, "a", "\ud800"),
        mark(1, "a", "b", "seen", 2**63),
    ],
    ids=["large id", "NUL in a name", "empty name", "half a character", "large mark"],
)
def test_an_entry_that_cannot_be_stored_is_refused_with_all_others_of_the_call(run: Run, entry: InboxEntry) -> None:
    async def scenario(history: History) -> None:
        with pytest.raises(InvalidValue):
            await history.store(placed(message(5, "a", "b"), entry))
        assert (await history.page("a", "b")).messages == []

    run(scenario)


def test_questions_that_make_no_sense_are_refused(run: Run) -> None:
    async def scenario(history: History) -> None:
        for question in (
            history.page("a", "b\0"),
            history.page("a", "b", limit=0),
            history.chats(""),
            history.addressed_to("a", 2**63, 0, 1, 1),
            history.sent_by("a", 0, -1),
        ):
            with pytest.raises(InvalidValue):
                await question

    run(scenario)


@pytest.mark.parametrize("url", ["sqlite", pytest.param("postgresql", marks=pytest.mark.server)], indirect=True)
def test_what_is_stored_is_there_after_the_history_is_opened_again(url: str) -> None:
    async def scenario() -> None:
        async with open_history(url) as history:
            await history.store(placed(message(1, "a", "b"), mark(2, "b", "a", "seen", 1)))
        async with open_history(url) as history:
            assert len((await history.page("a", "b")).messages) == 1
            assert (await history.chats("b")).chats[0].seen == "1"

    asyncio.run(scenario())


def test_a_closed_history_says_so(url: str) -> None:
    async def scenario() -> None:
        async with open_history(url) as history:
            pass
        for call in (history.store(placed(message(1, "a", "b"))), history.page("a", "b"), history.chats("a")):
            with pytest.raises(Closed):
                await call

    asyncio.run(scenario())


# Against the model

Stores = list[list[list[PlacedEntry]]]
"""The entries of calls of `store`, one after the other; those of one element at the same time."""

USERS = ["a", "b", "c"]


@st.composite
def stores(draw: st.DrawFn) -> Stores:
    """Messages and marks with ids from 1, shuffled, some of them several times, and copies of some."""
    contents = st.one_of(
        st.text(max_size=3), st.builds(Mark, st.sampled_from(["delivered", "seen"]), st.integers(1, 30))
    )
    drawn = st.tuples(st.sampled_from(USERS), st.sampled_from(USERS), contents, st.booleans())
    entries: list[PlacedEntry] = []
    for id_, (sender, recipient, content, mirrored) in enumerate(draw(st.lists(drawn, max_size=25)), 1):
        original = InboxEntry(id_, sender, recipient, "d", id_, id_, content)
        entries += placed(original, first=len(entries))
        if mirrored:
            entries += placed(structs.replace(original, copy=True), first=len(entries))
    repeated = draw(st.lists(st.sampled_from(entries), max_size=8)) if entries else []
    left = draw(st.permutations(entries + repeated))
    result: Stores = []
    while left:
        size, of_first = draw(st.integers(1, 12)), draw(st.integers(0, 12))
        taken, left = left[:size], left[size:]
        result.append([taken[:of_first], taken[of_first:]])
    return result


def shifted(each: PlacedEntry, by: int) -> PlacedEntry:
    """The same entry with another id and of other users."""
    entry, content = each.entry, each.entry.content
    if isinstance(content, Mark):
        content = structs.replace(content, upto=content.upto + by)
    users = {"sender": f"{entry.sender}{by}", "recipient": f"{entry.recipient}{by}"}
    return replace(each, entry=structs.replace(entry, id=entry.id + by, content=content, **users))


def test_pages_chats_unread_and_marks_are_those_of_the_model_in_whatever_order_entries_are_stored(run: Run) -> None:
    cases = itertools.count(0, 1000)
    """Each case has its own ids and users, so that one history does for all of them."""

    @given(stores(), st.integers(1, 4))
    def agree(drawn: Stores, limit: int) -> None:
        by = next(cases)
        moved = [[[shifted(each, by) for each in store] for store in together] for together in drawn]
        run(lambda history: compare(history, moved, [f"{user}{by}" for user in USERS], by, limit))

    agree()


async def compare(history: History, stores: Stores, users: list[str], by: int, limit: int) -> None:
    model = HistoryModel()
    for together in stores:
        await asyncio.gather(*(history.store(store) for store in together))
        for store in together:
            model.store(store)
    for user in users:
        before: int | None = None
        while True:
            chats = await history.chats(user, before=before, limit=limit)
            assert chats == model.chats(user, before, limit)
            if not chats.more:
                break
            before = int(chats.chats[-1].last.id)
        for peer in users:
            all_texts = [m.text for m in model.page(user, peer, None, 1000).messages]
            assert await paged(history, user, peer, limit) == all_texts
        for first, end, most in ((0, 100, 100), (10, 30, limit)):
            found = await history.addressed_to(user, 1, first, end, most)
            assert found == model.addressed_to(user, 1, first, end, most)
        for after, most in ((0, 100), (by + 10, limit)):
            assert await history.sent_by(user, after, most) == model.sent_by(user, after, most)
