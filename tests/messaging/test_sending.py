"""Sending: acknowledgements, order, sending again, refusals."""

import asyncio
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from random import Random
from unittest import mock

import pytest

from shardyard.log.requests import AppendRequest
from shardyard.messaging.outgoing import Outgoing
from shardyard.messaging.sending import Sending
from shardyard.messaging.session import REQUESTS, Session
from shardyard.messaging.snowflakes import id_at
from shardyard.model import SEQUENCE_WINDOW, Appended, OutcomeUnknown, ShardyardError
from shardyard.wire import messaging as wire
from shardyard.wire.inbox import MAX_TEXT_BYTES, MAX_USER_LENGTH, Mark
from shardyard.wire.messaging import Format, Marked, Message
from tests.messaging.clients import Client
from tests.messaging.servers import Yard, config, run, user_of
from tests.queues.engines import POSTGRESQL

FORMATS = list(Format)
ODD_NAMES = [
    "böb",
    "a/b",
    "a b",
    "//",
    "../v1",
    "ben?x=1#y",
    "%2F",
    "名前",
    "🙂" * MAX_USER_LENGTH,
    "x" * MAX_USER_LENGTH,
    " ",
    "a\nb",
    '"\\',
]


@pytest.mark.parametrize("engine", ["sqlite", POSTGRESQL])
@pytest.mark.parametrize("format_", FORMATS)
def test_a_message_is_acknowledged_when_it_is_stored_and_delivered_once(
    tmp_path: Path, engine: str, format_: Format
) -> None:
    async def scenario(yard: Yard) -> None:
        server = await yard.start()
        alice = await yard.join(server, "alice", format_=format_)
        bob = await yard.join(server, "bob", "laptop", format_=format_)
        sent = await alice.say(1, "bob", "hällo\0")
        (stored,) = [entry for entry in await yard.stored() if not entry.copy]
        assert (str(stored.id), stored.at, sent.duplicate) == (sent.id, sent.at, False)
        assert (stored.sender, stored.recipient, stored.device, stored.number) == ("alice", "bob", "phone", 1)
        await bob.received(1)
        await bob.sync()
        assert bob.entries == [Message(sent.id, "alice", "bob", "hällo\0", sent.at, 0)]
        await alice.sync()
        assert alice.entries == []

    run(tmp_path, scenario, engine)


def test_pipelined_messages_of_a_conversation_are_stored_and_acknowledged_in_their_order(tmp_path: Path) -> None:
    async def scenario(yard: Yard) -> None:
        server = await yard.start(config(burst=10_000))
        alice = await yard.join(server, "alice")
        others = {name: await yard.join(server, name, format_=Format.MSGPACK) for name in ("bob", "carol", "dave")}
        names = list(others)
        for first in range(0, 120, 30):  # several frames to a message
            await alice.send(*(wire.Send(n, names[n % 3], str(n)) for n in range(first, first + 30)))
        await alice.until(lambda: len(alice.answers) == 120)
        for index, (name, client) in enumerate(others.items()):
            mine = [str(n) for n in range(index, 120, 3)]
            assert await client.received(len(mine)) == mine, name
            acknowledged = [
                sent.number for sent in alice.answers if sent.number is not None and sent.number % 3 == index
            ]
            assert acknowledged == sorted(acknowledged)
            assert client.ids == sorted(client.ids, key=int)

    run(tmp_path, scenario)


@pytest.mark.parametrize("engine", ["sqlite", POSTGRESQL])
def test_the_same_number_again_is_stored_once_on_any_connection_and_server(tmp_path: Path, engine: str) -> None:
    async def scenario(yard: Yard) -> None:
        first = await yard.start()
        bob = await yard.join(first, "bob")
        alice = await yard.join(first, "alice")
        sent = await alice.say(7, "bob", "once")
        again = await alice.say(7, "bob", "once")
        assert (again.id, again.at, again.duplicate) == (sent.id, sent.at, True)
        await alice.vanish()
        alice = await yard.join(first, "alice")
        assert await alice.say(7, "bob", "once") == again
        # Another device has numbers of its own
        tablet = await yard.join(first, "alice", "tablet")
        assert not (await tablet.say(7, "bob", "twice")).duplicate
        assert await bob.received(2) == ["once", "twice"]

        second = await yard.start()
        await yard.stop(first)
        alice = await yard.join(second, "alice")
        assert await alice.say(7, "bob", "once") == again
        assert not (await alice.say(8, "bob", "more")).duplicate
        assert await bob.closed() == 4111
        assert bob.texts == ["once", "twice"]
        originals = [entry.content for entry in await yard.stored() if not entry.copy]
        assert sorted(map(str, originals)) == ["more", "once", "twice"]

    run(tmp_path, scenario, engine)


