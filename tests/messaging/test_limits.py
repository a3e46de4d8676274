"""Limits on clients: those that do not read, say nothing, send too much, or show a wrong token."""

import asyncio
import json
import time
from pathlib import Path

import aiohttp
import jwt
import pytest

from shardyard.log import open_log
from shardyard.messaging.session import Session, State
from shardyard.messaging.tokens import AUDIENCE, SERVERS
from shardyard.registry import open_registry
from shardyard.server.messaging import clients as clients_module
from shardyard.server.messaging.app import running_messenger
from shardyard.wire import messaging as wire
from shardyard.wire.messaging import MAX_FRAME_BYTES, Format
from tests.messaging.clients import Client, raw_close_code
from tests.messaging.servers import JumpingClock, Running, Yard, config, eventually, run
from tests.server.websockets import BINARY, CLOSE, CONTINUATION, PING, TEXT, RawClient, frame

PONG = 10
HUGE = "x" * 16_000


async def closed_while_time_passes(clock: JumpingClock, client: Client) -> int:
    """The code with which a client is closed when the server looks for such clients next."""
    while client.code is None:
        clock.jump(1.0)
        await asyncio.sleep(0.005)
    return client.code


async def signed_in(yard: Yard, server: Running, user: str = "alice", format_: Format = Format.JSON) -> RawClient:
    """A raw connection whose client has been welcomed, and reads nothing by itself."""
    token = (await yard.clients.session(server.url, user)).token
    raw = await yard.clients.raw(server.url, format_, receive_bytes=4096)
    await raw.frame(wire.encode(wire.Hello(token, "raw"), format_), TEXT if format_ is Format.JSON else BINARY)
    await raw.receive()
    return raw


def session_of(server: Running, user: str, device: str = "raw") -> Session:
    owned = server.server.owned_of(user)
    assert owned is not None
    return next(each for each in owned.sessions_of(user) if each.device == device)


def waiting_bytes(session: Session) -> int:
    """What the server holds in memory for a client: what the kernel does not take, and the queue."""
    transport = session._connection._transport  # type: ignore[attr-defined]
    queued = sum(len(item.encoded(Format.JSON)) for item in session._queue or ())
    return int(transport.underlying_transport.get_write_buffer_size()) + queued


# Clients that do not read


def test_a_client_that_never_reads_is_cut_when_too_much_waits_and_others_notice_nothing(tmp_path: Path) -> None:
    async def scenario(yard: Yard) -> None:
        server = await yard.start(config(queued=100, burst=10_000, rate=10_000.0))
        deaf = await signed_in(yard, server, "bob")
        healthy = await yard.join(server, "bob", "healthy")
        session = session_of(server, "bob")
        largest = sent = 0
        while session.state is State.OPEN:
            await yard.fill("bob", [HUGE] * 50)
            sent += 50
            await healthy.received(sent)
            if session.state is State.OPEN:
                largest = max(largest, waiting_bytes(session))
        assert session not in server.server.paused
        assert largest < (100 + 50 + 200) * len(HUGE) + 2**20  # the queue, the last batch, and a frame
        assert await raw_close_code(deaf) == 4001
        assert len(healthy.texts) == sent
        assert healthy.code is None

    run(tmp_path, scenario)


def test_a_client_that_reads_nothing_for_a_while_is_cut(tmp_path: Path) -> None:
    async def scenario(yard: Yard) -> None:
        clock = JumpingClock()
        server = await yard.start(config(idle_seconds=10_000.0), clock=clock)
        deaf = await signed_in(yard, server, "bob")
        session = session_of(server, "bob")
        await yard.fill("bob", [HUGE] * 700)
        await eventually(lambda: session.is_paused)
        clock.jump(9.0)
        await asyncio.sleep(0.05)
        assert server.server.paused == {session}
        while server.server.paused:
            clock.jump(1.0)
            await asyncio.sleep(0.005)
        assert await raw_close_code(deaf) == 4001

    run(tmp_path, scenario)


def test_what_a_client_that_never_reads_asks_for_takes_bounded_memory(tmp_path: Path) -> None:
    async def scenario(yard: Yard) -> None:
        server = await yard.start(config(burst=100_000, rate=100_000.0))
        await yard.fill("alice", [HUGE] * 200)
        await yard.materialised()
        deaf = await signed_in(yard, server)
        session = session_of(server, "alice")
        page = frame(wire.encode(wire.GetHistory(1, "filler", limit=200), Format.JSON), TEXT)
        pings = frame(b"x" * 100, PING) * 50

        async def ask() -> None:
            while session.state is State.OPEN:
                await deaf.write(page + pings)

        asking = asyncio.create_task(ask())
        await eventually(lambda: session.is_paused)
        largest = 0
        for _ in range(100):
            await asyncio.sleep(0.005)
            largest = max(largest, waiting_bytes(session))
        assert largest < 20 * 2**20
        assert session.state is State.OPEN
        asking.cancel()

    run(tmp_path, scenario)


