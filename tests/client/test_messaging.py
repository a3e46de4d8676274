"""The messaging client against a server that follows a script: what it sends, what its program gets, and what becomes of
both when the connection is lost, when servers move, and when the program is slow."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Literal

import pytest

from shardyard.client import MessagingClient
from shardyard.client.messaging import Gap, IsTyping, Marked, Message, Presence
from shardyard.model import (
    Closed,
    InvalidCall,
    InvalidValue,
    NotAcknowledged,
    OverQuota,
    Sealed,
    ShardyardError,
    TooLarge,
    Unreachable,
    WrongToken,
)
from shardyard.runtime.clock import ManualClock
from shardyard.wire import messaging as wire
from shardyard.wire.messaging import Elsewhere, Position, Refused, Sent
from tests.client.messaging_server import Peer, ScriptedServer, message, messages

Scenario = Callable[[ScriptedServer], Coroutine[Any, Any, None]]


def run(scenario: Scenario) -> None:
    async def with_server() -> None:
        async with asyncio.timeout(60), ScriptedServer().running() as server:
            await scenario(server)

    asyncio.run(with_server())


@contextlib.asynccontextmanager
async def connected(server: ScriptedServer, **options: Any) -> AsyncIterator[tuple[MessagingClient, Peer]]:
    """A client of alice, and its first connection."""
    client = MessagingClient(server.url, "alice", **({"mark_delivered": False} | options))
    entering = asyncio.create_task(client.__aenter__())
    peer = await server.accept_new()
    await entering
    try:
        yield client, peer
    finally:
        await client.close()


async def take(client: MessagingClient, count: int) -> list[str]:
    """The texts of the next messages."""
    texts = []
    async with asyncio.timeout(20):
        async for each in client:
            texts.append(each.text)
            if len(texts) == count:
                break
    return texts


def background(work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
    return asyncio.create_task(work)


# Sending and receiving


@pytest.mark.parametrize("format_", ["msgpack", "json"])
def test_a_message_is_sent_with_a_number_and_returns_when_the_server_says_that_it_is_durable(
    format_: Literal["msgpack", "json"],
) -> None:
    async def scenario(server: ScriptedServer) -> None:
        async with connected(server, format=format_) as (client, peer):
            sending = background(client.send("bob", "grüße"))
            sent = await peer.get(wire.Send)
            assert (sent.recipient, sent.text) == ("bob", "grüße")
            assert not sending.done()
            await peer.send(Sent(sent.number, "77", 5, duplicate=True))
            assert await sending == Sent(sent.number, "77", 5, duplicate=True)

    run(scenario)


def test_messages_come_once_and_in_order_also_if_the_server_repeats_some() -> None:
    async def scenario(server: ScriptedServer) -> None:
        async with connected(server) as (client, peer):
            await peer.deliver(*messages([3, 4]))
            await peer.deliver(*messages([3, 4, 7]))
            copy = Message("2000", "alice", "carol", "from my phone", 5)  # no offset: it was not in the partition
            await peer.deliver(copy)
            await peer.deliver(copy, *messages([8]))
            assert await take(client, 5) == ["m3", "m4", "m7", "from my phone", "m8"]

    run(scenario)


def test_a_known_message_is_dropped_also_if_it_has_another_offset_in_another_epoch() -> None:
    async def scenario(server: ScriptedServer) -> None:
        async with connected(server) as (client, peer):
            await peer.deliver(*messages([40]))
            await take(client, 1)
            peer.abort()
            peer, hello = await server.accept()
            assert (hello.position, hello.last) == (Position(1, 41), "1040")
            await peer.welcome(Position(2, 0), resume="id")
            await peer.deliver(
                Message("1040", "bob", "alice", "m40", 5, 0), Message("1041", "bob", "alice", "new", 5, 1), epoch=2
            )
            assert await take(client, 1) == ["new"]
            peer.abort()
            _, hello = await server.accept()
            assert (hello.position, hello.last) == (Position(2, 2), "1041")

    run(scenario)


def test_events_are_messages_marks_typing_presence_and_gaps_in_the_order_of_the_server() -> None:
    async def scenario(server: ScriptedServer) -> None:
        async with connected(server) as (client, peer):
            mark = Marked("1005", "bob", "alice", "seen", "900", 5, 5)
            expected = [message(4), mark, IsTyping("bob"), Presence("bob", 2, 9), Gap("gone")]
            await peer.deliver(message(4), mark)
            await peer.send(IsTyping("bob"), Presence("bob", 2, 9), Gap("gone"))
            events = client.events()
            assert [await anext(events) for _ in expected] == expected

    run(scenario)


def test_a_client_whose_position_is_lost_gets_a_gap() -> None:
    async def scenario(server: ScriptedServer) -> None:
        async with connected(server) as (client, peer):
            peer.abort()
            peer, _ = await server.accept()
            await peer.welcome(Position(3, 9), resume="lost")
            assert isinstance(await anext(client.events()), Gap)

    run(scenario)


def test_two_tasks_cannot_both_wait_for_the_next_event() -> None:
    async def scenario(server: ScriptedServer) -> None:
        async with connected(server) as (client, peer):
            first = background(client.next_event())
            await asyncio.sleep(0)
            with pytest.raises(InvalidCall, match="another task"):
                await client.next_event()
            await peer.deliver(message(1))
            assert await first == message(1)

    run(scenario)


def test_history_and_chats_are_answered_by_number_and_asked_again_on_a_new_connection() -> None:
    async def scenario(server: ScriptedServer) -> None:
        async with connected(server) as (client, peer):
            asking = background(client.history("bob", before="99", limit=2))
            await peer.get(wire.GetHistory)
            peer.abort()
            peer = await server.accept_new()
            asked = await peer.get(wire.GetHistory)
            assert (asked.peer, asked.before, asked.limit) == ("bob", "99", 2)
            await peer.send(wire.History(asked.number, [message(1)], more=True))
            page = await asking
            assert (page.messages, page.more) == ([message(1)], True)

            listing = background(client.chats())
            await peer.send(wire.Chats((await peer.get(wire.GetChats)).number, [], more=False))
            assert (await listing).chats == []

    run(scenario)


def test_what_is_watched_is_watched_again_on_a_new_connection() -> None:
    async def scenario(server: ScriptedServer) -> None:
        async with connected(server) as (client, peer):
            await client.watch(["bob", "carol"])
            await client.typing("bob")
            assert (await peer.get(wire.Watch)).users == ["bob", "carol"]
            assert (await peer.get(wire.Typing)).recipient == "bob"
            peer.abort()
            peer = await server.accept_new()
            assert (await peer.get(wire.Watch)).users == ["bob", "carol"]

    run(scenario)


# Lost connections


def test_a_message_whose_acknowledgement_was_lost_is_sent_again_with_the_same_number() -> None:
    async def scenario(server: ScriptedServer) -> None:
        async with connected(server) as (client, peer):
            sending = [background(client.send(to, "hello")) for to in ("bob", "carol")]
            before = [await peer.get(wire.Send), await peer.get(wire.Send)]
            peer.abort()
            peer = await server.accept_new()
            again = [await peer.get(wire.Send), await peer.get(wire.Send)]
            assert again == before
            for each in again:
                await peer.send(Sent(each.number, str(each.number), 5, duplicate=True))
            assert all((await each).duplicate for each in sending)

    run(scenario)


def test_a_client_resumes_from_the_position_that_it_has_received() -> None:
    async def scenario(server: ScriptedServer) -> None:
        async with connected(server) as (_, peer):
            positions = []
            await peer.deliver(*messages([3, 9]))
            for adopted in (None, wire.CaughtUp(Position(1, 20)), wire.Pong(Position(1, 30))):
                if adopted is not None:
                    await peer.send(adopted)
                await peer.close(4000)
                peer, hello = await server.accept()
                assert hello.position is not None
                positions.append(hello.position)
                await peer.welcome(hello.position, resume="position")
            assert positions == [Position(1, 10), Position(1, 20), Position(1, 30)]

    run(scenario)


def test_a_client_that_received_nothing_resumes_from_where_it_was_welcomed() -> None:
    async def scenario(server: ScriptedServer) -> None:
        async with connected(server) as (_, peer):
            await peer.close()
            peer, _ = await server.accept()
            await peer.welcome(Position(4, 17), sent="55")
            await peer.close()
            _, hello = await server.accept()
            assert (hello.position, hello.last, hello.sent) == (Position(4, 17), None, "55")

    run(scenario)


def test_the_newest_message_of_the_own_user_is_known_from_copies_and_acknowledgements() -> None:
    async def scenario(server: ScriptedServer) -> None:
        async with connected(server) as (client, peer):
            await peer.deliver(Message("900", "alice", "bob", "copy", 5), message(1))
            sending = background(client.send("bob", "x"))
            await peer.send(Sent((await peer.get(wire.Send)).number, "1200", 5))
            await sending
            await peer.deliver(Message("1100", "alice", "bob", "copy", 5))
            await peer.close()
            _, hello = await server.accept()
            assert (hello.last, hello.sent) == ("1001", "1200")

    run(scenario)


def test_missing_messages_are_noticed_and_the_client_reconnects_from_its_position() -> None:
    async def scenario(server: ScriptedServer) -> None:
        async with connected(server) as (client, peer):
            await peer.deliver(*messages([1]))
            peer.count += 1
            await peer.deliver(*messages([3]))
            peer, hello = await server.accept()
            assert hello.position == Position(1, 2)
            await peer.welcome(hello.position, resume="position")
            await peer.deliver(*messages([2, 3]))
            assert await take(client, 3) == ["m1", "m2", "m3"]

    run(scenario)


@pytest.mark.parametrize("damaged", [b"", b"\xff", b"{}", b'{"type":"deliver"}', b"[1]", b'{"type":"welcome"}'])
@pytest.mark.parametrize("format_", ["msgpack", "json"])
def test_a_client_reconnects_after_a_message_that_is_no_frame(format_: Literal["msgpack", "json"], damaged: bytes) -> None:
    async def scenario(server: ScriptedServer) -> None:
        async with connected(server, format=format_) as (client, peer):
            await peer.socket.send_bytes(damaged)
            peer = await server.accept_new()
            await peer.deliver(message(1))
            assert await take(client, 1) == ["m1"]

    run(scenario)


def test_a_connection_on_which_no_answer_to_a_ping_comes_is_lost() -> None:
    async def scenario(server: ScriptedServer) -> None:
        clock = ManualClock()
        server.now_ms = lambda: int(clock.now() * 1000)
        async with connected(server, clock=clock) as (_, peer):
            await clock.advance(10)
            await peer.get(wire.Ping)
            await peer.send(wire.Pong(Position(1, 7)))
            await until(lambda: _received(client_of(_), 2))
            await clock.advance(20)
            await peer.get(wire.Ping)
            assert not server.has_connections
            await clock.advance(10)
            async with asyncio.timeout(20):
                await peer.ended.wait()
            reconnecting = background(server.accept())
            while not reconnecting.done():
                await clock.advance(0.1)
                await asyncio.sleep(0.001)
            assert (await reconnecting)[1].position == Position(1, 7)

    run(scenario)
