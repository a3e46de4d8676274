"""The sender's other clients get a copy, through the log or from the server: the result is the same."""

import asyncio
from pathlib import Path

import pytest

from shardyard.messaging import resume
from shardyard.messaging.resume import Resuming
from shardyard.model import RetryLater
from shardyard.wire import messaging as wire
from shardyard.wire.messaging import Format
from tests.messaging.clients import Client
from tests.messaging.servers import Yard, config, eventually, partition_of, run, user_of
from tests.queues.engines import POSTGRESQL

MIRRORS = ["log", "local"]


def added(before: Client, again: Client) -> list[str]:
    """The texts that a client which drops known ids shows after it has connected again."""
    assert len(set(again.ids)) == len(again.ids), "twice on one connection"
    return [text for text, id_ in zip(again.texts, again.ids, strict=True) if id_ not in before.ids]


@pytest.mark.parametrize("engine", ["sqlite", POSTGRESQL])
@pytest.mark.parametrize("mirror", MIRRORS)
def test_other_clients_of_the_sender_get_each_message_once_and_the_sending_one_never(
    tmp_path: Path, mirror: str, engine: str
) -> None:
    async def scenario(yard: Yard) -> None:
        server = await yard.start(config(mirror=mirror))
        phone = await yard.join(server, "alice", "phone")
        tablet = await yard.join(server, "alice", "tablet", format_=Format.MSGPACK)
        desk = await yard.join(server, "alice", "desk")
        bob = await yard.join(server, "bob")
        await phone.send(*(wire.Send(n, "bob", f"p{n}") for n in range(5)))
        for number in range(5):
            await phone.sent(number)
        again = await phone.say(2, "bob", "p2")  # sent again, and so neither stored nor copied
        assert again.duplicate
        await bob.received(5)
        mark = f"seen {bob.ids[4]}"
        await bob.send(wire.SetMark(1, "alice", "seen", bob.ids[4]))
        await bob.sent(1)
        await tablet.say(1, "bob", "t")
        expected = [f"p{n}" for n in range(5)]
        for client, count, own in (
            (phone, 2, [mark, "t"]),
            (tablet, 6, [*expected, mark]),
            (desk, 7, [*expected, mark, "t"]),
        ):
            await client.received(count)
            await client.sync()
            assert sorted(client.texts) == sorted(own), client.device
            assert [text for text in client.texts if text in expected] == [text for text in expected if text in own]
        await bob.received(6)
        for client in (phone, tablet, desk):
            assert set(client.ids) <= {*bob.ids, *(entry.id for entry in client.entries if entry.sender == "bob")}
        copies = [entry for entry in await yard.stored() if entry.copy]
        assert bool(copies) == (mirror == "log")

    run(tmp_path, scenario, engine)


@pytest.mark.parametrize("engine", ["sqlite", POSTGRESQL])
@pytest.mark.parametrize("mirror", MIRRORS)
def test_a_client_that_was_away_gets_the_copies_that_it_missed(tmp_path: Path, mirror: str, engine: str) -> None:
    async def scenario(yard: Yard) -> None:
        server = await yard.start(config(mirror=mirror))
        phone, tablet = await yard.join(server, "alice", "phone"), await yard.join(server, "alice", "tablet")
        bob = await yard.join(server, "bob")
        new = await yard.join(server, "alice", "new")  # it will know no message of its user
        await new.vanish()
        await phone.say(1, "bob", "a")
        await tablet.received(1)
        await tablet.vanish()
        await phone.say(2, "bob", "b")
        await bob.received(2)
        await bob.say(1, "alice", "c")
        await phone.received(1)
        await phone.say(3, "bob", "d")
        await tablet_gets(yard, server.url, tablet, ["b", "c", "d"], mirror)
        await tablet_gets(yard, server.url, new, ["a", "b", "c", "d"], mirror)

    run(tmp_path, scenario, engine)


async def tablet_gets(yard: Yard, url: str, before: Client, expected: list[str], mirror: str) -> None:
    again = await yard.clients.again(url, before)
    await again.until(lambda: len(added(before, again)) >= len(expected))
    await again.sync()
    if mirror == "local":
        assert added(before, again) == expected
    else:  # copies come through the log a little later than what others send
        assert sorted(added(before, again)) == sorted(expected)
    assert not [frame for frame in again.frames if isinstance(frame, wire.Gap)]
    await again.vanish()
    if again.newest_sent is None:
        again.newest_sent = before.newest_sent
    once_more = await yard.clients.again(url, again)
    assert added(before, once_more) == [] or set(once_more.ids) <= {*again.ids, *before.ids}


@pytest.mark.parametrize("mirror", MIRRORS)
def test_a_client_gets_the_copies_that_it_missed_from_the_next_server(tmp_path: Path, mirror: str) -> None:
    async def scenario(yard: Yard) -> None:
        first = await yard.start(config(mirror=mirror))
        phone, tablet = await yard.join(first, "alice", "phone"), await yard.join(first, "alice", "tablet")
        await phone.say(1, "bob", "a")
        await tablet.received(1)
        await tablet.vanish()
        await phone.say(2, "bob", "b")
        await phone.close()
        second = await yard.start(config(mirror=mirror))
        await yard.stop(first)
        again = await yard.clients.again(second.url, tablet)
        await again.until(lambda: added(tablet, again) == ["b"])

    run(tmp_path, scenario)