def test_users_and_devices_whose_names_run_together_are_told_apart(tmp_path: Path) -> None:
    async def scenario(yard: Yard) -> None:
        server = await yard.start()
        for user, device in (("a", "b/c"), ("a/b", "c"), ("1:a", "b/c"), ("a/b/c", "c")):
            client = await yard.join(server, user, device)
            assert not (await client.say(1, "bob", "x")).duplicate, (user, device)

    run(tmp_path, scenario)


@pytest.mark.parametrize("engine", ["sqlite", POSTGRESQL])
def test_users_with_odd_names_send_and_receive_and_have_a_history(tmp_path: Path, engine: str) -> None:
    async def scenario(yard: Yard) -> None:
        server = await yard.start(config(mirror="local", burst=10_000))
        alice = await yard.join(server, "alice")
        for number, name in enumerate(ODD_NAMES):
            odd = await yard.join(server, name, name[:64], format_=FORMATS[number % 2])
            await alice.say(2 * number, name, name)
            assert await odd.received(1) == [name]
            await odd.say(1, "alice", name)
        assert await alice.received(len(ODD_NAMES)) == ODD_NAMES
        await yard.materialised()
        for number, name in enumerate(ODD_NAMES):
            await alice.send(wire.GetHistory(1_000 + number, name))
            page = await alice.get(wire.History)
            assert [message.text for message in page.messages] == [name, name], name

    run(tmp_path, scenario, engine)


@pytest.mark.parametrize("mirror", ["log", "local"])
def test_a_message_to_oneself_reaches_each_of_the_users_clients_once(tmp_path: Path, mirror: str) -> None:
    async def scenario(yard: Yard) -> None:
        server = await yard.start(config(mirror=mirror))
        phone, tablet = await yard.join(server, "alice", "phone"), await yard.join(server, "alice", "tablet")
        await phone.say(1, "alice", "note")
        await phone.say(2, "bob", "last")  # its copy comes after one of the note would
        assert await tablet.received(2) == ["note", "last"]
        assert await phone.received(1) == ["note"]
        await tablet.sync()
        assert tablet.texts == ["note", "last"]
        tablet = await yard.clients.join(server.url, "alice", "tablet", position=tablet.position, sent="1")
        await tablet.sync()
        assert [text for text in tablet.texts if text == "note"] == []

    run(tmp_path, scenario)


def test_a_copy_is_handed_over_when_a_retry_finds_that_the_message_was_stored(tmp_path: Path) -> None:
    async def scenario(yard: Yard) -> None:
        server = await yard.start(config(mirror="local"))
        phone, tablet = await yard.join(server, "alice", "phone"), await yard.join(server, "alice", "tablet")
        append_many, failures = yard.log.append_many, iter([OutcomeUnknown("the database", "cut")])

        async def append_without_an_answer(requests: Sequence[AppendRequest]) -> list[Appended | ShardyardError]:
            appended = await append_many(requests)
            for failure in failures:
                return [failure] * len(requests)
            return appended

        with mock.patch.object(yard.log, "append_many", append_without_an_answer):
            await phone.say(1, "bob", "hello")
        assert next(failures, None) is None, "it was used"
        assert await tablet.received(1) == ["hello"]

    run(tmp_path, scenario)


def test_what_comes_together_is_stored_together_and_once_in_order_whatever_fails_at_first(tmp_path: Path) -> None:
    """Of the messages of one call of the log, some are stored, some are not, and of some it is not known."""

    async def scenario(yard: Yard) -> None:
        server = await yard.start(config(burst=1000, unanswered=100))
        users = [user_of(partition % 4, f"user-{partition}-") for partition in range(12)]
        clients = [await yard.join(server, user) for user in users]
        append_many, calls, random = yard.log.append_many, [], Random(1)

        async def append_some(requests: Sequence[AppendRequest]) -> list[Appended | ShardyardError]:
            calls.append(len(requests))
            outcomes: list[Appended | ShardyardError] = []
            for request in requests:
                fails = random.random() < 0.2
                outcome: Appended | ShardyardError = OutcomeUnknown("the database", "cut")
                if not fails or random.random() < 0.5:
                    (stored,) = await append_many([request])
                    outcome = outcome if fails else stored
                outcomes.append(outcome)
            return outcomes

        with mock.patch.object(yard.log, "append_many", append_some):
            for number, client in enumerate(clients):
                frames = [wire.Send(n, users[(number + n % 2 + 1) % 12], f"{number} {n}") for n in range(1, 21)]
                await client.send(*frames)
            for client in clients:
                await client.until(partial(_has_answers, client, 20))
        stored = [entry for entry in await yard.stored() if not entry.copy]
        assert len(stored) == len({(entry.sender, entry.number) for entry in stored}) == 240
        assert len(calls) < 240, "a call for several messages"
        for client in clients:
            texts = [text for text in await client.received(20) if isinstance(text, str)]
            for sender in {text.split()[0] for text in texts}:
                numbers = [int(text.split()[1]) for text in texts if text.split()[0] == sender]
                assert numbers == sorted(set(numbers))
        ids = {answer.id for client in clients for answer in client.answers if isinstance(answer, wire.Sent)}
        assert ids == {str(entry.id) for entry in stored}

    run(tmp_path, scenario)


