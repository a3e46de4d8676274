"""The messaging client against a server that follows a script: what it sends, what its program gets, and what becomes
of both when the connection is lost, when servers move, and when the program is slow."""

# ruff: noqa: PLW2901 after a loss, `peer` is the next connection

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Literal, TypeVar

import aiohttp
import pytest

from shardyard.client import MessagingClient
from shardyard.client.messaging import Gap, IsTyping, Marked, Message, Presence
from shardyard.client.messaging_directory import Directory
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
from tests.client.messaging_server import START, Peer, ScriptedServer, message, messages, until

T = TypeVar("T")
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


async def advance_until(clock: ManualClock, work: "asyncio.Task[T]") -> T:
    """Let virtual time pass in small steps until the work is done."""
    async with asyncio.timeout(20):
        while not work.done():
            await clock.advance(0.05)
            await asyncio.sleep(0.001)
    return await work


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
            assert (hello.position, hello.last) == (Position(3, 1, 41), "1040")
            await peer.welcome(Position(4, 2, 90), resume="id")
            peer.abort()
            peer, again = await server.accept()
            assert again.position == hello.position  # nothing of what was missed was delivered
            await peer.welcome(Position(4, 2, 90), resume="id")
            await peer.deliver(
                Message("1040", "bob", "alice", "m40", 5, 0), Message("1041", "bob", "alice", "new", 5, 1), epoch=2
            )
            assert await take(client, 1) == ["new"]
            peer.abort()
            _, hello = await server.accept()
            assert (hello.position, hello.last) == (Position(4, 2, 2), "1041")

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
            await peer.welcome(Position(3, 3, 9), resume="lost")
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
            assert [each.duplicate for each in await asyncio.gather(*sending)] == [True, True]

    run(scenario)


def test_a_client_resumes_from_the_position_that_it_has_received() -> None:
    async def scenario(server: ScriptedServer) -> None:
        async with connected(server) as (_, peer):
            positions = []
            await peer.deliver(*messages([3, 9]))
            for adopted in (None, wire.CaughtUp(Position(3, 1, 20)), wire.Pong(Position(3, 1, 30))):
                if adopted is not None:
                    await peer.send(adopted)
                await peer.close(4000)
                peer, hello = await server.accept()
                assert hello.position is not None
                positions.append(hello.position)
                await peer.welcome(hello.position, resume="position")
            assert positions == [Position(3, 1, 10), Position(3, 1, 20), Position(3, 1, 30)]

    run(scenario)


def test_a_client_that_received_nothing_resumes_from_where_it_was_welcomed() -> None:
    async def scenario(server: ScriptedServer) -> None:
        async with connected(server) as (_, peer):
            await peer.close()
            peer, hello = await server.accept()
            assert (hello.position, hello.last, hello.sent) == (START, None, None)
            await peer.welcome(START, resume="position", sent="55")
            await peer.close()
            _, hello = await server.accept()
            assert (hello.position, hello.last, hello.sent) == (START, None, "55")

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
            peer, hello = await server.accept()
            assert (hello.last, hello.sent) == ("1001", "1100")  # the acknowledgement may have overtaken copies
            await peer.welcome(hello.position or START, resume="position")
            await peer.send(wire.CaughtUp(Position(3, 1, 9)))
            await peer.close()
            _, hello = await server.accept()
            assert hello.sent == "1200"

    run(scenario)


def test_missing_messages_are_noticed_and_the_client_reconnects_from_its_position() -> None:
    async def scenario(server: ScriptedServer) -> None:
        async with connected(server) as (client, peer):
            await peer.deliver(*messages([1]))
            peer.count += 1
            await peer.deliver(*messages([3]))
            peer, hello = await server.accept()
            assert hello.position == Position(3, 1, 2)
            await peer.welcome(hello.position, resume="position")
            await peer.deliver(*messages([2, 3]))
            assert await take(client, 3) == ["m1", "m2", "m3"]

    run(scenario)


