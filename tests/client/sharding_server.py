"""A node of sharded queues that does what a test says: real WebSockets, real frames."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

from aiohttp import WSMsgType, web

from shardyard.model import ShardyardError
from shardyard.wire import sharding_frames as frames
from shardyard.wire.errors import error_body
from shardyard.wire.frames import SUBPROTOCOL, messages
from tests.client.proxies import serving

F = TypeVar("F", bound=frames.Call)
WAIT_SECONDS = 60.0


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_SECONDS):
        while not condition():  # noqa: ASYNC110 any condition
            await asyncio.sleep(0.005)


class Peer:
    """A connection, as the node sees it."""

    def __init__(self, socket: web.WebSocketResponse) -> None:
        self.socket = socket
        transport = socket._req.transport if socket._req is not None else None
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport
        self.messages: list[list[tuple[int, frames.Call]]] = []
        """All that came, each with its frames."""
        self._calls: asyncio.Queue[tuple[int, frames.Call]] = asyncio.Queue()
        self.ended = asyncio.Event()

    def take(self, message: bytes) -> None:
        calls = frames.decode_calls(message)
        assert not any(isinstance(call, Exception) for _, call in calls), calls
        self.messages.append(calls)  # type: ignore[arg-type]
        for call in calls:
            self._calls.put_nowait(call)  # type: ignore[arg-type]

    async def get(self, kind: type[F]) -> tuple[int, F]:
        """The next call, which must be of this kind, with its number."""
        async with asyncio.timeout(WAIT_SECONDS):
            number, call = await self._calls.get()
        assert isinstance(call, kind), call
        return number, call

    @property
    def has_calls(self) -> bool:
        return not self._calls.empty()

    async def answer(self, number: int, *answers: frames.Answer) -> None:
        for message in messages([frames.encode_frame(number, answer) for answer in answers]):
            await self.socket.send_bytes(message)

    async def fail(self, number: int, error: ShardyardError) -> None:
        await self.answer(number, frames.Failed(error_body(error)))

    async def routes(self, *counts: int) -> frames.Publish:
        """Answer the next publish."""
        number, call = await self.get(frames.Publish)
        await self.answer(number, frames.Routed(list(counts) or [1] * len(call.messages)))
        return call

    async def settled(self) -> frames.Ack | frames.Nack:
        """Answer the next acknowledgement."""
        number, call = await self.get(frames.Ack | frames.Nack)  # type: ignore[arg-type]
        await self.answer(number, frames.DONE)
        return call

    def abort(self) -> None:
        """End the connection without a word, as a killed node does."""
        self._transport.abort()


class ScriptedNode:
    """Hands each connection to the test."""

    def __init__(self) -> None:
        self.url = ""
        self.tokens: list[str | None] = []
        self.status: int | None = None
        """With which connections are refused."""
        self._peers: asyncio.Queue[Peer] = asyncio.Queue()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["ScriptedNode"]:
        app = web.Application()
        app.router.add_get(frames.PATH, self._connection)
        async with serving(app) as self.url:
            yield self

    async def accept(self) -> Peer:
        """The next connection."""
        async with asyncio.timeout(WAIT_SECONDS):
            return await self._peers.get()

    async def _connection(self, request: web.Request) -> web.StreamResponse:
        self.tokens.append(request.headers.get("Authorization"))
        if self.status is not None:
            return web.Response(status=self.status)
        socket = web.WebSocketResponse(protocols=[SUBPROTOCOL])
        await socket.prepare(request)
        peer = Peer(socket)
        self._peers.put_nowait(peer)
        try:
            async for message in socket:
                assert message.type is WSMsgType.BINARY
                peer.take(message.data)
        finally:
            peer.ended.set()
        return socket


def deliveries(first_tag: int, *bodies: str, redelivered: bool = False) -> frames.Deliveries:
    count = len(bodies)
    return frames.Deliveries(
        first_tag,
        [body.encode() for body in bodies],
        [f"key-{body}" for body in bodies],
        [7] * count,
        None,
        [True] * count if redelivered else None,
        [1] * count if redelivered else None,
    )
