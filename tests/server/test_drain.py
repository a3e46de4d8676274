"""Long polls and the drain of a server: what waits is answered, what is in flight is finished, then it stops."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from uvicorn import Server

from shardyard.log.memory import MemoryLog
from shardyard.queues.broker import Broker
from shardyard.registry.memory import MemoryRegistry
from shardyard.runtime.clock import ManualClock, SystemClock
from shardyard.runtime.metrics import LONG_POLLS_WAITING
from shardyard.server.app import create_app, running, serving
from shardyard.server.drain import Drain, LongPoll
from tests.server.asgi import call

BODY = b'{"value": "x"}'
HEAD = (
    b"POST /v1/topics/orders/records HTTP/1.1\r\nHost: broker\r\nContent-Length: %d\r\nExpect: 100-continue\r\n\r\n"
    % len(BODY)
)


async def run_tasks() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_a_long_poll_returns_what_it_waited_for() -> None:
    async def scenario() -> None:
        poll = LongPoll(Drain(), SystemClock(), 30.0)
        ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        before = LONG_POLLS_WAITING.value
        waiting = asyncio.create_task(poll.wait(ready))
        await run_tasks()
        assert LONG_POLLS_WAITING.value == before + 1
        ready.set_result("a record")
        assert await waiting == "a record"
        assert LONG_POLLS_WAITING.value == before
        assert not poll.over

    asyncio.run(scenario())


def test_a_long_poll_is_over_at_its_deadline() -> None:
    async def scenario() -> None:
        clock = ManualClock()
        poll = LongPoll(Drain(), clock, 30.0)
        await clock.advance(29.0)
        assert (poll.left, poll.over) == (1.0, False)
        await clock.advance(2.0)
        assert (poll.left, poll.over) == (0.0, True)

    asyncio.run(scenario())


def test_a_drain_interrupts_long_polls_and_later_ones_do_not_wait() -> None:
    async def scenario() -> None:
        drain = Drain()
        polls = [LongPoll(drain, SystemClock(), 30.0) for _ in range(3)]
        waiting = [asyncio.create_task(poll.wait(asyncio.Event().wait())) for poll in polls]
        await run_tasks()
        drain.start()
        drain.start()
        assert await asyncio.gather(*waiting) == [None] * 3
        assert all(poll.over for poll in polls)
        assert await LongPoll(drain, SystemClock(), 30.0).wait(asyncio.Event().wait()) is None

    asyncio.run(scenario())


def test_errors_and_cancellations_of_a_long_poll_are_not_taken_for_a_drain() -> None:
    async def time_out() -> None:
        raise TimeoutError("of the log")

    async def scenario() -> None:
        poll = LongPoll(Drain(), SystemClock(), 30.0)
        with pytest.raises(TimeoutError, match="of the log"):
            await poll.wait(time_out())
        waiting = asyncio.create_task(poll.wait(asyncio.Event().wait()))
        await run_tasks()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(scenario())


@contextlib.asynccontextmanager
async def open_server(drain_seconds: float) -> AsyncIterator[tuple[Server, int, "asyncio.Task[None]", MemoryLog]]:
    async with MemoryLog() as log:
        await log.create_topic("orders", 1)
        with MemoryRegistry() as registry:
            async with serving(log, registry, port=0, drain_seconds=drain_seconds) as server:
                listening = server.config.bind_socket()
                listening.listen()
                port = listening.getsockname()[1]
                work = asyncio.create_task(server.serve([listening]))
                try:
                    async with asyncio.timeout(20):
                        yield server, port, work, log
                finally:
                    server.should_exit = True
                    await work


async def refused(port: int) -> None:
    """Wait until no connection is accepted any more."""
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except (ConnectionRefusedError, ConnectionResetError):
            return
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def in_flight(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A publish whose body the server waits for."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /healthz HTTP/1.1\r\nHost: broker\r\n\r\n")
    await reader.readuntil(b'{"alive":true}')
    writer.write(HEAD)
    await reader.readuntil(b"HTTP/1.1 100 Continue\r\n\r\n")
    return reader, writer


def test_a_server_that_stops_finishes_requests_in_flight_and_accepts_no_others() -> None:
    async def scenario() -> None:
        async with open_server(10.0) as (server, port, work, log):
            reader, writer = await in_flight(port)
            server.should_exit = True
            await refused(port)
            assert not work.done()
            writer.write(BODY)
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200")
            assert b"connection: close" in head.lower()
            await work
            writer.close()
            (topic,) = [topic for topic in await log.topics() if topic.name == "orders"]
            (partition,) = topic
            assert (await log.span(partition)).end == 1

    asyncio.run(scenario())


def test_a_server_that_stops_gives_requests_in_flight_up_after_a_time() -> None:
    async def scenario() -> None:
        async with open_server(0.1) as (server, port, work, log):
            reader, writer = await in_flight(port)
            server.should_exit = True
            await work
            assert b"200 OK" not in await reader.read()
            writer.close()
            (topic,) = [topic for topic in await log.topics() if topic.name == "orders"]
            (partition,) = topic
            assert (await log.span(partition)).end == 0

    asyncio.run(scenario())


def test_a_server_that_stops_answers_long_polls_at_once() -> None:
    async def scenario() -> None:
        async with open_server(10.0) as (server, port, work, _):
            before = LONG_POLLS_WAITING.value
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /v1/groups/g/changes?wait_seconds=30 HTTP/1.1\r\nHost: broker\r\n\r\n")
            while LONG_POLLS_WAITING.value == before:  # noqa: ASYNC110 it has no event for it
                await asyncio.sleep(0)
            started = asyncio.get_running_loop().time()
            server.should_exit = True
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            assert asyncio.get_running_loop().time() - started < 5
            await work
            writer.close()

    asyncio.run(scenario())


def test_a_long_poll_of_a_server_ends_by_the_clock_that_was_injected() -> None:
    async def scenario() -> None:
        clock = ManualClock()
        with MemoryRegistry(clock) as registry:
            async with asyncio.timeout(20), MemoryLog() as log, running(log, registry, clock=clock) as url:
                before = LONG_POLLS_WAITING.value
                reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
                writer.write(b"GET /v1/groups/g/changes?wait_seconds=30 HTTP/1.1\r\nHost: broker\r\n\r\n")
                while LONG_POLLS_WAITING.value == before:  # noqa: ASYNC110 it has no event for it
                    await asyncio.sleep(0)
                await run_tasks()
                await clock.advance(30.0)
                assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
                writer.close()

    asyncio.run(scenario())


def test_a_broker_about_to_stop_is_not_ready() -> None:
    async def scenario() -> None:
        drain = Drain()
        async with MemoryLog() as log:
            with MemoryRegistry() as registry:
                async with Broker(log, registry) as broker:
                    app = create_app(broker, drain)
                    assert (await call(app, "GET", "/readyz")).json["ready"] is True
                    drain.start()
                    response = await call(app, "GET", "/readyz")
                    assert (response.status, response.headers["retry-after"]) == (503, "1")
                    assert (await call(app, "GET", "/healthz")).status == 200

    asyncio.run(scenario())
