"""A messaging server that does what a test tells it: real HTTP, real WebSockets, real frames."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TypeVar

import msgspec
from aiohttp import WSMsgType, web

from shardyard.model import ShardyardError
from shardyard.runtime.clock import now_ms
from shardyard.wire import messaging as wire
from shardyard.wire.errors import ErrorResponse, error_body, status_of
from shardyard.wire.messaging import Format, Message, Position
from tests.client.proxies import serving

F = TypeVar("F")
WAIT_SECONDS = 60.0
START = Position(3, 1, 0)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_SECONDS):
        while not condition():  # noqa: ASYNC110 any condition
            await asyncio.sleep(0.005)


class Peer:
    """A connection, as the server sees it."""

    def __init__(self, socket: web.WebSocketResponse) -> None:
        self.socket = socket
        transport = socket._req.transport if socket._req is not None else None
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport
        self.format = Format(socket.ws_protocol)
        self.frames: asyncio.Queue[wire.ClientFrame] = asyncio.Queue()
        self.ended = asyncio.Event()
        self.count = 0
        """Entries that were delivered."""

    async def get(self, kind: type[F]) -> F:
        """The next frame of this kind; others are dropped."""
        async with asyncio.timeout(WAIT_SECONDS):
            while not isinstance(frame := await self.frames.get(), kind):
                pass
        return frame

    async def send(self, *frames: wire.ServerFrame) -> None:
        for frame in frames:
            await self.send_raw(wire.encode(frame, self.format))

    async def send_raw(self, message: bytes) -> None:
        if self.format is Format.JSON:
            await self.socket.send_str(message.decode())
        else:
            await self.socket.send_bytes(message)

    async def welcome(self, position: Position = START, **more: object) -> None:
        fields: dict[str, object] = {"mirror": "log", "resume": "new"} | more
        await self.send(
            msgspec.convert({"type": "welcome", "user": "alice", "position": position, **fields}, wire.Welcome)
        )

    async def deliver(self, *entries: Message | wire.Marked | wire.Posted, epoch: int = 1) -> None:
        await self.send(wire.Deliver(self.count, epoch, list(entries)))
        self.count += len(entries)

    async def close(self, code: int = 1000, reason: str = "") -> None:
        await self.socket.close(code=code, message=reason.encode())

    def abort(self) -> None:
        """End the connection without a word, as a killed server does."""
        self._transport.abort()

    @property
    def unsent_bytes(self) -> int:
        """What waits for the client to read."""
        return self._transport.get_write_buffer_size()


class ScriptedServer:
    """Accepts sessions, and hands each connection to the test."""

    def __init__(self) -> None:
        self.url = ""
        self.address = ""
        """Where sessions send clients: by default to this server."""
        self.sessions: list[dict[str, str]] = []
        """The bodies of the requests for them."""
        self.session_error: ShardyardError | None = None
        self.session_seconds = 3600.0
        self.now_ms = now_ms
        self._peers: asyncio.Queue[tuple[Peer, wire.Hello]] = asyncio.Queue()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["ScriptedServer"]:
        app = web.Application()
        app.router.add_post("/v1/session", self._session)
        app.router.add_get("/v1/where/{user}", self._where)
        app.router.add_get(wire.PATH, self._connection)
        async with serving(app) as self.url:
            self.address = self.websocket
            yield self

    @property
    def websocket(self) -> str:
        return "ws" + self.url.removeprefix("http") + wire.PATH

    async def accept(self) -> tuple[Peer, wire.Hello]:
        """The next connection, and its first frame."""
        async with asyncio.timeout(WAIT_SECONDS):
            return await self._peers.get()

    async def accept_new(self) -> Peer:
        """The next connection, welcomed."""
        peer, _ = await self.accept()
        await peer.welcome()
        return peer

    @property
    def has_connections(self) -> bool:
        return not self._peers.empty()

    async def _session(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.sessions.append(body)
        if self.session_error is not None:
            return _error(self.session_error)
        expires_at = self.now_ms() + round(self.session_seconds * 1000)
        return web.json_response(
            {
                "token": f"token {len(self.sessions)}",
                "expires_at": expires_at,
                "address": self.address,
                "user": body["user"],
            }
        )

    async def _where(self, request: web.Request) -> web.Response:
        if self.session_error is not None:
            return _error(self.session_error)
        user = request.match_info["user"]
        return web.json_response({"user": user, "partition": 3, "address": self.address, "member": "m1", "epoch": 7})

    async def _connection(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(protocols=[each.value for each in Format])
        await socket.prepare(request)
        peer = Peer(socket)
        try:
            async for message in socket:
                assert message.type in (WSMsgType.TEXT, WSMsgType.BINARY)
                data = message.data.encode() if isinstance(message.data, str) else message.data
                for frame in wire.decode_from_client(data, peer.format):
                    if isinstance(frame, wire.Hello):
                        self._peers.put_nowait((peer, frame))
                    else:
                        peer.frames.put_nowait(frame)
        finally:
            peer.ended.set()
        return socket


def _error(error: ShardyardError) -> web.Response:
    body = msgspec.json.encode(ErrorResponse(error_body(error)))
    return web.Response(body=body, status=status_of(error), content_type="application/json")


def message(number: int, text: str | None = None, sender: str = "bob", to: str = "alice") -> Message:
    """The message at offset `number`."""
    return Message(str(1000 + number), sender, to, text or f"m{number}", 5, number)


def messages(numbers: Sequence[int]) -> list[Message]:
    return [message(number) for number in numbers]


def post(number: int, channel: str = "general", sender: str = "bob", offset: int | None = None) -> wire.Posted:
    """The post with the id `number`, at this offset or the same one."""
    return wire.Posted(str(number), channel, sender, f"p{number}", 5, number if offset is None else offset)