def test_copies_that_are_handed_over_while_a_client_resumes_come_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(yard: Yard) -> None:
        server = await yard.start(config(mirror="local"))
        phone, tablet = await yard.join(server, "alice", "phone"), await yard.join(server, "alice", "tablet")
        await tablet.vanish()
        await phone.say(1, "bob", "before")
        found, go_on = asyncio.Event(), asyncio.Event()
        look = Resuming.sent

        async def slowly(*arguments: object) -> object:
            found.set()
            await go_on.wait()
            return await look(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(Resuming, "sent", slowly)
        connecting = asyncio.create_task(yard.clients.again(server.url, tablet))
        await found.wait()
        await phone.say(2, "bob", "meanwhile")
        await yard.materialised()  # so the history has it, too
        go_on.set()
        again = await connecting
        await phone.say(3, "bob", "after")
        await again.received(3)
        await again.sync()
        assert await again.all_received(3) == ["before", "meanwhile", "after"]

    run(tmp_path, scenario)


def test_a_client_gets_only_recent_copies_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids of other servers may be that much behind, because of their clocks."""
    monkeypatch.setattr("shardyard.messaging.admission.CLOCKS_MS", 0)

    async def scenario(yard: Yard) -> None:
        server = await yard.start(config(mirror="local"))
        phone, tablet = await yard.join(server, "alice", "phone"), await yard.join(server, "alice", "tablet")
        for number in range(3):
            await phone.say(number, "bob", str(number))
            await asyncio.sleep(0.002)  # ids of another millisecond
        await tablet.received(3)
        await tablet.vanish()
        again = await yard.clients.again(server.url, tablet)
        assert again.texts in ([], ["2"])

    run(tmp_path, scenario)


def test_a_failure_to_read_the_history_is_over_with_the_next_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(yard: Yard) -> None:
        server = await yard.start(config(mirror="local"))
        phone, tablet = await yard.join(server, "alice", "phone"), await yard.join(server, "alice", "tablet")
        await tablet.vanish()
        await phone.say(1, "bob", "a")
        wait = Resuming._wait_for_history
        outcomes = iter((RetryLater("the registry is away"), False))

        async def fail(self: Resuming) -> bool:
            outcome = next(outcomes, None)
            if isinstance(outcome, RetryLater):
                raise outcome
            return await wait(self) if outcome is None else outcome

        monkeypatch.setattr(Resuming, "_wait_for_history", fail)
        monkeypatch.setattr(resume, "FAILURE_SECONDS", 0.0)
        refused = await yard.clients.hello(
            server.url, "alice", "tablet", position=tablet.position, sent=tablet.newest_sent
        )
        assert await refused.closed() == 4013
        behind = await yard.clients.again(server.url, tablet)
        assert [frame.reason for frame in behind.frames if isinstance(frame, wire.Gap)]
        await behind.vanish()
        again = await yard.clients.again(server.url, tablet)
        assert not [frame for frame in again.frames if isinstance(frame, wire.Gap)]
        assert await again.all_received(1) == ["a"]

    run(tmp_path, scenario)


def test_more_copies_than_the_limit_are_a_gap_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "MOST_MISSED", 3)

    async def scenario(yard: Yard) -> None:
        server = await yard.start(config(mirror="local"))
        tablet = await yard.join(server, "alice", "tablet")
        await tablet.vanish()
        await yard.fill("bob", "abcdef", sender="alice")
        await yard.materialised()
        again = await yard.clients.again(server.url, tablet)
        assert [frame.reason for frame in again.frames if isinstance(frame, wire.Gap)]

    run(tmp_path, scenario)


@pytest.mark.parametrize("mirror", MIRRORS)
def test_the_history_does_not_count_copies(tmp_path: Path, mirror: str) -> None:
    async def scenario(yard: Yard) -> None:
        server = await yard.start(config(mirror=mirror))
        phone, tablet = await yard.join(server, "alice", "phone"), await yard.join(server, "alice", "tablet")
        for number in range(3):
            await phone.say(number, "bob", str(number))
        await tablet.received(3)
        await yard.materialised()
        bob = await yard.join(server, "bob")
        for client, peer, unread in ((tablet, "bob", 0), (bob, "alice", 3)):
            await client.send(wire.GetHistory(1, peer), wire.GetChats(2))
            assert [message.text for message in (await client.get(wire.History)).messages] == ["2", "1", "0"]
            (chat,) = (await client.get(wire.Chats)).chats
            assert (chat.unread, chat.last.text) == (unread, "2")

    run(tmp_path, scenario)


@pytest.mark.parametrize("mirror", MIRRORS)
def test_two_servers_give_every_client_its_copies(tmp_path: Path, mirror: str) -> None:
    async def scenario(yard: Yard) -> None:
        servers = [await yard.start(config(mirror=mirror)) for _ in range(2)]
        await eventually(lambda: [len(server.owned) for server in servers] == [2, 2])
        sender = user_of(min(servers[0].owned), "sender")
        recipient = user_of(min(servers[1].owned), "recipient")
        assert partition_of(sender) != partition_of(recipient)
        phone, tablet = [await yard.join(servers[0], sender, device) for device in ("phone", "tablet")]
        others = [await yard.join(servers[1], recipient, device) for device in ("phone", "tablet")]
        for number in range(4):
            await phone.say(number, recipient, str(number))
            await others[0].received(number + 1)
            await others[0].say(number, sender, f"re {number}")
        both = [text for number in range(4) for text in (str(number), f"re {number}")]
        for client, expected in (
            (phone, both[1::2]),
            (tablet, both),
            (others[0], both[::2]),
            (others[1], both),
        ):
            await client.received(len(expected))
            await client.sync()
            assert sorted(client.texts) == sorted(expected)

    run(tmp_path, scenario)