@pytest.mark.parametrize("damaged", [b"", b"\xff", b"{}", b'{"type":"deliver"}', b"[1]", b'{"type":"welcome"}'])
@pytest.mark.parametrize("format_", ["msgpack", "json"])
def test_a_client_reconnects_after_a_message_that_is_no_frame(
    format_: Literal["msgpack", "json"], damaged: bytes
) -> None:
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
        async with connected(server, clock=clock) as (client, peer):
            await clock.advance(10)
            await peer.get(wire.Ping)
            await peer.send(wire.Pong(Position(3, 1, 7)))
            await until(lambda: '"offset":7' in client.position)
            await clock.advance(20)
            await peer.get(wire.Ping)
            assert client.is_connected
            assert not peer.ended.is_set()
            await clock.advance(10)
            _, hello = await advance_until(clock, background(server.accept()))
            assert hello.position == Position(3, 1, 7)

    run(scenario)


# Finding the server


def test_a_client_asks_the_next_server_if_one_cannot_be_reached_and_connects_where_the_session_says() -> None:
    async def scenario(server: ScriptedServer) -> None:
        async with ScriptedServer().running() as other:
            server.address = other.websocket
            urls = ["http://127.0.0.1:9", "http://127.0.0.1:19", server.url.removeprefix("http://")]
            client = MessagingClient(urls, "alice", secret="s3", device="phone")
            entering = background(client.__aenter__())
            peer, hello = await other.accept()
            assert (hello.token, hello.device, hello.position) == ("token 1", "phone", None)
            assert server.sessions == [{"user": "alice", "secret": "s3"}]
            await peer.welcome()
            await entering
            await client.close()

    run(scenario)


def test_a_signed_token_is_exchanged_for_a_session_and_can_be_renewed_by_a_function() -> None:
    async def scenario(server: ScriptedServer) -> None:
        tokens = iter(["first", "second"])

        async def token() -> str:
            return next(tokens)

        async with connected(server, token=token) as (_, peer):
            await peer.close(4010)
            await server.accept()
            assert server.sessions == [{"user": "alice", "token": "first"}, {"user": "alice", "token": "second"}]

    run(scenario)


def test_a_client_goes_where_its_server_sends_it_and_takes_along_what_is_not_answered() -> None:
    async def scenario(server: ScriptedServer) -> None:
        async with ScriptedServer().running() as other, connected(server) as (client, peer):
            await peer.deliver(message(5))
            sending = background(client.send("bob", "hello"))
            sent = await peer.get(wire.Send)
            await peer.send(Elsewhere(other.websocket, 0.01))
            await peer.close(4111)
            moved, hello = await other.accept()
            assert (hello.token, hello.position) == ("token 1", Position(3, 1, 6))
            await moved.welcome(Position(3, 1, 6), resume="position")
            assert await moved.get(wire.Send) == sent
            await moved.send(Sent(sent.number, "1", 5))
            await sending

    run(scenario)


def test_a_client_that_is_told_no_address_or_a_dead_one_asks_for_a_new_session() -> None:
    async def scenario(server: ScriptedServer) -> None:
        clock = ManualClock()
        async with connected(server, clock=clock) as (_, peer):
            for address in (None, "ws://127.0.0.1:9/v1/messaging", "nonsense"):
                await peer.send(Elsewhere(address, 0))
                peer = await advance_until(clock, background(server.accept_new()))
            assert len(server.sessions) == 4

    run(scenario)


def test_a_client_asks_servers_that_it_was_told_of_when_the_given_one_is_gone() -> None:
    async def scenario(other: ScriptedServer) -> None:
        async with contextlib.AsyncExitStack() as stack:
            given = await stack.enter_async_context(ScriptedServer().running())
            async with connected(given) as (client, peer):
                await peer.send(wire.Pong(None, (given.websocket, other.websocket)), wire.Pong(None))
                await peer.deliver(message(5))
                await take(client, 1)
                await stack.aclose()
                await other.accept_new()
                assert [session["user"] for session in other.sessions] == ["alice"]

    run(scenario)


def test_a_client_that_was_given_addresses_with_tls_asks_no_server_without() -> None:
    async def scenario() -> None:
        async with aiohttp.ClientSession() as http:
            told = ["ws://b:1/v1/messaging", "wss://c/v1/messaging", "wss://a/v1/messaging"]
            for given, asked in (
                (["https://a"], ["https://a", "https://c"]),
                (["http://a"], ["http://a", "http://b:1", "https://c", "https://a"]),
            ):
                directory = Directory(http, given)
                directory.learn(told)
                assert list(directory.urls) == asked

    asyncio.run(scenario())


