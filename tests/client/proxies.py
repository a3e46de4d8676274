"""Proxies between clients and brokers that refuse, lose or stop what goes through them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import aiohttp
from aiohttp import web

from shardyard.model import Malformed
from shardyard.wire import frames

Lose = Callable[[frames.Call, frames.Answer], bool]
"""Whether the connection is closed instead of forwarding the answer to a call."""


@contextlib.asynccontextmanager
async def serving(app: web.Application) -> AsyncIterator[str]:
    """The address of an application. A request that the client gives up is cancelled."""
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    try:
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


class HttpProxy:
    """Forwards HTTP requests to a broker. WebSocket requests get a status of its own, or go on without the headers that
    ask for an upgrade."""

    def __init__(self, url: str, status: int | None) -> None:
        """`status`: None strips the upgrade."""
        self._url = url
        self.status = status
        self.upgrades = 0
        """How many there were."""

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        app = web.Application(client_max_size=2**25)
        app.router.add_route("*", "/{path:.*}", self._forward)
        async with aiohttp.ClientSession() as self._session, serving(app) as url:
            yield url

    async def _forward(self, request: web.Request) -> web.Response:
        if "upgrade" in request.headers:
            self.upgrades += 1
            if self.status is not None:
                return web.Response(status=self.status)
        dropped = ("connection", "upgrade", "content-length", "transfer-encoding")
        headers = {name: value for name, value in request.headers.items() if name.lower() not in dropped}
        async with self._session.request(
            request.method, f"{self._url}{request.rel_url}", data=await request.read(), headers=headers
        ) as response:
            return web.Response(body=await response.read(), status=response.status, content_type=response.content_type)


@contextlib.asynccontextmanager
async def losing_answers(url: str, lose: Lose) -> AsyncIterator[str]:
    """The address of a proxy that forwards the messages of WebSocket connections to a broker, and closes the client's
    connection instead of forwarding an answer that is to be lost: the call was done, and the client does not know."""

    async def forward(request: web.Request) -> web.WebSocketResponse:
        client = web.WebSocketResponse(protocols=[frames.SUBPROTOCOL], max_msg_size=2**26)
        await client.prepare(request)
        assert request.transport is not None
        made: dict[int, frames.Call] = {}
        async with session.ws_connect(
            url + frames.PATH, protocols=[frames.SUBPROTOCOL], max_msg_size=2**26, headers=_token(request)
        ) as broker:

            async def send_calls() -> None:
                async for message in client:
                    calls = [
                        (number, call)
                        for number, call in frames.decode_calls(message.data)
                        if not isinstance(call, frames.Cancel | Malformed)
                    ]
                    made.update(calls)
                    await broker.send_bytes(message.data)
                await broker.close()

            sending = asyncio.create_task(send_calls())
            async for message in broker:
                answers = frames.decode_answers(message.data)
                if any(lose(made[number], answer) for number, answer in answers):
                    request.transport.abort()
                    break
                with contextlib.suppress(ConnectionError):
                    await client.send_bytes(message.data)
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
        return client

    app = web.Application()
    app.router.add_get(frames.PATH, forward)
    async with aiohttp.ClientSession() as session, serving(app) as proxy:
        yield proxy


def _token(request: web.Request) -> dict[str, str]:
    return {name: value for name, value in request.headers.items() if name.lower() == "authorization"}


class TcpProxy:
    """Forwards bytes to a broker, until it is told to stop: then connections stay open, and nothing comes through."""

    def __init__(self, url: str) -> None:
        self._port = int(url.rpartition(":")[2])
        self._connections: list[asyncio.StreamWriter] = []
        self.accepted = 0
        self.flowing = asyncio.Event()
        """While it is not set, nothing is forwarded."""
        self.flowing.set()
        self._stopped = asyncio.Event()
        self._ended = asyncio.Event()
        self._open: set[asyncio.Future[tuple[None, None]]] = set()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            self.flowing.set()
            self._ended.set()
            self.cut()
            await asyncio.gather(*self._open)

    def stop(self) -> None:
        """Forward nothing more on the connections that are open now."""
        self._stopped.set()
        self._stopped = asyncio.Event()

    def cut(self) -> None:
        """Close the connections that are open now."""
        for writer in self._connections:
            writer.transport.abort()
        self._connections.clear()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._connections += [writer, there_writer]
        stopped = self._stopped
        pumps = (self._pump(reader, there_writer, stopped), self._pump(there_reader, writer, stopped))
        pumping = asyncio.ensure_future(asyncio.gather(*pumps))
        self._open.add(pumping)
        pumping.add_done_callback(self._open.discard)
        await pumping

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, stopped: asyncio.Event) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                await self.flowing.wait()
                if stopped.is_set():
                    await self._ended.wait()
                writer.write(data)
                await writer.drain()
        writer.close()
