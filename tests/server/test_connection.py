"""WebSocket connections: opening them, their limits, and the codes with which they are closed."""

import asyncio
import logging

import aiohttp
import msgspec
import pytest

from shardyard.runtime.metrics import BODY_BYTES, CALLS, CONNECTIONS, ERRORS, WEBSOCKETS
from shardyard.server import websocket
from shardyard.server.limits import ServerLimits
from shardyard.server.websocket import WebSocketConnection
from shardyard.wire import frames
from shardyard.wire.close_codes import CloseCode
from shardyard.wire.media import MAX_MESSAGE_BYTES
from tests.server.websockets import CLOSE, CONTINUATION, PING, TEXT, Running, frame, publish, run

KIB = 1024
SUBPROTOCOL = f"Sec-WebSocket-Protocol: {frames.SUBPROTOCOL}"
HEALTH = frames.Request("GET", "/healthz")


# Opening


def test_a_connection_is_opened_for_our_subprotocol() -> None:
    async def scenario(running: Running) -> None:
        before = WEBSOCKETS.value, CONNECTIONS.value, CALLS.series("request").value
        client = await running.connect()
        assert client.socket.protocol == frames.SUBPROTOCOL
        assert await client.call(1, HEALTH) == frames.Response(200, b'{"alive":true}')
        assert (WEBSOCKETS.value, CONNECTIONS.value) == (before[0] + 1, before[1] + 1)
        assert CALLS.series("request").value == before[2] + 1
        await client.socket.close()
        assert client.socket.close_code == 1000
        while (WEBSOCKETS.value, CONNECTIONS.value) != before[:2]:  # noqa: ASYNC110 it has no event for it
            await asyncio.sleep(0)

    run(scenario)


@pytest.mark.parametrize(
    ("method", "path", "headers"),
    [
        ("GET", frames.PATH, []),
        ("GET", frames.PATH, ["Sec-WebSocket-Protocol: shardyard.2, chat"]),
        ("GET", frames.PATH + "/", [SUBPROTOCOL]),
        ("GET", "/v1/topics", [SUBPROTOCOL]),
        ("POST", frames.PATH, [SUBPROTOCOL]),
    ],
)
def test_what_is_no_request_for_our_subprotocol_on_its_path_is_answered_with_400(
    method: str, path: str, headers: list[str]
) -> None:
    async def scenario(running: Running) -> None:
        client = await running.open()
        assert await client.upgrade(*headers, method=method, path=path) == 400
        await client.ended()

    run(scenario)


def test_a_request_without_an_upgrade_is_told_that_connections_are_taken_there() -> None:
    async def scenario(running: Running) -> None:
        async with running.session.get(running.url + frames.PATH) as response:
            assert response.status == 426
            assert (response.headers["upgrade"], response.headers["connection"]) == ("websocket", "Upgrade")
            error = (await response.json())["error"]
        assert error["code"] == "upgrade_required"
        assert f"{frames.PATH} takes WebSocket connections" in error["message"]

    run(scenario)


def test_a_client_that_offers_several_subprotocols_gets_ours() -> None:
    async def scenario(running: Running) -> None:
        client = await running.open()
        assert await client.upgrade("Sec-WebSocket-Protocol: chat, shardyard.1") == 101

    run(scenario)


@pytest.mark.parametrize("headers", [[], ["Authorization: Bearer wrong"], ["Authorization: Basic the-broker's"]])
def test_a_caller_without_the_token_is_answered_with_401(headers: list[str]) -> None:
    async def scenario(running: Running) -> None:
        client = await running.open()
        assert await client.upgrade(SUBPROTOCOL, *headers) == 401
        await client.ended()

    run(scenario, token="the-broker's")