def test_a_client_that_two_servers_send_to_each_other_slows_down() -> None:
    async def scenario(server: ScriptedServer) -> None:
        clock = ManualClock()
        server.now_ms = lambda: int(clock.now() * 1000)
        async with connected(server, clock=clock) as (_, peer):
            for _ in range(2):
                await peer.send(Elsewhere(server.websocket, 0))
                peer, _ = await server.accept()  # no time passes
            for least in (0.2, 0.4, 0.8):
                before = clock.monotonic()
                await peer.send(Elsewhere(server.websocket, 0))
                peer, _ = await advance_until(clock, background(server.accept()))
                assert clock.monotonic() - before >= least

    run(scenario)


@pytest.mark.parametrize("code", [1001, 1012, 4100])
def test_a_client_of_a_server_that_stops_asks_where_to_go(code: int) -> None:
    async def scenario(server: ScriptedServer) -> None:
        async with ScriptedServer().running() as other, connected(server) as (_, peer):
            server.address = other.websocket
            await peer.close(code)
            await other.accept()

    run(scenario)


@pytest.mark.parametrize("code", [1000, 4000, 4001, 4003, 4011, 4012, 4013, 4099, 4300])
def test_a_client_reconnects_to_the_same_server_with_the_same_session_if_nothing_speaks_against_it(code: int) -> None:
    async def scenario(server: ScriptedServer) -> None:
        async with connected(server) as (_, peer):
            await peer.close(code)
            _, hello = await server.accept()
            assert (hello.token, len(server.sessions)) == ("token 1", 1)

    run(scenario)


def test_an_expired_session_is_renewed_also_before_the_server_notices() -> None:
    async def scenario(server: ScriptedServer) -> None:
        server.session_seconds = 5
        async with connected(server) as (_, peer):
            await peer.close(1000)
            _, hello = await server.accept()
            assert hello.token == "token 2"

    run(scenario)


@pytest.mark.parametrize(
    ("code", "error"), [(4200, InvalidCall), (4211, InvalidCall), (1009, InvalidCall), (4210, WrongToken)]
)
def test_a_client_gives_up_if_the_same_would_happen_again(code: int, error: type[ShardyardError]) -> None:
    async def scenario(server: ScriptedServer) -> None:
        async with connected(server) as (client, peer):
            await peer.deliver(message(1))
            sending = background(client.send("bob", "hello"))
            await peer.get(wire.Send)
            await peer.close(code, "because of this")
            with pytest.raises(error) as raised:
                await sending
            assert code == 4210 or f"with code {code} (because of this)" in str(raised.value)
            with pytest.raises(error):
                await client.send("bob", "hello")
            assert await take(client, 1) == ["m1"]  # what was received is not lost
            with pytest.raises(error):
                await take(client, 1)
            assert not server.has_connections

    run(scenario)


def test_a_client_that_no_server_takes_says_why() -> None:
    async def scenario(server: ScriptedServer) -> None:
        async def refuse() -> None:
            while True:
                peer, _ = await server.accept()
                await peer.close(4011, "the user has too many clients connected: at most 20")

        refusing = background(refuse())
        with pytest.raises(Unreachable, match="too many clients connected: at most 20"):
            async with MessagingClient(server.url, "alice", connect_timeout=0.5):
                pass
        refusing.cancel()

    run(scenario)


def test_a_client_that_is_not_let_in_says_so_at_once() -> None:
    async def scenario(server: ScriptedServer) -> None:
        server.session_error = WrongToken("this server", "the secret")
        with pytest.raises(WrongToken, match="requires the secret"):
            async with MessagingClient(server.url, "alice", secret="wrong"):
                pass
        assert len(server.sessions) == 1

    run(scenario)


