"""WebSocket connections and HTTP as the carriers of a client: which one is used, and what happens when it is lost."""

import asyncio
import contextlib
import logging
import random
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from shardyard.client import Brokers, Consumer, Producer, connections, websocket
from shardyard.client.brokers import CarrierName
from shardyard.client.connections import HTTP_SECONDS
from shardyard.client.websocket import NoWebSocket, WebSocketCarrier
from shardyard.model import Busy, InvalidCall, InvalidValue, Record, TooLarge, Unreachable, WrongToken
from shardyard.runtime.clock import ManualClock
from shardyard.runtime.metrics import CALLS, REQUESTS, WEBSOCKETS
from shardyard.server.queues import calls
from shardyard.wire import frames, requests
from shardyard.wire.columns import RecordColumns
from shardyard.wire.media import MAX_BODY_BYTES
from tests.client.proxies import HttpProxy, TcpProxy, losing_answers
from tests.queues.setup import Cluster, Handled, run

PUBLISHED = REQUESTS.series("/v1/topics/{topic}/records", "200")
"""Publishes over HTTP."""
CARRIERS: list[CarrierName] = ["websocket", "http"]


def published() -> tuple[float, float]:
    """How many publishes came on connections, and over HTTP."""
    return CALLS.series("publish").value, PUBLISHED.value


# Which one is used


@pytest.mark.parametrize(
    ("carrier", "on_connection", "over_http"), [("auto", 1, 0), ("websocket", 1, 0), ("http", 0, 1)]
)
def test_a_client_uses_a_connection_unless_it_is_told_otherwise(
    carrier: CarrierName, on_connection: int, over_http: int
) -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=1)
        open_before, before = WEBSOCKETS.value, published()
        async with cluster.producer(carrier=carrier) as producer:
            await producer.publish("orders", [Record.new(b"a")])
            assert published() == (before[0] + on_connection, before[1] + over_http)
            assert WEBSOCKETS.value == open_before + on_connection
        await cluster.until(lambda: WEBSOCKETS.value == open_before)

    run(scenario)


def test_a_client_uses_one_connection_for_everything() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=3)
        before = WEBSOCKETS.value
        handled = Handled()
        async with Brokers(cluster.urls) as brokers, Producer(brokers) as producer:
            await asyncio.gather(*(producer.send("orders", f"{i}", key=f"{i}") for i in range(50)))
            async with handled.at_work(Consumer(brokers, "billing", ["orders"])):
                await cluster.until_done()
                assert WEBSOCKETS.value == before + 1
        assert len(handled.values) == 50

    run(scenario)


def test_an_unknown_carrier_is_refused() -> None:
    with pytest.raises(InvalidValue, match="one of auto, websocket, http"):
        Brokers("127.0.0.1:7400", carrier="quic")  # type: ignore[arg-type]


# Where no WebSocket gets through


@pytest.mark.parametrize("status", [400, 403, 404, 426, 501, 502, 200, 302, None])
def test_a_client_falls_back_to_http_with_one_warning(status: int | None, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=2)
        proxy = HttpProxy(cluster.urls[0], status)
        handled = Handled()
        async with proxy.running() as url:
            before = published()
            async with Brokers(url) as brokers, Producer(brokers) as producer:
                await asyncio.gather(*(producer.send("orders", f"{i}", key=f"{i}") for i in range(20)))
                async with handled.at_work(Consumer(brokers, "billing", ["orders"])):
                    await cluster.until_done()
            assert published()[0] == before[0]
            assert published()[1] > before[1]
            assert proxy.upgrades == 1
            async with Brokers(url, carrier="websocket", retry_seconds=0.2) as brokers:
                with pytest.raises(Unreachable, match="it takes no WebSocket connections: status"):
                    await brokers.get("/healthz")
        assert sorted(map(int, handled.values)) == list(range(20))

    with caplog.at_level(logging.WARNING, "shardyard"):
        run(scenario)
    assert len([record for record in caplog.records if "using HTTP" in record.message]) == 1


def test_a_client_on_http_tries_a_connection_again_after_a_while() -> None:
    async def scenario(cluster: Cluster) -> None:
        clock, proxy = ManualClock(), HttpProxy(cluster.urls[0], 404)
        async with proxy.running() as url, Brokers(url, clock=clock) as brokers:
            tried = []
            for seconds in (0.0, HTTP_SECONDS - 1.0, 2.0, HTTP_SECONDS - 1.0, 2.0):
                await clock.advance(seconds)
                await brokers.get("/healthz")
                tried.append(proxy.upgrades)
            assert tried == [1, 1, 2, 2, 3]

    run(scenario)


