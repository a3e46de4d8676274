"""Channels on messaging servers: who gets posts, memberships, presence. Fan-out is played by the tests."""

import asyncio
from pathlib import Path

import pytest

from shardyard.messaging.channels.following import MembersFollower
from shardyard.model import Partition, Record
from shardyard.runtime.metrics import MALFORMED_INBOX_RECORDS
from shardyard.wire import messaging as wire
from shardyard.wire.channels import (
    EVENTS,
    FANOUT_PARTITIONS,
    HASH,
    MEMBERS,
    PARTITIONER,
    PRESENCE,
    decode_event,
)
from shardyard.wire.inbox import POST_KEY, TOPIC
from shardyard.wire.messaging import Format
from tests.messaging.channel_yard import (
    change_members,
    create_topics,
    gaps,
    in_history,
    join_channel,
    look_often,
    online,
    post,
    posts,
    refused,
    until_online,
)
from tests.messaging.clients import Client
from tests.messaging.servers import PARTITIONS, Yard, config, eventually, partition_of, run, user_of
from tests.queues.engines import POSTGRESQL

ALICE, BOB = user_of(1, "alice"), user_of(1, "bob")
CAROL = user_of(2, "carol")


@pytest.mark.parametrize("engine", ["sqlite", POSTGRESQL])
def test_members_get_each_post_once_in_order_and_the_sending_client_does_not(tmp_path: Path, engine: str) -> None:
    async def scenario(yard: Yard) -> None:
        await create_topics(yard)
        server = await yard.start()
        phone = await yard.join(server, ALICE, "phone")
        desk = await yard.join(server, ALICE, "desk", format_=Format.MSGPACK)
        bob, carol = await yard.join(server, BOB), await yard.join(server, CAROL)
        for client in (phone, bob):
            await join_channel(client, 1, "news")
        await post(yard, "news", "p1", "p2", to=1, sender=ALICE, device="phone")
        await post(yard, "news", "p3", to=1, sender=ALICE, device="desk")
        await post(yard, "other", "no", to=1)
        await post(yard, "news", "no", to=2)
        await bob.say(2, ALICE, "direct")
        await phone.received(2)
        assert phone.texts == ["p3", "direct"]
        assert await desk.received(3) == ["p1", "p2", "direct"]
        assert (await bob.received(3))[:3] == ["p1", "p2", "p3"]
        await carol.sync()
        assert carol.texts == []
        first = next(entry for entry in bob.entries if isinstance(entry, wire.Posted))
        assert (first.channel, first.sender, first.offset) == ("news", ALICE, 0)

    run(tmp_path, scenario, engine)


@pytest.mark.parametrize("engine", ["sqlite", POSTGRESQL])
def test_a_post_is_stored_once_for_its_number(tmp_path: Path, engine: str) -> None:
    async def scenario(yard: Yard) -> None:
        await create_topics(yard)
        server = await yard.start()
        alice = await yard.join(server, ALICE)
        await join_channel(alice, 1, "news")
        await alice.send(wire.Post(2, "news", "hello"), wire.Post(3, "news", "again"))
        sent = await alice.sent(2)
        await alice.sent(3)
        await alice.send(wire.Post(2, "news", "hello"))
        again = await alice.sent(2)
        assert (again.id, again.at, again.duplicate, sent.duplicate) == (sent.id, sent.at, True, False)
        stored = []
        for partition in await yard.log.topic(EVENTS):
            for record in (await yard.log.read(partition, 0)).records():
                assert record.key == b"news"
                stored.append(decode_event(record.value))
        assert [(e.text, e.sender, e.device, e.number) for e in stored] == [
            ("hello", ALICE, "phone", 2),
            ("again", ALICE, "phone", 3),
        ]
        assert str(stored[0].id) == sent.id

    run(tmp_path, scenario, engine)