def test_a_client_that_cannot_reach_a_server_says_so_after_its_timeout() -> None:
    async def scenario(server: ScriptedServer) -> None:
        server.session_error = Sealed("inbox")
        for url, why in (("http://127.0.0.1:9", "connection refused"), (server.url, "being moved")):
            with pytest.raises(Unreachable, match=why):
                async with MessagingClient(url, "alice", timeout=0.3):
                    pass

    run(scenario)


# Refusals and limits


def test_a_refusal_is_raised_as_the_error_of_the_server() -> None:
    async def scenario(server: ScriptedServer) -> None:
        async with connected(server) as (client, peer):
            sending = background(client.send("bob", "hello"))
            number = (await peer.get(wire.Send)).number
            await peer.send(Refused(number, "too_large", "text in bytes is 9, beyond the limit of 8"))
            with pytest.raises(TooLarge, match="beyond the limit of 8"):
                await sending

    run(scenario)


def test_what_is_refused_for_now_is_sent_again_with_the_same_number_and_nothing_overtakes_it() -> None:
    async def scenario(server: ScriptedServer) -> None:
        async with connected(server) as (client, peer):
            sending = [background(client.send("bob", text)) for text in ("first", "second")]
            first = await peer.get(wire.Send)
            await peer.send(Refused(first.number, "over_quota", "slow down", retry=True))
            assert await peer.get(wire.Send) == first
            await peer.send(Sent(first.number, "1", 5))
            second = await peer.get(wire.Send)
            assert (second.text, second.number > first.number) == ("second", True)
            await peer.send(Sent(second.number, "2", 5))
            assert [each.id for each in await asyncio.gather(*sending)] == ["1", "2"]

    run(scenario)


def test_a_refusal_that_does_not_pass_in_time_is_raised() -> None:
    async def scenario(server: ScriptedServer) -> None:
        clock = ManualClock()
        async with connected(server, clock=clock) as (client, peer):
            sending = background(client.send("bob", "hello", timeout=0.02))  # it is sent again after 0.025 at least
            number = (await peer.get(wire.Send)).number
            await peer.send(Refused(number, "over_quota", "slow down", retry=True))
            await until(lambda: not client._calls.waiting.is_set())
            await clock.advance(0.02)
            with pytest.raises(OverQuota, match="slow down"):
                await sending

    run(scenario)


def test_a_message_that_is_not_acknowledged_can_be_sent_again_under_its_number() -> None:
    async def scenario(server: ScriptedServer) -> None:
        async with connected(server) as (client, peer):
            with pytest.raises(NotAcknowledged, match="no answer") as raised:
                await client.send("bob", "hello", timeout=0.05)
            sent = await peer.get(wire.Send)
            assert raised.value.number == sent.number
            again = background(client.send("bob", "hello", number=sent.number))
            assert await peer.get(wire.Send) == sent
            await peer.send(Sent(sent.number, "1", 5, duplicate=True))
            assert (await again).duplicate

    run(scenario)


def test_at_most_32_messages_are_unanswered_and_their_numbers_stay_close() -> None:
    async def scenario(server: ScriptedServer) -> None:
        async with connected(server) as (client, peer):
            sending = [background(client.send(f"user {number}", "hello")) for number in range(200)]
            oldest = await peer.get(wire.Send)
            unanswered = [await peer.get(wire.Send) for _ in range(31)]
            await client.typing("bob")
            await peer.get(wire.Typing)  # it comes after everything that was sent before
            assert peer.frames.empty()
            answered = 0
            while unanswered:  # all but the oldest
                await peer.send(Sent((call := unanswered.pop(0)).number, "1", 5))
                assert call.number - oldest.number < 64
                answered += 1
                if answered <= 32:
                    unanswered.append(await peer.get(wire.Send))
            await peer.send(Sent(oldest.number, "1", 5))
            for _ in range(200 - 64):
                await peer.send(Sent((await peer.get(wire.Send)).number, "1", 5))
            await asyncio.gather(*sending)

    run(scenario)