def _has_answers(client: Client, count: int) -> bool:
    return len(client.answers) == count


def test_marks_reach_the_other_user_and_the_history(tmp_path: Path) -> None:
    async def scenario(yard: Yard) -> None:
        server = await yard.start()
        alice, bob = await yard.join(server, "alice"), await yard.join(server, "bob", format_=Format.MSGPACK)
        first = await alice.say(1, "bob", "one")
        second = await alice.say(2, "bob", "two")
        await bob.send(wire.SetMark(1, "alice", "delivered", second.id), wire.SetMark(2, "alice", "seen", first.id))
        sent = await bob.sent(1)
        await bob.sent(2)
        await alice.received(2)
        assert alice.texts == [f"delivered {second.id}", f"seen {first.id}"]
        assert alice.entries[0] == Marked(
            sent.id, "bob", "alice", "delivered", second.id, sent.at, alice.entries[0].offset
        )
        await yard.materialised()
        await alice.send(wire.GetChats(9))
        (chat,) = (await alice.get(wire.Chats)).chats
        assert (chat.peer, chat.peer_delivered, chat.peer_seen, chat.unread) == ("bob", second.id, first.id, 0)
        await bob.send(wire.GetChats(9))
        (chat,) = (await bob.get(wire.Chats)).chats
        assert (chat.peer, chat.seen, chat.unread, chat.last.text) == ("alice", first.id, 1, "two")

    run(tmp_path, scenario)


def test_a_mark_up_to_an_id_that_no_message_can_have_is_refused_and_the_next_one_is_stored(tmp_path: Path) -> None:
    async def scenario(yard: Yard) -> None:
        server = await yard.start()
        alice = await yard.join(server, "alice")
        now = int(time.time() * 1000)
        for number, upto in enumerate(("9" * 19, str(2**63 - 1), str(id_at(now + 60_000)))):
            await alice.send(wire.SetMark(number, "bob", "seen", upto))
            refused = await alice.answer(number)
            assert isinstance(refused, wire.Refused)
            assert (refused.code, refused.retry) == ("invalid_value", False)
        await alice.send(wire.SetMark(9, "bob", "seen", str(id_at(now))))
        await alice.sent(9)
        assert [entry.content for entry in await yard.stored() if not entry.copy] == [Mark("seen", id_at(now))]

    run(tmp_path, scenario)