def test_what_is_kept_for_clients_that_reconnect_is_bounded_in_bytes(tmp_path: Path) -> None:
    async def scenario(yard: Yard) -> None:
        server = await yard.start(config(tail_bytes=100_000, burst=1_000))
        alice, bob = await yard.join(server, "alice"), await yard.join(server, "bob")
        for number in range(30):
            await alice.say(number, "bob", "x" * 10_000)
        await bob.received(30)
        owned = server.server.owned_of("bob")
        assert owned is not None
        kept = list(owned.tail.items("bob", owned.tail.first))
        assert 0 < len(kept) < 10

    run(tmp_path, scenario)


# Clients that say nothing


def test_idle_clients_are_disconnected_and_pings_of_either_kind_keep_them(tmp_path: Path) -> None:
    async def scenario(yard: Yard) -> None:
        clock = JumpingClock()
        server = await yard.start(clock=clock)
        idle, pinging = await yard.join(server, "idle"), await yard.join(server, "pinging")
        other = await yard.join(server, "other")
        for _ in range(8):
            clock.jump(10.0)
            await pinging.sync()
            await other.socket.ping()
            await asyncio.sleep(0.01)
        assert await closed_while_time_passes(clock, idle) == 4000
        await pinging.sync()
        await other.sync()

    run(tmp_path, scenario)


def test_a_client_that_does_not_say_hello_is_disconnected(tmp_path: Path) -> None:
    async def scenario(yard: Yard) -> None:
        clock = JumpingClock()
        server = await yard.start(clock=clock)
        silent = await yard.clients.connected(server.url)
        clock.jump(11.0)
        assert await closed_while_time_passes(clock, silent) == 4211

    run(tmp_path, scenario)


def test_a_session_ends_when_its_token_expires(tmp_path: Path) -> None:
    async def scenario(yard: Yard) -> None:
        clock = JumpingClock()
        server = await yard.start(config(idle_seconds=100_000.0), clock=clock)
        alice = await yard.join(server, "alice")
        clock.jump(3590.0)
        await alice.sync()
        assert await closed_while_time_passes(clock, alice) == 4010

    run(tmp_path, scenario)


@pytest.mark.parametrize(
    "first", [wire.Ping(), wire.Send(1, "bob", "x"), wire.GetChats(1), wire.Watch(["bob"]), wire.Typing("bob")]
)
def test_the_first_frame_must_be_hello(tmp_path: Path, first: wire.ClientFrame) -> None:
    async def scenario(yard: Yard) -> None:
        server = await yard.start()
        client = await yard.clients.connected(server.url)
        await client.send(first)
        assert await client.closed() == 4211
        assert client.frames == []

    run(tmp_path, scenario)


def test_only_the_first_frame_may_be_hello(tmp_path: Path) -> None:
    async def scenario(yard: Yard) -> None:
        server = await yard.start()
        alice = await yard.join(server, "alice")
        await alice.send(wire.Hello("x", "phone"))
        assert await alice.closed() == 4211

    run(tmp_path, scenario)


# Tokens


