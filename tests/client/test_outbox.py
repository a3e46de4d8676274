"""Calls that wait because a broker reads slowly: which are sent first, and which are not sent any more."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from shardyard.client.outbox import Outbox
from shardyard.client.websocket import WebSocketCarrier, connect
from shardyard.model import EarlierPublishFailed
from shardyard.runtime.clock import SystemClock
from shardyard.wire import frames, requests
from shardyard.wire.columns import RecordColumns
from tests.client.proxies import serving

LARGE = 16 * 1024 * 1024
"""Bytes that do not fit into what the kernel takes of a connection that is not read."""
SECONDS = 20.0


class SlowBroker:
    """Reads nothing until it is told to, and answers nothing."""

    def __init__(self) -> None:
        self._reads = asyncio.Event()
        self._received: asyncio.Queue[frames.Call] = asyncio.Queue()

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncIterator[WebSocketCarrier]:
        """A connection to it, on which nothing gets through for now."""
        app = web.Application()
        app.router.add_get(frames.PATH, self._receive)
        async with serving(app) as url, aiohttp.ClientSession() as session:
            carrier = await connect(session, url)
            yield carrier
            await carrier.close()

    async def _receive(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(protocols=[frames.SUBPROTOCOL], max_msg_size=2 * LARGE)
        await socket.prepare(request)
        assert request.transport is not None
        assert isinstance(request.transport, asyncio.Transport)
        request.transport.pause_reading()
        await self._reads.wait()
        request.transport.resume_reading()
        async for message in socket:
            for _, call in frames.decode_calls(message.data):
                assert not isinstance(call, Exception)
                self._received.put_nowait(call)
        return socket

    async def reads_until(self, last: str) -> list[str]:
        """What it gets when it reads, by the name of each call, up to the one of this name."""
        self._reads.set()
        names: list[str] = []
        while names[-1:] != [last]:
            names.append(name_of(await asyncio.wait_for(self._received.get(), SECONDS)))
        return names


def name_of(call: frames.Call) -> str:
    """Of a publish, the id of its record."""
    if isinstance(call, frames.Publish):
        assert isinstance(call.records, RecordColumns)
        return call.records.ids[0]
    return type(call).__name__


def publish(name: str, size: int = 1) -> frames.Publish:
    return frames.Publish("orders", RecordColumns([name], [b"x" * size], [1]), requests.Publish())


HEARTBEAT = frames.Heartbeat("billing", "m1", requests.Heartbeat(1))
COMMIT = frames.Commit("billing", "m1", requests.Commit(1, {}))
READ = frames.Read("billing", "orders/0", requests.Read(0, 1, wait_seconds=SECONDS))
LAST = frames.Span("orders/0")

Scenario = Callable[[SlowBroker, WebSocketCarrier], Awaitable[None]]


def run(scenario: Scenario) -> None:
    async def whole() -> None:
        broker = SlowBroker()
        async with broker.connected() as carrier:
            await scenario(broker, carrier)

    asyncio.run(whole())


async def begin(*calls: Awaitable[object]) -> "list[asyncio.Future[object]]":
    """Make calls, one after the other, and wait until the first message is on its way."""
    begun: list[asyncio.Future[object]] = []
    for call in calls:
        begun.append(asyncio.ensure_future(call))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    return begun


async def give_up(*calls: "asyncio.Future[object]") -> None:
    for call in calls:
        call.cancel()
    await asyncio.wait(calls)


def test_heartbeats_and_commits_are_sent_before_large_publishes_that_wait() -> None:
    async def scenario(broker: SlowBroker, carrier: WebSocketCarrier) -> None:
        lane = object()
        names = ["first", "second", "third", "fourth"]
        sizes = [LARGE, LARGE, 1, LARGE]
        calls = await begin(
            *(carrier.publish(publish(*each), SECONDS, lane) for each in zip(names, sizes, strict=True)),
            carrier.heartbeat(HEARTBEAT, SECONDS),
            carrier.commit(COMMIT, SECONDS),
        )
        received = await broker.reads_until("fourth")
        assert received == ["first", "Heartbeat", "Commit", "second", "third", "fourth"]
        await give_up(*calls)

    run(scenario)


def test_what_was_given_up_before_it_was_sent_is_not_sent() -> None:
    async def scenario(broker: SlowBroker, carrier: WebSocketCarrier) -> None:
        (first,) = await begin(carrier.publish(publish("first", LARGE), SECONDS))
        for late in (
            carrier.publish(publish("late"), 0.01),
            carrier.commit(COMMIT, 0.01),
            carrier.read(READ, -SECONDS),
        ):
            with pytest.raises(ConnectionError, match="no response in time"):
                await late
        await give_up(*await begin(carrier.heartbeat(HEARTBEAT, SECONDS), carrier.read(READ, SECONDS)))
        watch = carrier.watch(frames.Watch("billing", "m1", 1), SECONDS, SystemClock())
        watch.close()
        last = await begin(carrier.span(LAST, SECONDS))
        assert await broker.reads_until("Span") == ["first", "Span"]
        await give_up(first, *last)

    run(scenario)


def test_a_read_that_was_sent_is_cancelled() -> None:
    async def scenario(broker: SlowBroker, carrier: WebSocketCarrier) -> None:
        (reading,) = await begin(carrier.read(READ, SECONDS))
        await broker.reads_until("Read")
        await give_up(reading)
        assert await broker.reads_until("Cancel") == ["Cancel"]

    run(scenario)


def test_what_is_to_be_stored_after_a_publish_that_is_not_sent_is_not_sent_either() -> None:
    async def scenario(broker: SlowBroker, carrier: WebSocketCarrier) -> None:
        lane, other = object(), object()
        first, late, second, third, elsewhere = await begin(
            carrier.publish(publish("first", LARGE), SECONDS, lane),
            carrier.publish(publish("late"), 0.1, lane),
            carrier.publish(publish("second"), SECONDS, lane),
            carrier.publish(publish("third"), SECONDS, lane),
            carrier.publish(publish("elsewhere"), SECONDS, other),
        )
        with pytest.raises(ConnectionError, match="no response in time"):
            await late
        for refused in (second, third):
            with pytest.raises(EarlierPublishFailed):
                await refused
        again = await begin(carrier.publish(publish("again"), SECONDS, lane), carrier.span(LAST, SECONDS))
        assert await broker.reads_until("again") == ["first", "Span", "elsewhere", "again"]
        await give_up(first, elsewhere, *again)

    run(scenario)


@given(st.lists(st.tuples(st.booleans(), st.sampled_from([1, 1000, frames.SHARED_BYTES, 2 * frames.SHARED_BYTES]))))
def test_an_outbox_sends_each_call_once_and_publishes_in_their_order(made: list[tuple[bool, int]]) -> None:
    outbox = Outbox()
    for number, (is_publish, size) in enumerate(made):
        call = publish("a", size) if is_publish else frames.Request("POST", "/", {}, {}, b"x" * size)
        outbox.put(number, call, frames.encode_frame(number, call))
    dropped = list(range(0, len(made), 3))
    assert all(map(outbox.drop, dropped))
    assert not any(map(outbox.drop, dropped)), "once"
    sent: list[int] = []
    while outbox:
        message = outbox.take()
        numbers = [number for number, _ in frames.decode_calls(message)]
        assert len(numbers) == 1 or len(message) <= frames.SHARED_BYTES + 5
        sent += numbers
    assert sorted(sent) == [number for number in range(len(made)) if number not in dropped]
    publishes = [number for number in sent if made[number][0]]
    assert publishes == sorted(publishes)
