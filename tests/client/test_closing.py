"""Closing a client while it connects, or while its broker hangs: no connection is left behind."""

import asyncio
import contextlib
import gc
import warnings
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest
from aiohttp import web

from shardyard.client import Brokers
from shardyard.client.brokers import CarrierName
from shardyard.model import Closed
from shardyard.wire import frames
from tests.client.proxies import TcpProxy, serving
from tests.queues.setup import open_cluster


class SlowBroker:
    """Answers a request for a WebSocket connection when it is told to, and all others never."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.go = asyncio.Event()
        self.open = 0
        """Requests and connections that have not ended."""

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_get("/{path:.*}", self._answer)
        async with serving(app) as url:
            yield url

    async def _answer(self, request: web.Request) -> web.WebSocketResponse:
        self.open += 1
        try:
            self.asked.set()
            await (self.go if request.path == frames.PATH else asyncio.Event()).wait()
            socket = web.WebSocketResponse(protocols=[frames.SUBPROTOCOL])
            await socket.prepare(request)
            async for _ in socket:
                pass
            return socket
        finally:
            self.open -= 1

    async def until_left(self) -> None:
        """Wait until no request and no connection is open."""
        while self.open:  # noqa: ASYNC110 it has no event for it
            await asyncio.sleep(0)


def unclosed(scenario: Callable[[], Coroutine[Any, Any, None]]) -> list[str]:
    """What the garbage collection finds open after a scenario."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", ResourceWarning)
        asyncio.run(scenario())
        gc.collect()
    return [str(warning.message) for warning in found]


@pytest.mark.parametrize("carrier", ["auto", "websocket", "http"])
def test_calls_of_a_client_that_is_closed_while_it_connects_end(carrier: CarrierName) -> None:
    async def scenario() -> None:
        broker = SlowBroker()
        async with broker.running() as url:
            async with Brokers(url, carrier=carrier) as brokers:
                calls = [asyncio.create_task(brokers.get("/healthz")) for _ in range(3)]
                await broker.asked.wait()
            assert not brokers.is_open
            async with asyncio.timeout(60):
                outcomes = await asyncio.gather(*calls, return_exceptions=True)
                assert [repr(outcome) for outcome in outcomes] == [repr(Closed("the client"))] * 3
                await broker.until_left()

    assert unclosed(scenario) == []


def test_a_connection_that_is_opened_at_the_moment_of_closing_is_closed() -> None:
    """Whatever the turn of the event loop in which the broker agrees to it."""

    async def scenario() -> None:
        for turns in range(10):
            broker = SlowBroker()
            async with broker.running() as url:
                async with Brokers(url, carrier="websocket") as brokers:
                    call = asyncio.create_task(brokers.connect(10.0))
                    await broker.asked.wait()
                    broker.go.set()
                    for _ in range(turns):
                        await asyncio.sleep(0)
                (outcome,) = await asyncio.gather(call, return_exceptions=True)
                opened.append(not isinstance(outcome, BaseException))
                assert opened[-1] or isinstance(outcome, Closed), repr(outcome)
                await broker.until_left()

    opened: list[bool] = []
    assert unclosed(scenario) == []
    assert set(opened) == {False, True}, "closed before it was opened, and after"


def test_a_client_whose_closing_is_cancelled_leaves_nothing_open() -> None:
    async def scenario() -> None:
        async with open_cluster() as cluster:
            proxy = TcpProxy(cluster.urls[0])
            async with proxy.running() as url:
                brokers = await Brokers(url, carrier="websocket").__aenter__()
                await brokers.connect(10.0)
                proxy.stop()  # then nobody answers that the connection is closed
                closing = asyncio.create_task(brokers.__aexit__(None, None, None))
                await asyncio.wait([closing], timeout=0.05)
                closing.cancel()
                await asyncio.gather(closing, return_exceptions=True)
                assert closing.cancelled()
                assert not brokers.is_open

    assert unclosed(scenario) == []