def test_the_end_of_a_fallback_is_logged_and_another_one_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    passes = False

    async def connect(session: aiohttp.ClientSession, url: str) -> WebSocketCarrier:
        if not passes:
            raise NoWebSocket("status 404")
        return await websocket.connect(session, url)

    monkeypatch.setattr(connections, "connect", connect)

    async def scenario(cluster: Cluster) -> None:
        nonlocal passes
        clock = ManualClock()
        async with Brokers(cluster.urls, clock=clock) as brokers:
            for lets_through in (False, False, True):
                passes = lets_through
                await brokers.get("/healthz")
                await clock.advance(HTTP_SECONDS + 1)
            carrier = await brokers.connect(1.0)
            assert isinstance(carrier, WebSocketCarrier)
            await carrier.close()
            passes = False
            await brokers.get("/healthz")

    with caplog.at_level(logging.INFO, "shardyard.client.connections"):
        run(scenario)
    logged = [record.message for record in caplog.records if record.name == "shardyard.client.connections"]
    assert ["using HTTP" in message for message in logged] == [True, False, True]
    assert logged[1].endswith("takes WebSocket connections again")


@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_wrong_token_is_reported_at_once(carrier: CarrierName) -> None:
    async def scenario(cluster: Cluster) -> None:
        for token in (None, "wrong"):
            async with cluster.producer(carrier=carrier, token=token) as producer:
                with pytest.raises(WrongToken):
                    await producer.send("orders", "a")
            async with Brokers(cluster.urls, carrier=carrier, token=token) as brokers:
                with pytest.raises(WrongToken):
                    await brokers.get("/v1/topics")
        async with Brokers(cluster.urls, carrier=carrier, token="the-broker's") as brokers:
            await brokers.get("/v1/topics")

    run(scenario, token="the-broker's")


# Brokers that are lost


def test_a_broker_that_can_not_take_a_connection_for_now_is_failed_over_from() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=1)
        async with HttpProxy(cluster.urls[0], 503).running() as url:
            before = published()
            async with Producer([url, *cluster.urls]) as producer:
                for _ in range(3):
                    await producer.send("orders", "a")
            assert published() == (before[0] + 3, before[1])

    run(scenario)


@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_broker_that_stops_is_failed_over_from(carrier: CarrierName) -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=2)
        handled = Handled()
        async with Brokers(cluster.urls, carrier=carrier) as brokers, Producer(brokers) as producer:
            brokers._at = 1
            consumer = Consumer(brokers, "billing", ["orders"], session_timeout=10.0)
            async with handled.at_work(consumer):
                await cluster.until_shared(2)
                identity = consumer.member.identity
                sending = [asyncio.create_task(producer.send("orders", f"{i}", key=f"{i}")) for i in range(1000)]
                await asyncio.wait(sending, return_when=asyncio.FIRST_COMPLETED)
                cluster.stop(1)
                await asyncio.gather(*sending)
                await cluster.until_done()
                assert consumer.member.identity == identity
        assert Counter(handled.values) == Counter(f"{i}" for i in range(1000))

    run(scenario, brokers=2)


def test_a_connection_that_dies_silently_is_noticed_by_its_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(cluster: Cluster) -> None:
        monkeypatch.setattr(websocket, "PING_SECONDS", 0.4)
        await cluster.topic(partitions=1)
        proxy = TcpProxy(cluster.urls[0])
        async with proxy.running() as url, Producer(url, carrier="websocket") as producer:
            await producer.send("orders", "a")
            proxy.stop()
            began = asyncio.get_running_loop().time()
            await producer.send("orders", "b")
            assert asyncio.get_running_loop().time() - began < 4, "far below the time for a response"
            assert proxy.accepted == 2
        (records,) = await cluster.records()
        assert [record.value for record in records] == [b"a", b"b"]

    run(scenario)


@pytest.mark.parametrize("is_sending", [False, True])
def test_a_client_is_closed_soon_although_its_broker_hangs(is_sending: bool) -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=1)
        proxy = TcpProxy(cluster.urls[0])
        async with proxy.running() as url, Brokers(url, carrier="websocket") as brokers:
            async with Producer(brokers) as producer:
                await producer.send("orders", "a")
                proxy.stop()
                if is_sending:
                    large = [Record.new(b"x" * 900_000) for _ in range(20)]
                    publishing = asyncio.create_task(producer.publish("orders", large))
                    await asyncio.wait([publishing], timeout=0.2)
                    publishing.cancel()
                    await asyncio.wait([publishing])
            began = asyncio.get_running_loop().time()
            await brokers.__aexit__(None, None, None)
            assert asyncio.get_running_loop().time() - began < 5

    run(scenario)


