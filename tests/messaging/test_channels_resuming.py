"""Clients that reconnect get the posts of their channels that they missed, or a gap that says so."""

import asyncio
from pathlib import Path

import pytest

from shardyard.messaging.channels.following import MembersFollower
from shardyard.model import Partition, Record
from shardyard.wire import messaging as wire
from shardyard.wire.channels import PRESENCE
from shardyard.wire.inbox import POST_KEY, TOPIC, decode_entry
from tests.messaging.channel_yard import (
    change_members,
    create_topics,
    end_linger,
    gaps,
    in_history,
    join_channel,
    look_often,
    online,
    post,
    until_online,
)
from tests.messaging.clients import Client
from tests.messaging.servers import Running, Yard, config, eventually, run, user_of
from tests.queues.engines import POSTGRESQL

ALICE, BOB = user_of(1, "alice"), user_of(1, "bob")


def welcomed(client: Client) -> wire.Welcome:
    return next(frame for frame in client.frames if isinstance(frame, wire.Welcome))


async def two(yard: Yard, server: Running) -> tuple[Client, Client]:
    """Alice with two clients, a member of two channels, one of which has got a post."""
    phone, desk = await yard.join(server, ALICE, "phone"), await yard.join(server, ALICE, "desk")
    await join_channel(phone, 1, "news")
    await join_channel(phone, 2, "chat")
    await post(yard, "news", "p0", to=1)
    assert await phone.received(1) == await desk.received(1) == ["p0"]
    return phone, desk


@pytest.mark.parametrize("engine", ["sqlite", POSTGRESQL])
@pytest.mark.parametrize("tail_records", [5_000, 2])
def test_a_client_gets_missed_posts_from_memory_or_from_the_log_among_its_messages(
    tmp_path: Path, engine: str, tail_records: int
) -> None:
    async def scenario(yard: Yard) -> None:
        await create_topics(yard)
        server = await yard.start(config(tail_records=tail_records))
        phone, desk = await two(yard, server)
        bob = await yard.join(server, BOB)
        await phone.vanish()
        await post(yard, "news", "p1", to=1)
        await desk.received(2)
        await bob.say(1, ALICE, "m1")
        await post(yard, "chat", "p2", to=1, sender=ALICE, device="phone")  # its own
        await post(yard, "other", "no", to=1)
        await post(yard, "chat", "p3", to=1)
        await post(yard, "news", "p4", to=1)
        assert await desk.received(6) == ["p0", "p1", "m1", "p2", "p3", "p4"]
        again = await yard.clients.again(server.url, phone)
        assert await again.all_received(4) == ["p1", "m1", "p3", "p4"]
        assert [entry.offset for entry in again.entries] == sorted(entry.offset or 0 for entry in again.entries)
        assert (gaps(again), welcomed(again).resume) == ([], "position")
        await post(yard, "news", "p5", to=1)
        assert (await again.received(5))[-1] == "p5"

    run(tmp_path, scenario, engine)


def test_one_that_was_away_gets_a_gap_and_its_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    look_often(monkeypatch)

    async def scenario(yard: Yard) -> None:
        await create_topics(yard)
        server = await yard.start(config(away_seconds=0.0))
        phone, desk = await two(yard, server)
        bob = await yard.join(server, BOB)
        await phone.vanish()
        await until_online(yard, 1, (ALICE, "desk"), (BOB, "phone"))
        await desk.vanish()
        await until_online(yard, 1, (BOB, "phone"))
        await bob.say(1, ALICE, "m1")
        again = await yard.clients.again(server.url, phone)
        assert await again.all_received(1) == ["m1"]
        assert len(gaps(again)) == 1
        assert "channels" in gaps(again)[0]
        assert welcomed(again).resume == "position"
        new = await yard.join(server, ALICE, "laptop")
        assert gaps(new) == []
        await again.sync()
        once_more = await yard.clients.again(server.url, again)  # from after the gap
        assert (once_more.texts, gaps(once_more)) == ([], [])
        # It counts nowhere
        await yard.materialised()
        await bob.send(wire.GetChats(2))
        assert [chat.peer for chat in (await bob.get(wire.Chats)).chats] == [ALICE]
        await new.send(wire.GetChats(3))
        assert [(chat.peer, chat.unread) for chat in (await new.get(wire.Chats)).chats] == [(BOB, 1)]
        records = [r for p in await yard.log.topic(TOPIC) for r in (await yard.log.read(p, 0)).records()]
        entries = [decode_entry(r.value) for r in records if not (r.key or b"").startswith(POST_KEY)]
        assert [entry.recipient for entry in entries if entry.away] == [ALICE]

    run(tmp_path, scenario)