def test_wrong_arguments_are_refused_before_anything_is_sent() -> None:
    async def scenario(server: ScriptedServer) -> None:
        async with connected(server, format="json") as (client, peer):
            wrong: list[Coroutine[Any, Any, object]] = [
                client.send("", "hello"),
                client.send("b" * 129, "hello"),
                client.send("bob", 5),  # type: ignore[arg-type]
                client.send("bob", "\ud800"),
                client.send("bob", "x" * 16385),
                client.send("bob", "\x01" * 16000),  # six times as long in JSON
                client.send("bob", "hello", number=-1),
                client.mark_seen("bob", "abc"),
                client.mark_seen("bob", 5),  # type: ignore[arg-type]
                client.mark_delivered("bob", ""),
                client.mark_delivered("bob", None),  # type: ignore[arg-type]
                client.history("bob", before="1e5"),
                client.history("bob", before=5),  # type: ignore[arg-type]
                client.chats(before=["5"]),  # type: ignore[arg-type]
                client.history("bob", limit=201),
                client.chats(limit=0),
                client.watch(str(number) for number in range(201)),
                client.watch("bob"),
                client.watch(None),  # type: ignore[arg-type]
                client.watch([None]),  # type: ignore[list-item]
                client.typing(""),
            ]
            for call in wrong:
                with pytest.raises((InvalidValue, TooLarge)):
                    await call
            await client.typing("bob")
            await peer.get(wire.Typing)
            assert peer.frames.empty()

    run(scenario)


@pytest.mark.parametrize(
    "options",
    [
        {"servers": []},
        {"servers": "ftp://host"},
        {"user": ""},
        {"device": "d" * 65},
        {"format": "xml"},
        {"resume": "nonsense"},
        {"resume": "{}"},
        {"max_queued": 0},
    ],
)
def test_a_client_is_not_made_with_wrong_options(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidValue):
        MessagingClient(**({"servers": "http://127.0.0.1:7500", "user": "alice"} | options))


# A slow program


def test_a_program_that_takes_nothing_stops_the_server_and_gets_everything_later() -> None:
    async def scenario(server: ScriptedServer) -> None:
        async with connected(server, max_queued=10) as (client, peer):
            text = "x" * 10_000
            written = 0

            async def write() -> None:
                nonlocal written
                for number in range(2000):
                    await peer.deliver(message(number, text))
                    written += 1

            writing = background(write())
            await until(lambda: peer.unsent_bytes > 0 and not client._inbox.has_room.is_set())
            assert written < 2000
            assert client._inbox.received.position == Position(3, 1, 10)
            writing.cancel()
            peer.abort()  # the server has waited long enough
            taking = background(take(client, 2000))
            peer, hello = await server.accept()
            assert hello.position is not None
            await peer.welcome(hello.position, resume="position")
            for number in range(hello.position.offset, 2000):
                await peer.deliver(message(number, text))
            assert await taking == [text] * 2000

    run(scenario)


def test_a_program_that_sends_while_it_takes_nothing_gets_its_answers_and_later_all_messages() -> None:
    async def scenario(server: ScriptedServer) -> None:
        async with connected(server, max_queued=10) as (client, peer):
            await peer.deliver(*messages(range(6)))
            await peer.deliver(*messages(range(6, 12)))  # the queue is full now
            sending = background(client.send("bob", "hello"))
            call = await peer.get(wire.Send)
            await peer.deliver(*messages(range(12, 18)))
            await peer.send(wire.Pong(Position(3, 1, 18)))
            await peer.send(Sent(call.number, "5000", 5))
            await sending
            taking = background(take(client, 18))
            peer, hello = await server.accept()
            assert (hello.position, hello.sent) == (Position(3, 1, 12), None)
            await peer.welcome(Position(3, 1, 12), resume="position")
            await peer.deliver(*messages(range(12, 18)))
            assert await taking == [f"m{number}" for number in range(18)]

    run(scenario)


def test_a_connection_is_not_lost_because_the_program_takes_nothing() -> None:
    async def scenario(server: ScriptedServer) -> None:
        clock = ManualClock()
        async with connected(server, clock=clock, max_queued=2) as (client, peer):
            await peer.deliver(*messages([1, 2]))
            await peer.deliver(*messages([3]))
            await until(lambda: not client._inbox.has_room.is_set())
            for _ in range(3):
                await clock.advance(20)
                await peer.get(wire.Ping)
                await peer.send(wire.Pong(Position(3, 1, 3)))
            assert client.is_connected
            assert await take(client, 3) == ["m1", "m2", "m3"]

    run(scenario)