def test_pings_keep_a_connection_without_calls_open(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(cluster: Cluster) -> None:
        monkeypatch.setattr(websocket, "PING_SECONDS", 0.1)
        proxy = TcpProxy(cluster.urls[0])
        async with proxy.running() as url, Brokers(url, carrier="websocket") as brokers:
            first = await brokers.connect(5.0)
            await asyncio.sleep(1.0)  # ten pings
            assert await brokers.connect(5.0) is first
            await brokers.get("/healthz")
            assert proxy.accepted == 1

    run(scenario)


@pytest.mark.parametrize("carrier", CARRIERS)
def test_what_is_too_large_for_a_message_is_refused_before_it_is_sent(carrier: CarrierName) -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=1)
        async with Brokers(cluster.urls, carrier=carrier) as brokers:
            with pytest.raises(TooLarge):
                await brokers.call("POST", "/v1/topics", b" " * (MAX_BODY_BYTES + 1))
            await brokers.get("/healthz")

    run(scenario)


# Resuming


def kind_of(call: frames.Call) -> str:
    """Of a request, its method and the last word of its path that is no name."""
    if not isinstance(call, frames.Request):
        return type(call).__name__
    return f"{call.method} {call.path.rpartition('/')[2]}"


def check_stored(stored: list[list[Record]], count: int) -> None:
    """Each record is stored once, and those of a key in the order in which they were sent."""
    assert Counter(int(record.value) for partition in stored for record in partition) == Counter(range(count))
    for partition in stored:
        for key in {record.key for record in partition}:
            numbers = [int(record.value) for record in partition if record.key == key]
            assert numbers == sorted(numbers), key


def test_lost_answers_do_no_harm(tmp_path: Path) -> None:
    """Each kind of call loses its first answer, with the connection."""
    lost = set[str]()

    def lose(call: frames.Call, answer: frames.Answer) -> bool:
        kind = kind_of(call)
        failed = isinstance(answer, frames.Failed) or (isinstance(answer, frames.Response) and answer.status >= 400)
        if failed or kind in lost or kind.startswith("GET"):
            return False
        lost.add(kind)
        return True

    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=4)
        handled = Handled()
        async with losing_answers(cluster.urls[0], lose) as url:
            options: dict[str, Any] = {"carrier": "websocket", "session_timeout": 5.0}
            first = Consumer(url, "billing", ["orders"], name="first", **options)
            second = Consumer(url, "billing", ["orders"], name="second", **options)
            async with Producer(url, carrier="websocket") as producer, handled.at_work(first):
                await cluster.until_shared(4)
                await asyncio.gather(*(producer.send("orders", f"{i}", key=f"k{i % 20}") for i in range(1000)))
                async with handled.at_work(second):
                    await cluster.until_shared(2, 2)
                    more = range(1000, 2000)
                    await asyncio.gather(*(producer.send("orders", f"{i}", key=f"k{i % 20}") for i in more))
                    await cluster.until_done()
                    await cluster.until(lambda: "Heartbeat" in lost)
                await cluster.until_shared(4)
                while "POST release" not in lost:  # the answer was lost with the connection of another call
                    async with handled.at_work(Consumer(url, "billing", ["orders"], name="third", **options)):
                        await cluster.until_shared(2, 2)
                    await cluster.until_shared(4)
        expected = {"Publish", "Read", "Commit", "Heartbeat", "Watch", "Fence", "Span", "Assignment"}
        assert lost >= {*expected, "POST members", "POST release", "DELETE second"}
        check_stored(await cluster.records(), 2000)
        assert sorted(set(map(int, handled.values))) == list(range(2000))

    run(scenario, tmp_path)