def test_only_members_post_and_read(tmp_path: Path) -> None:
    async def scenario(yard: Yard) -> None:
        await create_topics(yard)
        server = await yard.start()
        alice = await yard.join(server, ALICE)
        await alice.send(wire.Post(1, "news", "no"))
        assert (await refused(alice, 1)).code == "denied"
        await alice.send(wire.GetPosts(2, "news"))
        assert (await refused(alice, 2)).code == "denied"
        await join_channel(alice, 3, "news")
        await alice.send(wire.Post(4, "news", "x" * 16_385))
        assert (await refused(alice, 4)).code == "too_large"
        # Pipelined: all of one channel is carried out in order
        await alice.send(
            wire.Leave(5, "news"), wire.Post(6, "news", "no"), wire.Join(7, "news"), wire.Post(8, "news", "yes")
        )
        assert (await refused(alice, 6)).code == "denied"
        await alice.sent(8)
        await alice.send(wire.GetPosts(9, "news"))
        assert [each.text for each in (await alice.get(wire.Posts)).posts] == ["yes"]
        # What another program has changed counts at once
        await change_members(yard, "quick", ALICE)
        await alice.send(wire.Post(10, "quick", "at once"))
        await alice.sent(10)

    run(tmp_path, scenario)


def test_without_the_topics_everything_is_refused_until_they_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_often(monkeypatch)

    async def scenario(yard: Yard) -> None:
        server = await yard.start()
        alice, bob = await yard.join(server, ALICE), await yard.join(server, BOB)
        frames: list[wire.ClientFrame] = [
            wire.Post(1, "news", "x"),
            wire.Join(2, "news"),
            wire.Leave(3, "news"),
            wire.GetPosts(4, "news"),
            wire.GetChannels(5),
        ]
        await alice.send(*frames, wire.TypingIn("news"))
        for number in range(1, 6):
            answer = await refused(alice, number)
            assert (answer.code, "fan-out" in answer.message) == ("unsupported", True)
        assert not server.server.channels.is_on
        await create_topics(yard)
        await change_members(yard, "news", BOB)
        await until_online(yard, 1, (ALICE, "phone"), (BOB, "phone"))
        await join_channel(alice, 6, "news")
        await post(yard, "news", "p1", to=1)
        assert await alice.received(1) == await bob.received(1) == ["p1"]
        # ... and off again
        await yard.log.delete_topic(PRESENCE)
        await eventually(lambda: not server.server.channels.is_on)
        await alice.send(wire.Post(7, "news", "x"))
        assert (await refused(alice, 7)).code == "unsupported"

    run(tmp_path, scenario)


def test_a_server_without_a_history_has_no_channels(tmp_path: Path) -> None:
    async def scenario(yard: Yard) -> None:
        await create_topics(yard)
        server = await yard.start(history=False)
        alice = await yard.join(server, ALICE)
        await alice.send(wire.Join(1, "news"))
        assert (await refused(alice, 1)).code == "unsupported"

    run(tmp_path, scenario)


def test_a_join_is_seen_by_all_clients_of_the_user_and_changes_nothing_twice(tmp_path: Path) -> None:
    async def scenario(yard: Yard) -> None:
        await create_topics(yard)
        server = await yard.start()
        phone, desk = await yard.join(server, ALICE, "phone"), await yard.join(server, ALICE, "desk")
        bob = await yard.join(server, BOB)
        await join_channel(phone, 1, "news")
        await join_channel(phone, 2, "news")
        await phone.send(wire.Leave(3, "never joined"), wire.Join(4, "a"), wire.Leave(5, "news"))
        await phone.until(lambda: wire.Done(5) in phone.frames and wire.Done(3) in phone.frames)
        await phone.until(lambda: wire.Done(4) in phone.frames)
        for client in (phone, desk):
            await client.until(lambda c=client: wire.Membership("news", False) in c.frames)  # type: ignore[misc]
            await client.sync()
            seen = [frame for frame in client.frames if isinstance(frame, wire.Membership)]
            assert sorted((each.channel, each.joined) for each in seen) == [
                ("a", True),
                ("news", False),
                ("news", True),
            ]
        await bob.sync()
        assert not any(isinstance(frame, wire.Membership) for frame in bob.frames)
        await change_members(yard, "b", ALICE)
        await desk.until(lambda: wire.Membership("b", True) in desk.frames)
        await desk.send(wire.GetChannels(1), wire.GetChannels(2, None, 1), wire.GetChannels(3, "a"))
        answers = [await desk.get(wire.Channels) for _ in range(3)]
        by_number = {each.number: (each.channels, each.more) for each in answers}
        assert by_number == {1: (["a", "b"], False), 2: (["a"], True), 3: (["b"], False)}

    run(tmp_path, scenario)