def test_wrong_tokens_get_nothing(tmp_path: Path) -> None:
    async def scenario(yard: Yard) -> None:
        server = await yard.start()
        key = server.server.tokens._key
        soon = int(time.time()) + 60
        good = {"sub": "alice", "exp": soon, "aud": AUDIENCE}
        head, body, signature = server.server.tokens.issue("alice").text.split(".")
        none = jwt.encode(good, None, algorithm="none")
        wrong = {
            "empty": "",
            "garbage": "garbage",
            "dots": "..",
            "not ASCII": "ä.ö.ü",
            "another key": jwt.encode(good, "k" * 64, "HS256"),
            "another algorithm": jwt.encode(good, key, "HS512"),
            "no signature": none,
            "no signature, by name": none.split(".")[0] + f".{body}.{signature}",
            "another user": f"{head}.{jwt.encode({**good, 'sub': 'bob'}, 'x' * 32).split('.')[1]}.{signature}",
            "a server": jwt.encode({**good, "aud": SERVERS}, key),
            "a peer": server.server.peers._tokens.issue_for_peer("server"),
            "another audience": jwt.encode({**good, "aud": "chat"}, key),
            "no audience": jwt.encode({"sub": "alice", "exp": soon}, key),
            "no expiry": jwt.encode({"sub": "alice", "aud": AUDIENCE}, key),
            "no user": jwt.encode({"exp": soon, "aud": AUDIENCE}, key),
            "an empty user": jwt.encode({**good, "sub": ""}, key),
            "a long user": jwt.encode({**good, "sub": "x" * 129}, key),
            "an odd expiry": jwt.encode({**good, "exp": "soon"}, key),
            "deep": json.dumps([[]] * 1000),
        }
        for name, token in wrong.items():
            client = await yard.clients.connected(server.url)
            await client.send(wire.Hello(token, "phone"))
            assert (name, await client.closed()) == (name, 4210)
            assert client.frames == []
        expired = server.server.tokens.issue("alice", -60).text
        client = await yard.clients.hello(server.url, "alice", token=expired)
        assert await client.closed() == 4010
        assert client.frames == []
        assert server.server.owned_of("alice").users == 0  # type: ignore[union-attr]

    run(tmp_path, scenario)


# Connections


def test_the_same_device_replaces_its_connection_and_misses_nothing(tmp_path: Path) -> None:
    async def scenario(yard: Yard) -> None:
        server = await yard.start(config(connections_per_user=1))
        first = await yard.join(server, "alice")
        second = await yard.clients.again(server.url, first)
        assert await first.closed() == 4012
        await yard.fill("alice", ["m"])
        assert await second.received(1) == ["m"]
        third = await yard.clients.hello(server.url, "alice", "another device")
        assert await third.closed() == 4011
        assert third.messages.close_reason == "code 4011 (the user has too many clients connected: at most 1)"
        await second.sync()
        await second.close()
        await eventually(lambda: server.server.clients == 0)
        await yard.join(server, "alice", "another device")

    run(tmp_path, scenario)


def test_a_server_takes_as_many_connections_as_it_may(tmp_path: Path) -> None:
    async def scenario(yard: Yard) -> None:
        server = await yard.start(clients=2)
        first = await yard.clients.connected(server.url)
        await yard.clients.connected(server.url)
        tcp = await yard.clients.tcp(server.url)
        assert await tcp.upgrade(f"Sec-WebSocket-Protocol: {Format.JSON.value}", path=wire.PATH) == 503
        await first.close()
        await eventually(lambda: server.server.clients == 1)
        await yard.clients.connected(server.url)

    run(tmp_path, scenario)


def test_a_client_that_sends_too_fast_is_read_more_slowly_and_nothing_is_lost(tmp_path: Path) -> None:
    async def scenario(yard: Yard) -> None:
        server = await yard.start(config(rate=200.0, burst=20, unanswered=4))
        alice, bob = await yard.join(server, "alice"), await yard.join(server, "bob")
        began = time.monotonic()
        for number in range(100):
            await alice.send(wire.Send(number, "bob", str(number)))
        await alice.until(lambda: len(alice.answers) == 100)  # those that came together may be processed together
        await alice.say(100, "bob", "100")
        assert time.monotonic() - began > (101 - 25) / 200  # it can't be faster, however fast the machine is
        assert await bob.received(101) == [str(number) for number in range(101)]

    run(tmp_path, scenario)


# WebSocket


def test_frames_that_are_too_large_or_of_the_wrong_kind_are_refused(tmp_path: Path) -> None:
    async def scenario(yard: Yard) -> None:
        server = await yard.start()
        ping = wire.encode(wire.Ping(), Format.JSON)
        padded = ping + b" " * (MAX_FRAME_BYTES - len(ping))
        raw = await signed_in(yard, server)
        await raw.frame(padded, TEXT)
        while (received := await raw.receive())[0] == TEXT and b"pong" not in received[1]:
            pass
        assert received[0] == TEXT
        cases: dict[str, tuple[Format, bytes, tuple[int, ...]]] = {
            "too large": (Format.JSON, frame(padded + b" ", TEXT), (0, 1009, 4200)),
            "far too large": (Format.JSON, frame(b"", TEXT, declared=2**62), (0, 1009, 1002, 4200)),
            "too large in fragments": (
                Format.JSON,
                frame(padded, TEXT, fin=False) + frame(b" ", CONTINUATION),
                (4200,),
            ),
            "text instead of binary": (Format.MSGPACK, frame(ping, TEXT), (4200,)),
            "binary instead of text": (Format.JSON, frame(ping, BINARY), (4200,)),
            "a fragment of binary": (Format.JSON, frame(ping, BINARY, fin=False), (4200,)),
            "going on with nothing": (Format.JSON, frame(ping, CONTINUATION), (0, 1002, 4200)),
            "a message within a message": (
                Format.JSON,
                frame(ping, TEXT, fin=False) + frame(ping, TEXT),
                (0, 1002, 4200),
            ),
            "invalid UTF-8": (Format.JSON, frame(b'{"type":"typing","to":"\xff"}', TEXT), (4200,)),
            "invalid UTF-8 in a token": (Format.JSON, frame(b"\xff", TEXT), (4200,)),
            "an empty message": (Format.JSON, frame(b"", TEXT), (4200,)),
            "an unknown opcode": (Format.JSON, frame(b"", 3), (0, 1002)),
            "a close frame of one byte": (Format.JSON, frame(b"x", CLOSE), (0, 1002, 1005)),
            "a long ping": (Format.JSON, frame(b"x" * 126, PING), (0, 1002)),
        }
        for name, (format_, data, codes) in cases.items():
            raw = await signed_in(yard, server, format_=format_)
            await raw.write(data)
            assert await raw_close_code(raw) in codes, name

    run(tmp_path, scenario)