@pytest.mark.parametrize(
    ("seed", "count", "pauses"),
    [*((seed, 6000, 0.005) for seed in range(3)), *((seed, 1500, 0.5) for seed in range(3))],
)
def test_pipelined_records_stay_in_order_while_publishes_are_refused_and_connections_cut(
    seed: int, count: int, pauses: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large batches, and small ones that are sent because the one before is not durable after a moment."""

    async def scenario(cluster: Cluster) -> None:
        chance = random.Random(seed)
        publish = calls.publish
        refused = 0

        async def refuse_some(*arguments: Any) -> Any:
            nonlocal refused
            if chance.random() < 0.25:
                refused += 1
                raise Busy("the log", 0.0)
            await asyncio.sleep(chance.choice((0.0, 0.0, 0.005)))
            if chance.random() < 0.1:
                await publish(*arguments)
                refused += 1
                raise Busy("the log", 0.0)  # it was stored all the same
            return await publish(*arguments)

        monkeypatch.setattr(calls, "publish", refuse_some)
        await cluster.topic(partitions=3)
        proxies = [TcpProxy(url) for url in cluster.urls]
        async with contextlib.AsyncExitStack() as stack:
            urls = [await stack.enter_async_context(proxy.running()) for proxy in proxies]
            producer = await stack.enter_async_context(Producer(urls, carrier="websocket"))
            sending: list[asyncio.Task[str]] = []
            for number in range(count):
                sending.append(asyncio.create_task(producer.send("orders", f"{number}", key=f"k{number % 10}")))
                if chance.random() < pauses:
                    await asyncio.sleep(chance.choice((0.0, 0.002, 0.01)))
                if number % (count // 6) == count // 12:
                    await asyncio.sleep(0.01 * chance.random())
                    for proxy in proxies:
                        proxy.cut()
            await asyncio.gather(*sending)
        assert refused > 3
        assert sum(proxy.accepted for proxy in proxies) > 3
        check_stored(await cluster.records(), count)

    run(scenario, tmp_path, brokers=2)


def test_records_stay_in_order_while_a_slow_broker_makes_them_wait_and_they_are_sent_to_another_one(
    tmp_path: Path,
) -> None:
    async def scenario(cluster: Cluster) -> None:
        chance = random.Random(1)
        await cluster.topic(partitions=2)
        await cluster.topic("bulk", partitions=1)
        proxies = [TcpProxy(url) for url in cluster.urls]
        large = [Record.new(b"x" * 900_000) for _ in range(16)]
        async with contextlib.AsyncExitStack() as stack:
            urls = [await stack.enter_async_context(proxy.running()) for proxy in proxies]
            brokers = await stack.enter_async_context(Brokers(urls, carrier="websocket"))
            brokers.failover_seconds = 0.3
            producer = await stack.enter_async_context(Producer(brokers))
            sending: list[asyncio.Task[str]] = []
            for turn in range(3):
                slow = proxies[brokers._at % 2]
                slow.flowing.clear()
                publishing = asyncio.create_task(producer.publish("bulk", large))
                for number in range(turn * 500, (turn + 1) * 500):
                    sending.append(asyncio.create_task(producer.send("orders", f"{number}", key=f"k{number % 5}")))
                    if chance.random() < 0.02:
                        await asyncio.sleep(chance.choice((0.0, 0.01, 0.05)))
                await asyncio.gather(*sending)
                slow.flowing.set()
                await publishing
        check_stored(await cluster.records(), 1500)

    run(scenario, tmp_path, brokers=2)


def test_a_publish_that_is_refused_before_it_is_sent_does_not_change_the_order_of_its_lane() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=1)

        def call(id_: str, size: int = 1) -> frames.Publish:
            return frames.Publish("orders", RecordColumns([id_], [b"x" * size], [1]), requests.Publish())

        async with aiohttp.ClientSession() as session:
            carrier = await websocket.connect(session, cluster.urls[0])
            lane = object()
            first = asyncio.create_task(carrier.publish(call("first"), 5.0, lane))
            refused = asyncio.create_task(carrier.publish(call("large", MAX_BODY_BYTES), 5.0, lane))
            last = asyncio.create_task(carrier.publish(call("last"), 5.0, lane))
            with pytest.raises(TooLarge):
                await refused
            await asyncio.gather(first, last)
            await carrier.close()
        (records,) = await cluster.records()
        assert [record.id for record in records] == ["first", "last"]

    run(scenario)


def test_a_connection_that_the_broker_closes_for_good_says_why() -> None:
    async def scenario(cluster: Cluster) -> None:
        async with aiohttp.ClientSession() as session:
            carrier = await websocket.connect(session, cluster.urls[0])
            await carrier._socket.send_bytes(b"\xc1")
            with pytest.raises(InvalidCall, match=r"with code 4200 \(.+\): see docs/protocol.md"):
                await carrier.span(frames.Span("orders/0"), 5.0)
            await carrier.close()

    run(scenario)