def test_channels_are_known_at_connect_from_the_history_and_from_what_it_does_not_have_yet(tmp_path: Path) -> None:
    async def scenario(yard: Yard) -> None:
        await create_topics(yard)
        first = await yard.start()
        await change_members(yard, "old", ALICE, BOB)
        await change_members(yard, "left", ALICE)
        await in_history(yard)
        await yard.stop(first)
        second = await yard.start(stores_history=False)  # the history stays behind
        await change_members(yard, "new", ALICE)
        await change_members(yard, "left", ALICE, joined=False)
        alice = await yard.join(second, ALICE)
        await post(yard, "old", "p1", to=1)
        await post(yard, "new", "p2", to=1)
        await post(yard, "left", "no", to=1)
        assert await alice.received(2) == ["p1", "p2"]
        await alice.send(wire.GetChannels(1))
        assert (await alice.get(wire.Channels)).channels == ["new", "old"]

    run(tmp_path, scenario)


def test_a_client_waits_for_a_history_that_is_too_far_behind(tmp_path: Path) -> None:
    async def scenario(yard: Yard) -> None:
        await create_topics(yard)
        behind = await yard.start(config(recent_changes=3, history_seconds=0.3), stores_history=False)
        await change_members(yard, "news", ALICE)
        await change_members(yard, "other", *(f"user{n}" for n in range(10)))
        follower = behind.server.channels.require_running().follower
        await eventually(lambda: max(follower.recent.firsts) > 0)
        late = await yard.clients.hello(behind.url, ALICE)
        assert await late.closed() == 4013
        storing = await yard.start(partitions=[])  # it stores the history
        alice = await yard.clients.hello(behind.url, ALICE)
        while await asyncio.wait_for(_opened(alice), 60) is False:
            alice = await yard.clients.hello(behind.url, ALICE)
        await post(yard, "news", "p1", to=1)
        assert await alice.received(1) == ["p1"]
        await yard.stop(storing)

    run(tmp_path, scenario)


async def _opened(client: Client) -> bool:
    """Whether the client was welcomed."""
    await eventually(
        lambda: client.code is not None or any(isinstance(frame, wire.CaughtUp) for frame in client.frames)
    )
    return client.code is None


def test_a_post_waits_until_its_memberships_are_known(tmp_path: Path) -> None:
    async def scenario(yard: Yard) -> None:
        await create_topics(yard)
        server = await yard.start()
        alice = await yard.join(server, ALICE)
        for number in range(20):
            channel = f"channel{number}"
            await change_members(yard, channel, ALICE)
            await post(yard, channel, f"p{number}", to=1)
        assert await alice.received(20) == [f"p{number}" for number in range(20)]
        await post(yard, "channel0", "beyond the end", to=1, members=10**9)  # of a worker gone mad
        assert (await alice.received(21))[-1] == "beyond the end"

    run(tmp_path, scenario)


def test_malformed_records_are_counted_and_skipped(tmp_path: Path) -> None:
    async def scenario(yard: Yard) -> None:
        await create_topics(yard)
        for partition, records in {
            Partition(MEMBERS, 0): [Record("id", None, b"+x"), Record("id", b"\xff", b"+x"), Record("id", b"c", b"?")],
            Partition(PRESENCE, 1): [Record("id", b"u", b"?"), Record("id", b"\xff", b"+x"), Record("id", b"u", b"+")],
            Partition(EVENTS, 0): [Record("id", None, b"x"), Record("id", b"c", b"nonsense")],
        }.items():
            await yard.log.append(partition, records)
        server = await yard.start()
        alice = await yard.join(server, ALICE)
        await join_channel(alice, 1, "news")
        before = MALFORMED_INBOX_RECORDS.value
        await yard.log.append(
            Partition(TOPIC, 1),
            [
                Record("fanout.1.1.1.0", POST_KEY + b"news", b"nonsense"),
                Record("no source", POST_KEY + b"\xff", b"nonsense"),
                Record("id", POST_KEY, b""),
            ],
        )
        await post(yard, "news", "good", to=1)
        assert await alice.received(1) == ["good"]
        assert MALFORMED_INBOX_RECORDS.value == before + 3
        await in_history(yard)

    run(tmp_path, scenario)