def test_the_token_of_a_topic_opens_a_connection_on_which_only_that_topic_can_be_published_to() -> None:
    async def scenario(running: Running) -> None:
        admin = await running.connect("the-broker's")
        await admin.request(1, "POST", "/v1/topics", {"name": "other", "partitions": 1})
        await admin.request(1, "PATCH", "/v1/topics/orders", {"token": "of-publishers"})
        client = await running.connect("of-publishers")
        await client.send(
            (1, publish("a")),
            (2, publish("b", topic="other")),
            (3, frames.Watch("billing", "m", 1)),
            (4, frames.Request("GET", "/v1/topics")),
        )
        assert isinstance(await client.answer(1), frames.Result)
        assert [await client.code(number) for number in (2, 3)] == ["wrong_token"] * 2
        refused = await client.answer(4)
        assert isinstance(refused, frames.Response)
        assert refused.status == 401
        await admin.send((2, publish("c")), (3, publish("d", topic="other")))
        assert await admin.code(2) == "wrong_token"
        assert isinstance(await admin.answer(3), frames.Result)
        assert await running.stored() == ["a"]

    run(scenario, token="the-broker's")


def test_connections_of_both_kinds_count_together() -> None:
    async def scenario(running: Running) -> None:
        first, second = await running.connect(), await running.connect()
        third = await running.open()
        await third.write(b"GET /healthz HTTP/1.1\r\nHost: broker\r\n\r\n")
        for _ in range(2):
            with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                await running.connect()
            assert refused.value.status == 503
        before = CONNECTIONS.value
        await first.socket.close()
        while CONNECTIONS.value >= before:  # noqa: ASYNC110 it has no event for it
            await asyncio.sleep(0)
        assert await (await running.connect()).call(1, HEALTH) == await second.call(1, HEALTH)

    run(scenario, ServerLimits(connections=3))


def test_a_client_that_does_not_complete_its_request_is_cut() -> None:
    async def scenario(running: Running) -> None:
        client = await running.open()
        await client.write(f"GET {frames.PATH} HTTP/1.1\r\nUpgrade: websocket\r\nConnection: Upgr".encode())
        assert await client.ended() == b"", "it gets no response"

    run(scenario, ServerLimits(head_seconds=0.2))


# Messages that are refused


