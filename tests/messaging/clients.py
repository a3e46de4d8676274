"""Clients of messaging servers that show everything they get: over aiohttp, and as bytes."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

import aiohttp
import msgspec

from shardyard.client.websocket_messages import WebSocketMessages
from shardyard.wire import messaging as wire
from shardyard.wire.messaging import Format, Marked, Message, Position, Posted
from tests.server.websockets import CLOSE, RawClient

F = TypeVar("F")
WAIT_SECONDS = 60.0


class Client:
    """A connection of a user's client. What comes is collected; the number of entries is compared with their `seq`."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, user: str, device: str) -> None:
        self.socket = socket
        self.messages = WebSocketMessages(socket)
        self.format = Format(socket.protocol)
        self.user = user
        self.device = device
        self.frames: list[wire.ServerFrame] = []
        self.entries: list[Message | Marked | Posted] = []
        self.code: int | None = None
        """With which the connection was closed."""
        self.position: Position | None = None
        self.newest_sent: str | None = None
        """The newest message of its own user that it knows, or what the server said instead."""
        self._taken = 0
        self._news = asyncio.Event()
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for message in self.messages:
            data = message.data.encode() if isinstance(message.data, str) else message.data
            for frame in wire.decode_from_server(data, self.format):
                self._take(frame)
        self.code = self.socket.close_code or 0
        self._news.set()

    def _take(self, frame: wire.ServerFrame) -> None:
        self.frames.append(frame)
        if isinstance(frame, wire.Deliver):
            assert frame.seq == len(self.entries), "entries are missing"
            self.entries += frame.entries
            for entry in frame.entries:
                if entry.offset is not None and self.position is not None:
                    self.position = Position(self.position.partition, frame.epoch, entry.offset + 1)
                if entry.sender == self.user:
                    self._knows(entry.id)
        elif isinstance(frame, wire.Welcome):
            self.position = frame.position
            if frame.sent is not None:
                self._knows(frame.sent)
        elif isinstance(frame, wire.CaughtUp):
            self.position = frame.position
        elif isinstance(frame, wire.Sent):
            self._knows(frame.id)
        elif isinstance(frame, wire.Pong):
            self.position = frame.position or self.position
        self._news.set()

    def _knows(self, id_: str) -> None:
        if self.newest_sent is None or int(id_) > int(self.newest_sent):
            self.newest_sent = id_

    # What it gets

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait until frames that came make the condition true."""
        async with asyncio.timeout(WAIT_SECONDS):
            while not condition():
                assert self.code is None, f"closed with {self.code} after {self.frames[-5:]}"
                self._news.clear()
                await self._news.wait()

    async def get(self, kind: type[F]) -> F:
        """The next frame of this kind; frames of other kinds before it are skipped."""

        def found() -> bool:
            return any(isinstance(frame, kind) for frame in self.frames[self._taken :])

        await self.until(found)
        while True:
            frame = self.frames[self._taken]
            self._taken += 1
            if isinstance(frame, kind):
                return frame

    async def closed(self) -> int:
        """The code with which the server closes the connection."""
        async with asyncio.timeout(WAIT_SECONDS):
            await self._reading
        assert self.code is not None
        return self.code

    async def received(self, count: int) -> list[str]:
        """The texts of the entries, once there are so many."""
        await self.until(lambda: len(self.entries) >= count)
        return self.texts

    async def all_received(self, count: int) -> list[str]:
        """The texts of all entries that the server has for this client, which are at least so many."""
        await self.received(count)
        await self.sync()
        return self.texts

    @property
    def texts(self) -> list[str]:
        return [f"{entry.kind} {entry.upto}" if isinstance(entry, Marked) else entry.text for entry in self.entries]

    @property
    def ids(self) -> list[str]:
        return [entry.id for entry in self.entries]

    @property
    def answers(self) -> "list[wire.Sent | wire.Refused]":
        return [frame for frame in self.frames if isinstance(frame, wire.Sent | wire.Refused)]

    async def sync(self) -> None:
        """Wait until everything that the server had for this client before is here."""
        before = sum(isinstance(frame, wire.Pong) for frame in self.frames)
        await self.send(wire.Ping())
        await self.until(lambda: sum(isinstance(frame, wire.Pong) for frame in self.frames) > before)

    # What it sends

    async def send(self, *frames: wire.ClientFrame) -> None:
        """One message with these frames."""
        await self.send_raw(wire.encode(frames[0] if len(frames) == 1 else frames, self.format))

    async def send_raw(self, message: bytes) -> None:
        if self.format is Format.JSON:
            await self.socket.send_str(message.decode())
        else:
            await self.socket.send_bytes(message)

    async def say(self, number: int, to: str, text: str) -> wire.Sent:
        """Send a message, which must be stored."""
        await self.send(wire.Send(number, to, text))
        return await self.sent(number)

    async def sent(self, number: int) -> wire.Sent:
        answer = await self.answer(number)
        assert isinstance(answer, wire.Sent), answer
        return answer

    async def answer(self, number: int) -> wire.Sent | wire.Refused:
        """The newest answer to this number that was not asked for before."""

        def found() -> bool:
            return any(each.number == number for each in self.answers)

        await self.until(found)
        frame = next(each for each in self.answers if each.number == number)
        self.frames.remove(frame)
        self._taken = min(self._taken, len(self.frames))
        return frame

    async def close(self) -> None:
        await self.socket.close()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reading

    async def vanish(self) -> None:
        """End the connection without a word."""
        transport = self.socket._writer.transport
        transport.abort()
        await self._reading


class Clients:
    """Opens connections, which are closed at the end."""

    def __init__(self, http: aiohttp.ClientSession) -> None:
        self.http = http
        self._opened: list[Client] = []
        self._raw: list[RawClient] = []

    async def session(self, url: str, user: str, **credentials: str) -> wire.SessionGranted:
        async with self.http.post(f"{url}/v1/session", json={"user": user, **credentials}) as response:
            body = await response.read()
            assert response.status == 200, body
            return msgspec.json.decode(body, type=wire.SessionGranted)

    async def hello(
        self,
        url: str,
        user: str,
        device: str = "phone",
        *,
        format_: Format = Format.JSON,
        token: str | None = None,
        position: Position | None = None,
        last: str | None = None,
        sent: str | None = None,
    ) -> Client:
        """A connection to this server on which `hello` was sent, whatever will be answered."""
        token = token or (await self.session(url, user)).token
        client = await self.connected(url, user, device, format_)
        await client.send(wire.Hello(token, device, position, last, sent))
        return client

    async def connected(self, url: str, user: str = "", device: str = "", format_: Format = Format.JSON) -> Client:
        """A connection on which nothing was sent yet."""
        opened = await self.http.ws_connect(address(url), protocols=[format_.value], max_msg_size=0)
        client = Client(opened, user, device)
        self._opened.append(client)
        return client

    async def join(self, url: str, user: str, device: str = "phone", **options: Any) -> Client:
        """A client that is connected to its server and has got what it missed."""
        client = await self.hello(url, user, device, **options)
        await client.until(lambda: any(isinstance(frame, wire.CaughtUp) for frame in client.frames))
        return client

    async def again(self, url: str, client: Client, **options: Any) -> Client:
        """The same client once more, from its position on."""
        last = next((entry.id for entry in reversed(client.entries) if entry.offset is not None), None)
        fields = {
            "position": client.position,
            "last": last,
            "sent": client.newest_sent,
            "format_": client.format,
            **options,
        }
        joined = await self.join(url, client.user, client.device, **fields)
        joined.newest_sent = joined.newest_sent or client.newest_sent
        return joined

    async def raw(
        self, url: str, format_: Format = Format.JSON, *headers: str, receive_bytes: int | None = None
    ) -> RawClient:
        """A connection on which WebSocket frames are written as bytes."""
        client = await self.tcp(url, receive_bytes)
        assert await client.upgrade(f"Sec-WebSocket-Protocol: {format_.value}", *headers, path=wire.PATH) == 101
        return client

    async def tcp(self, url: str, receive_bytes: int | None = None) -> RawClient:
        """A TCP connection, on which the kernel takes as many bytes that were not read yet."""
        host, port = url.removeprefix("http://").split(":")
        opened = socket.socket()
        if receive_bytes is not None:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        opened.setblocking(False)
        await asyncio.get_running_loop().sock_connect(opened, (host, int(port)))
        client = RawClient(*await asyncio.open_connection(sock=opened))
        self._raw.append(client)
        return client

    async def close(self) -> None:
        for raw in self._raw:
            raw.close()
        await asyncio.gather(*(client.close() for client in self._opened))


@contextlib.asynccontextmanager
async def opened_clients() -> AsyncIterator[Clients]:
    async with aiohttp.ClientSession() as http:
        clients = Clients(http)
        try:
            yield clients
        finally:
            await clients.close()


def address(url: str) -> str:
    """Where the clients of the server with this URL connect."""
    return "ws" + url.removeprefix("http") + wire.PATH


async def raw_close_code(client: RawClient) -> int:
    """The code with which the server closes a connection of bytes; 0 if it ends without one."""
    async with asyncio.timeout(WAIT_SECONDS):
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                kind, payload = await client.receive()
                if kind == CLOSE:
                    return int.from_bytes(payload[:2], "big")
    return 0