def test_pages_of_a_channel_have_what_the_history_does_not_have_yet(tmp_path: Path) -> None:
    async def scenario(yard: Yard) -> None:
        await create_topics(yard)
        server = await yard.start()
        alice = await yard.join(server, ALICE)
        await join_channel(alice, 1, "news")
        for number in range(2, 7):
            await alice.send(wire.Post(number, "news", f"m{number}"))
            await alice.sent(number)
        await alice.send(wire.GetPosts(20, "news", limit=2))
        newest = await alice.get(wire.Posts)
        assert ([each.text for each in newest.posts], newest.more) == (["m6", "m5"], True)
        assert newest.posts[0].channel == "news"
        await in_history(yard)
        await alice.send(wire.GetPosts(21, "news"))
        assert [each.text for each in (await alice.get(wire.Posts)).posts] == ["m6", "m5", "m4", "m3", "m2"]
        await alice.send(wire.GetPosts(22, "news", newest.posts[-1].id, 2))
        older = await alice.get(wire.Posts)
        assert ([each.text for each in older.posts], older.more) == (["m4", "m3"], True)

    run(tmp_path, scenario)


def test_older_pages_have_what_the_history_does_not_have_yet_too(tmp_path: Path) -> None:
    async def scenario(yard: Yard) -> None:
        await create_topics(yard)
        server = await yard.start(stores_history=False)
        alice = await yard.join(server, ALICE)
        await join_channel(alice, 1, "news")
        for number in range(2, 7):
            await alice.send(wire.Post(number, "news", f"m{number}"))
            await alice.sent(number)
        await alice.send(wire.GetPosts(20, "news", limit=2))
        newest = await alice.get(wire.Posts)
        await alice.send(wire.GetPosts(21, "news", newest.posts[-1].id, 2))
        older = await alice.get(wire.Posts)
        assert ([each.text for each in older.posts], older.more) == (["m4", "m3"], True)

    run(tmp_path, scenario)


def test_a_client_gets_a_gap_also_if_its_membership_was_not_followed_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def follow_nothing(_: MembersFollower) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(MembersFollower, "run", follow_nothing)

    async def scenario(yard: Yard) -> None:
        server = await yard.start(stores_history=False)
        bob = await yard.join(server, BOB)
        await yard.log.create_topic(EVENTS, 2)
        await yard.log.create_topic(MEMBERS, FANOUT_PARTITIONS, partitioner=PARTITIONER, hash_=HASH)
        await change_members(yard, "news", BOB)
        await yard.log.create_topic(PRESENCE, PARTITIONS)
        await bob.until(lambda: bool(gaps(bob)))
        assert "posts" in gaps(bob)[0]

    run(tmp_path, scenario)


def test_clients_that_were_connected_before_channels_were_switched_on_get_a_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_often(monkeypatch)

    async def scenario(yard: Yard) -> None:
        server = await yard.start()
        alice, bob = await yard.join(server, ALICE), await yard.join(server, BOB)
        await yard.log.create_topic(EVENTS, 2)
        await yard.log.create_topic(MEMBERS, FANOUT_PARTITIONS, partitioner=PARTITIONER, hash_=HASH)
        await change_members(yard, "news", BOB)
        await yard.log.create_topic(PRESENCE, PARTITIONS)
        await until_online(yard, 1, (ALICE, "phone"), (BOB, "phone"))
        await bob.until(lambda: bool(gaps(bob)))
        assert "posts" in gaps(bob)[0]
        assert not gaps(alice)

    run(tmp_path, scenario)


def test_presence_gets_the_partitions_of_inbox_also_if_that_one_was_looked_up_before_its_change(tmp_path: Path) -> None:
    async def scenario(yard: Yard) -> None:
        await create_topics(yard)
        server = await yard.start()
        await yard.log.expand_topic(TOPIC, PARTITIONS + 1)
        await server.server.channels.refresh()
        async with asyncio.timeout(60):
            while (await yard.log.topic(PRESENCE)).receiving == PARTITIONS:  # noqa: ASYNC110 it has no event
                await asyncio.sleep(0.01)

    run(tmp_path, scenario)


def test_presence_is_published_once_for_each_client_before_its_welcome(tmp_path: Path) -> None:
    async def scenario(yard: Yard) -> None:
        await create_topics(yard)
        server = await yard.start(config(away_seconds=300.0))
        alice = await yard.join(server, ALICE)
        assert await online(yard, partition_of(ALICE)) == {(ALICE, "phone")}
        await yard.join(server, ALICE, "desk")
        await alice.vanish()
        await yard.clients.again(server.url, alice)
        assert (await yard.log.span(Partition(PRESENCE, 1))).end == 2
        assert posts(alice) == []

    run(tmp_path, scenario)
