"""`Channels`: memberships, events and presence by a program that has the log."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from shardyard.fanout.channels import BATCH_ROWS, Channels, partition_of
from shardyard.fanout.event_ids import EventIds, ms_of
from shardyard.fanout.topics import WrongPlacement
from shardyard.log import Log
from shardyard.log.memory import MemoryLog
from shardyard.messaging import snowflakes
from shardyard.model import InvalidValue, Partition, Record, TooLarge
from shardyard.runtime.clock import ManualClock
from shardyard.wire.channels import EVENTS, MEMBERS, PRESENCE, decode_event
from tests.queues.engines import ENGINES

LONG = "x" * 129


def run(work: Callable[[Log, Channels], Awaitable[None]], folder: Path | None = None, engine: str = "memory") -> None:
    async def whole() -> None:
        async with MemoryLog() if folder is None else ENGINES[engine].log(folder) as log:
            await work(log, Channels(log))

    asyncio.run(whole())


async def records(log: Log, topic: str) -> list[tuple[int, bytes | None, bytes]]:
    """All records of a topic: partition, key, value."""
    found = []
    for partition in await log.topic(topic):
        batch = await log.read(partition, 0, max_records=1_000_000)
        found += [(partition.index, record.key, record.value) for record in batch.records()]
    return found


@pytest.mark.parametrize("engine", ["memory", "sqlite"])
def test_members_are_those_who_joined_and_have_not_left(tmp_path: Path, engine: str) -> None:
    async def work(log: Log, channels: Channels) -> None:
        await channels.join("ch_general", "alice")
        await channels.join("ch_general", "alice")
        await channels.join_many(["ch_general", "ch_dev", "ch_general"], ["bob", "bob", "carol"])
        await channels.leave("ch_general", "bob")
        await channels.leave("ch_general", "nobody")
        assert await channels.members("ch_general") == ["alice", "carol"]
        assert await channels.members("ch_dev") == ["bob"]
        assert await channels.members("unknown") == []
        await channels.leave_many(pa.array(["ch_general"]), pa.chunked_array([["alice"]]))
        assert await channels.members("ch_general") == ["carol"]
        assert {(25, b"ch_general"), (40, b"ch_dev")} == {(p, key) for p, key, _ in await records(log, MEMBERS)}

    run(work, tmp_path, engine)


def test_many_joins_are_stored_in_their_partitions() -> None:
    async def work(log: Log, channels: Channels) -> None:
        count = BATCH_ROWS + 1000
        names = [f"channel-{n % 700}" for n in range(count)]
        assert await channels.join_many(names, [f"user-{n}" for n in range(count)]) == count
        stored = await records(log, MEMBERS)
        assert len(stored) == count
        assert all(partition_of((key or b"").decode()) == index for index, key, _ in stored)
        assert {value for _, _, value in stored} == {f"+user-{n}".encode() for n in range(count)}
        assert await channels.join_many([], []) == 0
        assert await channels.join_many(pa.array([], pa.string()), pa.nulls(0)) == 0

    run(work)


def test_columns_may_be_of_any_kind_of_text() -> None:
    async def work(_: Log, channels: Channels) -> None:
        large = pa.array(["x", "general", "general"], pa.large_string()).slice(1)
        users = pa.chunked_array([["alice"], ["bob"]]).dictionary_encode()
        await channels.join_many(large, users)
        await channels.join_many(pa.array([b"general"]), ("carol",))
        assert await channels.members("general") == ["alice", "bob", "carol"]

    run(work)


def test_records_that_are_no_changes_are_skipped() -> None:
    async def work(log: Log, channels: Channels) -> None:
        await channels.join("general", "alice")
        wrong = [Record.new(value, "general") for value in ("", "?bob", b"+\xff")]
        await log.append(Partition(MEMBERS, partition_of("general")), wrong)
        await channels.join("general", "carol")
        assert await channels.members("general") == ["alice", "carol"]

    run(work)


@pytest.mark.parametrize(
    "call",
    [
        lambda c: c.join("", "alice"),
        lambda c: c.join("general", ""),
        lambda c: c.join(LONG, "alice"),
        lambda c: c.join("general", LONG),
        lambda c: c.join("gen\0eral", "alice"),
        lambda c: c.join("general", "\ud800"),
        lambda c: c.join(7, "alice"),
        lambda c: c.leave("general", None),
        lambda c: c.join_many(["general", ""], ["alice", "bob"]),
        lambda c: c.join_many(["general", "dev"], ["alice", None]),
        lambda c: c.join_many(["general", "dev"], ["alice"]),
        lambda c: c.join_many("general", "alice"),
        lambda c: c.join_many(["general"], [7]),
        lambda c: c.join_many(pa.array([1]), pa.array(["alice"])),
        lambda c: c.leave_many(["general"], ["\ud800"]),
        lambda c: c.leave_many(["general"], [LONG]),
        lambda c: c.members(""),
        lambda c: c.publish("", "hello", sender="alice"),
        lambda c: c.publish("general", b"hello", sender="alice"),
        lambda c: c.publish("general", "\ud800", sender="alice"),
        lambda c: c.publish("general", "hello", sender=""),
        lambda c: c.publish("general", "hello", sender="alice", id=-1),
        lambda c: c.publish("general", "hello", sender="alice", id=2**63),
        lambda c: c.publish("general", "hello", sender="alice", id="7"),
        lambda c: c.publish("general", "hello", sender="alice", id=True),
        lambda c: c.publish("general", "x" * 16385, sender="alice"),
        lambda c: c.set_presence("", "phone", online=True),
        lambda c: c.set_presence("alice", "x" * 65, online=True),
    ],
)
def test_wrong_names_ids_and_texts_change_nothing(call: Callable[[Any], Awaitable[object]]) -> None:
    async def work(log: Log, channels: Channels) -> None:
        with pytest.raises((InvalidValue, TooLarge)):
            await call(channels)
        for topic in await log.topics():
            assert await records(log, topic.name) == []

    run(work)


def test_the_error_names_the_index_of_a_wrong_name() -> None:
    async def work(_: Log, channels: Channels) -> None:
        with pytest.raises(InvalidValue, match=r"channel at index 2 is '': expected a name of 1 to 128 characters"):
            await channels.join_many(["a", "b", ""], ["alice"] * 3)
        with pytest.raises(InvalidValue, match=r"user is '\\udcff': expected names as strings"):
            await channels.join_many(["a", "b"], ["alice", "\udcff"])

    run(work)


@pytest.mark.parametrize("engine", ["memory", "sqlite"])
def test_an_event_is_stored_once_for_an_id(tmp_path: Path, engine: str) -> None:
    async def work(log: Log, channels: Channels) -> None:
        first = await channels.publish("general", "hello", sender="alice", id=7)
        again = await Channels(log, clock=ManualClock()).publish("general", "hello", sender="alice", id=7)
        other = await channels.publish("dev", "hello", sender="alice", id=7)
        assert (first.duplicate, again.duplicate, other.duplicate) == (False, True, False)
        assert again.at == first.at
        made = [await channels.publish("general", f"text {n}", sender="bob") for n in range(50)]
        stored = [(key, decode_event(value)) for _, key, value in await records(log, EVENTS)]
        general = [event for key, event in stored if key == b"general"]
        assert [event.id for event in general] == [7, *(each.id for each in made)]
        assert [event.text for event in general] == ["hello", *(f"text {n}" for n in range(50))]
        assert {event.device for event in general} == {""}
        assert len(stored) == 52

    run(work, tmp_path, engine)


def test_ids_ascend_and_hold_their_time() -> None:
    now = [snowflakes.START_MS + 1_000_000]
    ids = EventIds(lambda: now[0])
    made = [ids.next() for _ in range(1000)]
    assert all(snowflakes.ms_of(each) == ms_of(each) == now[0] for each in made)
    now[0] -= 500
    made += [ids.next() for _ in range(1000)]
    now[0] += 2000
    made.append(ids.next())
    assert made == sorted(set(made))
    assert made[-1] < 2**63


def test_presence_lies_in_the_partition_of_the_user_in_the_inbox() -> None:
    async def work(log: Log, channels: Channels) -> None:
        await log.create_topic("inbox", 5)
        await channels.set_presence("alice", "phone", online=True)
        await channels.set_presence("alice", "phone", online=False)
        stored = await records(log, PRESENCE)
        assert [(key, value) for _, key, value in stored] == [(b"alice", b"+phone"), (b"alice", b"-phone")]
        assert (await log.topic(PRESENCE)).partitions == 5

    run(work)


def test_a_topic_that_places_channels_differently_is_refused() -> None:
    async def work(log: Log, channels: Channels) -> None:
        await log.create_topic(MEMBERS, 16)
        with pytest.raises(WrongPlacement, match="fan-out needs 256 by jump and xxh64"):
            await channels.join("general", "alice")
        assert (await log.span(Partition(MEMBERS, 0))).end == 0

    run(work)