def test_one_without_channels_gets_no_gap_for_having_been_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    look_often(monkeypatch)

    async def scenario(yard: Yard) -> None:
        await create_topics(yard)
        server = await yard.start(config(away_seconds=0.0))
        alice = await yard.join(server, ALICE)
        await alice.vanish()
        await until_online(yard, 1)
        again = await yard.clients.again(server.url, alice)
        assert (again.texts, gaps(again)) == ([], [])
        # One who was added while away does
        await again.vanish()
        await until_online(yard, 1)
        await change_members(yard, "news", ALICE)
        assert len(gaps(await yard.clients.again(server.url, again))) == 1

    run(tmp_path, scenario)


def test_posts_that_the_log_has_no_more_are_a_gap(tmp_path: Path) -> None:
    async def scenario(yard: Yard) -> None:
        await create_topics(yard)
        server = await yard.start(config(tail_records=2, mirror="local"))  # no copies in between
        phone, desk = await two(yard, server)
        bob = await yard.join(server, BOB)
        await phone.vanish()
        await bob.say(1, ALICE, "m1")
        await post(yard, "news", "p1", "p2", "p3", to=1)
        await desk.received(5)
        await yard.materialised()
        partition = Partition(TOPIC, 1)
        await yard.log.trim(partition, (await yard.log.span(partition)).end - 1)
        again = await yard.clients.again(server.url, phone)
        assert await again.all_received(2) == ["m1", "p3"]
        assert len(gaps(again)) == 1

    run(tmp_path, scenario)


def test_a_position_that_is_not_valid_any_more_is_a_gap(tmp_path: Path) -> None:
    async def scenario(yard: Yard) -> None:
        await create_topics(yard)
        server = await yard.start()
        phone, _ = await two(yard, server)
        bob = await yard.join(server, BOB)
        sent = await bob.say(1, ALICE, "m1")
        await bob.say(2, ALICE, "m2")
        await phone.received(3)
        await phone.vanish()
        wrong = wire.Position(1, 99, 5)
        by_id = await yard.clients.again(server.url, phone, position=wrong, last=sent.id)
        assert await by_id.all_received(1) == ["m2"]
        assert (welcomed(by_id).resume, len(gaps(by_id))) == ("id", 1)
        lost = await yard.clients.again(server.url, phone, position=wrong, last=None)
        assert (welcomed(lost).resume, len(gaps(lost))) == ("lost", 1)

    run(tmp_path, scenario)


async def crash(server: Running) -> None:
    """It does nothing for its users any more, and is evicted: at once, because sessions that expire take long on a busy
    machine, and those of other servers expire there, too."""
    membership = server.server._ownership._membership
    await membership.stop()
    await server.server._node.coordinator.leave(membership.identity)