def test_a_refused_message_says_why_and_the_next_ones_are_stored(tmp_path: Path) -> None:
    async def scenario(yard: Yard) -> None:
        server = await yard.start()
        alice, bob = await yard.join(server, "alice"), await yard.join(server, "bob")
        await alice.send(
            wire.Send(1, "bob", "x" * (MAX_TEXT_BYTES + 1)),
            wire.Send(2, "bob", "ä" * (MAX_TEXT_BYTES // 2)),
            wire.Send(3, "bob", "ä" * (MAX_TEXT_BYTES // 2) + "x"),
        )
        for number in (1, 3):
            refused = await alice.answer(number)
            assert isinstance(refused, wire.Refused)
            assert (refused.code, refused.retry) == ("too_large", False)
            assert str(MAX_TEXT_BYTES) in refused.message
        await alice.sent(2)
        assert await bob.received(1) == ["ä" * (MAX_TEXT_BYTES // 2)]

    run(tmp_path, scenario)


def test_a_number_far_below_those_sent_before_is_refused_and_the_next_ones_are_stored(tmp_path: Path) -> None:
    async def scenario(yard: Yard) -> None:
        server = await yard.start()
        alice = await yard.join(server, "alice")
        await alice.send(
            wire.Send(2**53 - 2, "bob", "new"), wire.Send(1, "bob", "old"), wire.Send(2**53 - 1, "bob", "newer")
        )
        await alice.sent(2**53 - 2)
        refused = await alice.answer(1)
        assert isinstance(refused, wire.Refused)
        assert (refused.code, refused.retry) == ("sequence_too_old", False)
        await alice.sent(2**53 - 1)

    run(tmp_path, scenario)


def test_names_without_a_place_in_the_history_are_refused(tmp_path: Path) -> None:
    async def scenario(yard: Yard) -> None:
        server = await yard.start()
        for frame in (wire.Send(1, "a\0b", "x"), wire.Typing("a\0b"), wire.GetHistory(1, "a\0b")):
            client = await yard.join(server, "alice")
            await client.send(frame)
            assert await client.closed() == 4200
        async with yard.clients.http.post(f"{server.url}/v1/session", json={"user": "a\0b"}) as response:
            assert response.status == 400

    run(tmp_path, scenario)


def test_sends_before_the_welcome_are_stored_once_the_partition_is_ready(tmp_path: Path) -> None:
    async def scenario(yard: Yard) -> None:
        server = await yard.start()
        bob = await yard.join(server, "bob")
        token = (await yard.clients.session(server.url, "alice")).token
        owned = server.server.owned_of("alice")
        assert owned is not None
        owned.ready = asyncio.get_running_loop().create_future()  # as if it were being loaded
        alice = await yard.clients.connected(server.url, "alice")
        await alice.send(
            wire.Hello(token, "phone"),
            wire.Send(1, "bob", "a"),
            wire.Send(2, "bob", "b"),
            wire.Send(3, "carol", "c"),
            wire.Ping(),
        )
        await alice.get(wire.Pong)
        assert alice.answers == []
        owned.ready.set_result(True)
        for number in (1, 2, 3):
            await alice.sent(number)
        assert isinstance(alice.frames[1], wire.Welcome)  # after the pong
        assert await bob.received(2) == ["a", "b"]

    run(tmp_path, scenario)


def test_more_requests_at_a_time_than_allowed_are_refused_and_may_be_made_again(tmp_path: Path) -> None:
    async def scenario(yard: Yard) -> None:
        server = await yard.start()
        alice = await yard.join(server, "alice")
        await alice.send(*(wire.GetChats(number) for number in range(REQUESTS + 2)))
        for number in (REQUESTS, REQUESTS + 1):
            refused = await alice.answer(number)
            assert isinstance(refused, wire.Refused)
            assert (refused.code, refused.retry) == ("too_many_requests", True)
        for number in range(REQUESTS):
            assert (await alice.get(wire.Chats)).number in range(REQUESTS), number
        await alice.send(wire.GetChats(9))
        assert (await alice.get(wire.Chats)).number == 9

    run(tmp_path, scenario)


def test_a_server_without_a_history_says_so(tmp_path: Path) -> None:
    async def scenario(yard: Yard) -> None:
        server = await yard.start(history=False)
        alice = await yard.join(server, "alice")
        await alice.send(wire.GetChats(1), wire.GetHistory(2, "bob"))
        for number in (1, 2):
            refused = await alice.answer(number)
            assert isinstance(refused, wire.Refused)
            assert (refused.code, refused.retry) == ("unsupported", False)

    run(tmp_path, scenario)


def test_pages_of_history_go_back_in_time_without_overlap(tmp_path: Path) -> None:
    async def scenario(yard: Yard) -> None:
        server = await yard.start()
        alice = await yard.join(server, "alice")
        await alice.send(*(wire.Send(n, "bob", str(n)) for n in range(7)))
        await alice.until(lambda: len(alice.answers) == 7)
        await yard.materialised()
        seen: list[str] = []
        before = None
        for _ in range(3):
            await alice.send(wire.GetHistory(50, "bob", before, 3))
            page = await alice.get(wire.History)
            seen += [message.text for message in page.messages]
            before = page.messages[-1].id
            assert page.more == (len(seen) < 7)
        assert seen == ["6", "5", "4", "3", "2", "1", "0"]

    run(tmp_path, scenario)


def test_a_send_that_takes_long_is_stored_although_very_many_later_ones_were_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log knows the numbers of a client within a window: no send may leave it before it is stored."""
    may_go_on = asyncio.Event()
    add = Sending.add

    async def add_later(sending: Sending, session: Session, outgoing: Outgoing) -> None:
        await may_go_on.wait()
        add(sending, session, outgoing)

    def add_or_wait(self: Sending, session: Session, outgoing: Outgoing) -> None:
        if outgoing.number == 0:
            waiting.append(asyncio.ensure_future(add_later(self, session, outgoing)))
        else:
            add(self, session, outgoing)

    waiting: list[asyncio.Future[None]] = []
    monkeypatch.setattr(Sending, "add", add_or_wait)

    async def scenario(yard: Yard) -> None:
        server = await yard.start(config(burst=1000))
        alice = await yard.join(server, "alice")
        slow, quick = user_of(1, "slow"), user_of(1, "quick")
        await alice.send(wire.Send(0, slow, "0"))
        for number in range(1, 201):
            await alice.send(wire.Send(number, quick, str(number)))
        await alice.until(lambda: len(alice.answers) == SEQUENCE_WINDOW - 1)  # the others wait for the first one
        may_go_on.set()
        await alice.until(lambda: len(alice.answers) == 201)
        assert {answer.number for answer in alice.answers if isinstance(answer, wire.Sent)} == set(range(201))

    run(tmp_path, scenario)