# Marks


def test_messages_are_marked_as_delivered_when_the_program_gets_them_at_most_once_a_second_for_each_sender() -> None:
    async def scenario(server: ScriptedServer) -> None:
        clock = ManualClock()
        async with connected(server, clock=clock, mark_delivered=True) as (client, peer):

            async def next_mark() -> tuple[str, str, str]:
                mark = await peer.get(wire.SetMark)
                await peer.send(Sent(mark.number, str(mark.number), 5))
                return mark.recipient, mark.kind, mark.upto

            await peer.deliver(*messages([1, 2]), message(3, sender="carol"), Message("9", "alice", "bob", "copy", 5))
            await take(client, 4)
            assert [await next_mark(), await next_mark()] == [
                ("bob", "delivered", "1002"),
                ("carol", "delivered", "1003"),
            ]
            await peer.deliver(*messages([4]))
            await take(client, 1)
            await peer.deliver(*messages([5]))
            await take(client, 1)
            await clock.advance(0.9)
            await client.typing("bob")
            await peer.get(wire.Typing)
            assert peer.frames.empty()
            await clock.advance(0.2)
            assert await next_mark() == ("bob", "delivered", "1005")

            await peer.deliver(*messages([6]))
            await take(client, 1)
            seeing = background(client.mark_seen("bob", "1006"))  # which says that it was delivered, too
            assert await next_mark() == ("bob", "seen", "1006")
            await seeing
            await clock.advance(5)
            await client.typing("bob")
            await peer.get(wire.Typing)
            assert peer.frames.empty()

    run(scenario)


# Position, and the end


def test_a_position_resumes_another_client_after_what_the_program_has_taken() -> None:
    async def scenario(server: ScriptedServer) -> None:
        async with connected(server, device="phone") as (client, peer):
            await peer.deliver(*messages([1, 2, 3]))
            sending = background(client.send("bob", "hello"))
            number = (await peer.get(wire.Send)).number
            await peer.send(Sent(number, "5000", 5))
            await sending
            assert await take(client, 2) == ["m1", "m2"]
            position = client.position
        resumed = MessagingClient(server.url, "alice", resume=position)
        entering = background(resumed.__aenter__())
        peer, hello = await server.accept()
        assert (hello.device, hello.position, hello.last) == ("phone", Position(3, 1, 3), "1002")
        await peer.welcome(Position(3, 1, 3), resume="position")
        await entering
        sending = background(resumed.send("bob", "again"))
        call = await peer.get(wire.Send)
        assert call.number > number
        await peer.send(Sent(call.number, "5001", 5))
        await sending
        await resumed.close()

    run(scenario)


def test_numbers_ascend_for_a_device_also_without_a_position_and_if_the_clock_was_set_back() -> None:
    early, late = ManualClock(1000.0), ManualClock(2000.0)
    numbers = [
        MessagingClient("h:1", "alice", device="phone", clock=early)._calls.next_number,
        MessagingClient("h:1", "alice", device="phone", clock=late)._calls.next_number,
    ]
    position = MessagingClient("h:1", "alice", device="phone", clock=late).position
    numbers.append(MessagingClient("h:1", "alice", resume=position, clock=early)._calls.next_number)
    assert numbers == [1_000_000_000, 2_000_000_000, 2_000_000_000]


def test_two_clients_have_different_devices_unless_they_are_given_one() -> None:
    assert MessagingClient("h:1", "alice").device != MessagingClient("h:1", "alice").device


def test_closing_ends_the_iteration_and_fails_what_waits() -> None:
    async def scenario(server: ScriptedServer) -> None:
        async with connected(server) as (client, peer):
            iterating = background(take(client, 1))
            sending = background(client.send("bob", "hello"))
            await peer.get(wire.Send)
            await client.close()
            assert await iterating == []
            with pytest.raises(Closed):
                await sending
            with pytest.raises(Closed):
                await client.send("bob", "hello")
            with pytest.raises(InvalidCall, match="entered once"):
                await client.__aenter__()
            await until(peer.ended.is_set)

    run(scenario)