def test_a_message_in_fragments_is_one_message_and_pings_may_come_in_between(tmp_path: Path) -> None:
    async def scenario(yard: Yard) -> None:
        server = await yard.start()
        bob = await yard.join(server, "bob")
        raw = await signed_in(yard, server)
        message = wire.encode(wire.Send(1, "bob", "in parts"), Format.JSON)
        pieces = [frame(message[:1], TEXT, fin=False)]
        pieces += [frame(bytes([byte]), CONTINUATION, fin=False) for byte in message[1:]]
        pieces.insert(5, frame(b"between", PING))
        await raw.write(b"".join(pieces) + frame(b"", CONTINUATION))
        assert await bob.received(1) == ["in parts"]
        while (received := await raw.receive())[0] != PONG:
            pass
        assert received[1] == b"between"

    run(tmp_path, scenario)


def test_very_many_fragments_take_neither_much_time_nor_memory(tmp_path: Path) -> None:
    async def scenario(yard: Yard) -> None:
        server = await yard.start()
        raw = await signed_in(yard, server)
        await raw.frame(b" ", TEXT, fin=False)
        for _ in range(60):
            await raw.write(frame(b" ", CONTINUATION, fin=False) * 500 + frame(b"", CONTINUATION, fin=False) * 500)
        other = await yard.join(server, "bob")
        await other.sync()
        await raw.frame(wire.encode(wire.Ping(), Format.JSON), CONTINUATION)
        while (received := await raw.receive())[0] == TEXT and b"pong" not in received[1]:
            pass
        assert received[0] == TEXT

    run(tmp_path, scenario)


def test_a_client_that_closes_gets_its_close_code_back(tmp_path: Path) -> None:
    async def scenario(yard: Yard) -> None:
        server = await yard.start()
        for payload, code in ((b"\x03\xe8", 1000), (b"\x0f\xa0bye", 4000)):
            raw = await signed_in(yard, server)
            await raw.frame(payload, CLOSE)
            assert await raw_close_code(raw) == code
        await eventually(lambda: server.server.clients == 0)

    run(tmp_path, scenario)


def test_a_client_that_does_not_answer_the_close_is_disconnected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients_module, "CLOSING_SECONDS", 0.05)

    async def scenario(yard: Yard) -> None:
        server = await yard.start()
        raw = await signed_in(yard, server)
        await raw.frame(b"[", TEXT)
        assert await raw_close_code(raw) == 4200
        await raw.frame(wire.encode(wire.Ping(), Format.JSON), TEXT)
        async with asyncio.timeout(60):
            await raw.ended()

    run(tmp_path, scenario)


def test_a_connection_that_has_sent_nothing_ends_when_the_server_stops() -> None:
    """Browsers open such connections in advance."""

    async def scenario() -> None:
        with open_registry("memory://") as registry:
            async with open_log("memory://") as log:
                async with running_messenger(log, registry) as url, aiohttp.ClientSession() as session:
                    host, port = url.removeprefix("http://").split(":")
                    reader, writer = await asyncio.open_connection(host, int(port))
                    async with session.get(f"{url}/healthz") as response:  # so the first one was accepted, too
                        assert response.status == 200
                # after 10 s it would end anyway, without a request
                assert await asyncio.wait_for(reader.read(), 8.0) == b""
                writer.close()
                await writer.wait_closed()

    asyncio.run(scenario())