def test_what_is_no_array_of_frames_closes_the_connection_and_no_other(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(running: Running) -> None:
        other = await running.connect()
        for wrong in (b"", b"\xc0", b"\x91\x01", b"\x91" * 100_000, b"\xdd\xff\xff\xff\xff"):
            client = await running.connect()
            await client.socket.send_bytes(wrong)
            assert await client.closed() == CloseCode.MALFORMED
        client = await running.connect()
        await client.socket.send_str("[]")
        assert await client.closed() == CloseCode.MALFORMED
        assert await other.call(1, HEALTH) == frames.Response(200, b'{"alive":true}')

    with caplog.at_level(logging.WARNING):
        run(scenario)
    assert len(caplog.records) == 5, "one line for each message that can't be read"
    assert all("a connection from 127.0.0.1 was closed" in record.getMessage() for record in caplog.records)


def test_a_message_in_fragments_is_taken_with_pings_between_them() -> None:
    async def scenario(running: Running) -> None:
        client = await running.upgraded()
        (message,) = frames.messages([frames.encode_frame(1, publish("a"))])
        await client.frame(message[:10], fin=False)
        await client.frame(b"", CONTINUATION, fin=False)
        await client.frame(b"?", PING)
        assert (await client.receive())[1] == b"?"
        await client.frame(message[10:], CONTINUATION)
        _, answer = await client.receive()
        assert isinstance(frames.decode_answers(answer)[0][1], frames.Result)
        await client.frame(b"[", TEXT, fin=False)
        assert await client.closed() == CloseCode.MALFORMED

    run(scenario)


@pytest.mark.parametrize("declared", [MAX_MESSAGE_BYTES + 1, 2**63 - 1])
def test_a_message_that_is_too_large_closes_the_connection_before_it_came(declared: int) -> None:
    async def scenario(running: Running) -> None:
        client = await running.upgraded()
        await client.write(frame(b"\x91" * 1000, declared=declared))
        assert await client.closed() == 1009

    run(scenario)


def test_a_client_that_goes_on_sending_a_message_that_is_too_large_gets_the_code() -> None:
    async def scenario(running: Running) -> None:
        client = await running.upgraded()
        sending = asyncio.create_task(client.frame(bytes(MAX_MESSAGE_BYTES + 1)))
        assert await client.closed() == 1009
        await sending

    run(scenario)


def test_what_is_no_websocket_frame_closes_the_connection() -> None:
    async def scenario(running: Running) -> None:
        client = await running.upgraded()
        await client.write(b"\x82\x01x")  # without a mask
        assert await client.closed() == 1002

    run(scenario)


def test_messages_beyond_the_common_limit_close_the_connection_and_small_ones_do_not() -> None:
    async def scenario(running: Running) -> None:
        before = BODY_BYTES.value
        large = frames.encode_frame(1, publish("a", size=700 * KIB))
        first, second, third = [await running.upgraded() for _ in range(3)]
        await first.write(frame(b"\x91" + large)[:-1])
        while BODY_BYTES.value < before + len(large):  # noqa: ASYNC110 it has no event for it
            await asyncio.sleep(0)
        await second.frame(b"\x91" + large)
        assert await second.closed() == CloseCode.OVERLOADED
        await third.frame(b"\x91" + frames.encode_frame(1, publish("small")))
        await third.receive()
        await first.write(large[-1:])
        await first.receive()
        assert await running.stored() == ["small", "a"]
        while BODY_BYTES.value != before:  # noqa: ASYNC110 it has no event for it
            await asyncio.sleep(0)
        await third.frame(b"\x91" + large)
        await third.receive()

    run(scenario, ServerLimits(body_bytes=1024 * KIB))


def test_a_client_that_goes_away_gives_the_memory_of_its_messages_back() -> None:
    async def scenario(running: Running) -> None:
        before = BODY_BYTES.value
        client = await running.upgraded()
        await client.write(frame(bytes(300 * KIB), declared=600 * KIB))
        while BODY_BYTES.value < before + 300 * KIB:  # noqa: ASYNC110 it has no event for it
            await asyncio.sleep(0)
        client.close()
        while BODY_BYTES.value >= before + 300 * KIB:  # noqa: ASYNC110 it has no event for it
            await asyncio.sleep(0)
        assert BODY_BYTES.value == before

    run(scenario)


def test_a_message_counts_from_its_first_byte_even_if_that_came_with_the_end_of_another_one() -> None:
    async def scenario(running: Running) -> None:
        before = BODY_BYTES.value
        client = await running.upgraded()
        small = frame(b"\x91" + frames.encode_frame(1, publish("a")))
        large = frame(b"\x91" + frames.encode_frame(2, publish("b", size=200 * KIB)))
        await client.write(small + large[: 100 * KIB])
        await client.receive()
        await client.write(large[100 * KIB : -1])
        while BODY_BYTES.value < before + len(large) - 1:  # noqa: ASYNC110 it has no event for it
            await asyncio.sleep(0)
        await client.write(large[-1:])
        await client.receive()
        assert BODY_BYTES.value == before

    run(scenario)


# Clients that make no progress


def test_a_message_of_which_no_more_comes_closes_the_connection() -> None:
    async def scenario(running: Running) -> None:
        clients = [await running.upgraded() for _ in range(3)]
        message = frame(b"\x91" + frames.encode_frame(1, HEALTH))
        await clients[0].write(message[:-1])
        await clients[1].frame(b"\x91", fin=False)
        await clients[2].write(message + message[:3])
        assert [await client.closed() for client in clients] == [CloseCode.STALLED] * 3

    run(scenario, ServerLimits(stalled_seconds=0.3, idle_seconds=30.0))


@pytest.mark.parametrize("sends", ["nothing", "ping", "call"])
def test_a_client_from_which_nothing_comes_is_idle_and_not_stalled(sends: str) -> None:
    async def scenario(running: Running) -> None:
        client = await running.upgraded()
        if sends == "ping":
            await client.frame(b"?", PING)
        elif sends == "call":
            await client.frame(b"\x91" + frames.encode_frame(1, HEALTH))
        assert await client.closed() == CloseCode.IDLE

    run(scenario, ServerLimits(stalled_seconds=0.2, idle_seconds=0.8))


def test_pings_keep_a_connection_open() -> None:
    async def scenario(running: Running) -> None:
        silent, pinging = await running.upgraded(), await running.upgraded()
        closed = asyncio.create_task(silent.closed())
        while not closed.done():
            await pinging.frame(b"?", PING)
            assert (await pinging.receive())[1] == b"?"
            await asyncio.wait([closed], timeout=0.1)
        assert await closed == CloseCode.IDLE
        await pinging.frame(b"\x91" + frames.encode_frame(1, HEALTH))
        assert (await pinging.receive())[0] != CLOSE

    run(scenario, ServerLimits(stalled_seconds=0.2, idle_seconds=1.0))


def test_a_client_that_does_not_read_is_closed_and_others_are_served_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    codes: list[CloseCode] = []
    close = WebSocketConnection.close

    def note_close(self: WebSocketConnection, code: CloseCode, reason: str = "") -> None:
        codes.append(code)
        close(self, code, reason)

    monkeypatch.setattr(WebSocketConnection, "close", note_close)
    monkeypatch.setattr(websocket, "CLOSING_SECONDS", 0.5)

    async def scenario(running: Running) -> None:
        other = await running.connect()
        await other.send(*((number, publish(f"{number}", size=900 * KIB)) for number in range(16)))
        for number in range(16):
            assert isinstance(await other.answer(number), frames.Result)
        before = WEBSOCKETS.value
        stuck = await running.upgraded(64 * KIB)
        fetch = frames.Request("GET", "/v1/topics/orders/records", {"offset": "0", "limit": "16"})
        for message in frames.messages(frames.encode_frame(number, fetch) for number in range(3)):
            await stuck.frame(message)
        served = 0
        while WEBSOCKETS.value > before:
            assert await other.call(100 + served, publish(f"other-{served}")) is not None
            served += 1
        assert served > 10
        assert codes == [CloseCode.NOT_READING]

    run(scenario, ServerLimits(unread_seconds=0.5, stalled_seconds=0.5))


def test_while_too_much_is_in_progress_no_more_messages_are_read() -> None:
    """The rest waits in the client, and is taken later."""

    async def scenario(running: Running) -> None:
        client = await running.connect()
        calls = [(number, publish(f"{number}", size=50 * KIB)) for number in range(40)]
        for call in calls:
            await client.send(call)
        for number, _ in calls:
            assert isinstance(await client.answer(number), frames.Result)
        assert len(await running.stored()) == 40

    run(scenario, ServerLimits(call_bytes=60 * KIB))


def test_errors_on_connections_are_counted() -> None:
    async def scenario(running: Running) -> None:
        series = ERRORS.series("unknown_topic")
        before = series.value
        client = await running.connect()
        await client.send((1, publish("a", topic="nope")))
        assert await client.code(1) == "unknown_topic"
        assert series.value == before + 1
        async with running.session.get(f"{running.url}/metrics") as response:
            shown = await response.text()
        assert 'shardyard_calls_total{kind="publish"}' in shown
        assert f"shardyard_websockets {WEBSOCKETS.value!r}" in shown

    run(scenario)


def test_an_answer_is_decoded_as_messagepack() -> None:
    async def scenario(running: Running) -> None:
        client = await running.connect()
        stored = await client.result(2**53, publish("a", "b"))
        epoch = (await running.log.topic("orders")).epoch
        where = {"topic": "orders", "partition": 0, "epoch": epoch, "offset": 0, "count": 2, "duplicate": False}
        assert stored == {"stored": [where], "delayed": 0}
        arrow = msgspec.structs.replace(publish("c"), records=b"no Arrow stream")
        await client.send((1, arrow))
        assert await client.code(1) == "malformed"

    run(scenario)