@pytest.mark.parametrize("engine", ["sqlite", POSTGRESQL])
def test_another_server_takes_over_the_presence_of_one_that_crashed(tmp_path: Path, engine: str) -> None:
    async def scenario(yard: Yard) -> None:
        await create_topics(yard)
        first = await yard.start(config(session_timeout=60.0))
        await eventually(lambda: 1 in first.owned)
        back, gone = await yard.join(first, ALICE), await yard.join(first, BOB)
        await join_channel(back, 1, "news")
        await join_channel(gone, 1, "news")
        await post(yard, "news", "p1", to=1)
        await back.received(1)
        await gone.received(1)
        await crash(first)
        second = await yard.start(config(session_timeout=60.0))
        await eventually(lambda: 1 in second.owned)
        for client in (back, gone):
            await client.close()
        assert await online(yard, 1) == {(ALICE, "phone"), (BOB, "phone")}
        await post(yard, "news", "p2", to=1)  # it is stored as long as presence says so
        again = await yard.clients.again(second.url, back)
        assert (await again.received(1), gaps(again)) == (["p2"], [])
        end_linger(second, ALICE)
        await until_online(yard, 1, (ALICE, "phone"))
        late = await yard.clients.again(second.url, gone)
        assert await late.all_received(1) == ["p2"]
        assert len(gaps(late)) == 1
        await until_online(yard, 1, (ALICE, "phone"), (BOB, "phone"))

    run(tmp_path, scenario, engine)


def test_a_client_misses_no_post_because_its_server_has_not_followed_its_membership_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(yard: Yard) -> None:
        await create_topics(yard)
        first = await yard.start(stores_history=False)
        await eventually(lambda: 1 in first.owned)
        alice = await yard.join(first, ALICE)
        await join_channel(alice, 1, "news")
        await alice.vanish()
        await post(yard, "news", "p1", to=1)
        await yard.stop(first)

        async def follow_nothing(_: MembersFollower) -> None:
            await asyncio.Event().wait()

        monkeypatch.setattr(MembersFollower, "run", follow_nothing)
        second = await yard.start(stores_history=False)
        await eventually(lambda: 1 in second.owned)
        again = await yard.clients.again(second.url, alice)
        assert (await again.all_received(1), gaps(again)) == (["p1"], [])

    run(tmp_path, scenario)


def test_clients_of_a_partition_that_moves_miss_nothing(tmp_path: Path) -> None:
    async def scenario(yard: Yard) -> None:
        await create_topics(yard)
        first = await yard.start()
        phone, _ = await two(yard, first)
        await in_history(yard)
        second = await yard.start()
        await yard.stop(first)
        assert await phone.closed() in (4100, 4111)
        await eventually(lambda: 1 in second.owned)
        await post(yard, "news", "p1", to=1)
        again = await yard.clients.again(second.url, phone)
        assert (await again.received(1), gaps(again)) == (["p1"], [])
        await post(yard, "chat", "p2", to=1)
        assert await again.received(2) == ["p1", "p2"]
        assert (ALICE, "phone") in await online(yard, 1)

    run(tmp_path, scenario)


def test_presence_is_compacted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    look_often(monkeypatch)

    async def scenario(yard: Yard) -> None:
        await create_topics(yard)
        server = await yard.start(config(away_seconds=0.0, presence_records=6))
        alice = await yard.join(server, ALICE)
        await alice.sync()
        partition = Partition(PRESENCE, 1)
        for _ in range(4):
            bob = await yard.join(server, BOB)
            await bob.vanish()
            await until_online(yard, 1, (ALICE, "phone"))
        first = 0

        async def trimmed() -> int:
            return (await yard.log.span(partition)).first

        while not first:
            first = await trimmed()
        record = (await yard.log.read(partition, first)).records()[0]
        assert (record.key, record.value) == (None, b"=")
        assert await online(yard, 1) == {(ALICE, "phone")}

    run(tmp_path, scenario)


def test_users_who_belong_to_another_partition_since_it_was_written_do_not_go_offline(tmp_path: Path) -> None:
    """Whoever serves them now has published that they are online, and fan-out knows each client once."""

    async def scenario(yard: Yard) -> None:
        await create_topics(yard)
        stranger = user_of(2, "carol")
        partition = Partition(PRESENCE, 1)
        records = [Record("id", user.encode(), b"+phone") for user in (stranger, ALICE)]
        await yard.log.append(partition, records)
        server = await yard.start()
        await yard.join(server, ALICE)
        await until_online(yard, 1, (ALICE, "phone"))
        values = [record.value for record in (await yard.log.read(partition, 2)).records()]
        assert values == [b"=", b"+phone"]

    run(tmp_path, scenario)
