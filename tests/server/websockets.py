"""A server, and clients that speak WebSocket to it by hand."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec
import uvloop
from uvicorn import Server

from shardyard.log.memory import MemoryLog
from shardyard.registry.memory import MemoryRegistry
from shardyard.server.app import serving
from shardyard.server.limits import ServerLimits
from shardyard.wire import frames, requests, responses
from shardyard.wire.columns import RecordColumns

TIMEOUT_SECONDS = 60.0
CONTINUATION, TEXT, BINARY, CLOSE, PING = 0, 1, 2, 8, 9
"""Kinds of WebSocket frames."""


class Client:
    """A WebSocket connection, by aiohttp."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.socket = socket
        self.others: list[tuple[int, frames.Answer]] = []
        """Answers that came before the one that was waited for."""

    async def send(self, *calls: tuple[int, frames.Call]) -> None:
        """Send calls, together in a message if they are small."""
        for message in frames.messages(frames.encode_frame(*call) for call in calls):
            await self.socket.send_bytes(message)

    async def message(self) -> list[tuple[int, frames.Answer]]:
        """The answers of the next message."""
        return frames.decode_answers(await self.socket.receive_bytes())

    async def answer(self, number: int) -> frames.Answer:
        """The next answer to this call."""
        while True:
            for each in self.others:
                if each[0] == number:
                    self.others.remove(each)
                    return each[1]
            self.others += await self.message()

    async def call(self, number: int, call: frames.Call) -> frames.Answer:
        await self.send((number, call))
        return await self.answer(number)

    async def code(self, number: int) -> str:
        """The code of the error with which this call is answered."""
        answer = await self.answer(number)
        assert isinstance(answer, frames.Failed), answer
        return answer.error.code

    async def result(self, number: int, call: frames.Call) -> Any:
        answer = await self.call(number, call)
        assert isinstance(answer, frames.Result), answer
        return msgspec.msgpack.decode(answer.body)

    async def request(self, number: int, method: str, path: str, content: object = None, **query: str) -> Any:
        """The body of the response to a request, which must succeed."""
        body = b"" if content is None else msgspec.json.encode(content)
        answer = await self.call(number, frames.Request(method, path, query, {}, body))
        assert isinstance(answer, frames.Response), answer
        assert answer.status < 300, answer.body
        return msgspec.json.decode(answer.body) if answer.body else None

    async def join(self, name: str, group: str = "billing", topic: str = "orders") -> responses.Joined:
        body = {"topics": [topic], "name": name, "session_timeout": 60.0}
        return msgspec.convert(
            await self.request(1_000_000, "POST", f"/v1/groups/{group}/members", body), responses.Joined
        )

    async def owned(self, member: responses.Joined, count: int = 1) -> dict[str, int]:
        """The epochs of the partitions of the topic that a member owns, once it owns as many."""
        where = f"/v1/groups/{member.group}/members/{member.member}"
        while True:
            shown = await self.request(1_000_000, "GET", where, epoch=str(member.epoch))
            found = {name: grant["epoch"] for name, grant in shown["partitions"].items() if "." not in name}
            if len(found) == count:
                return found
            await asyncio.sleep(0.01)

    async def closed(self) -> int | None:
        """The code with which the broker closes the connection, after any answers."""
        while True:
            message = await self.socket.receive()
            if message.type is not aiohttp.WSMsgType.BINARY:
                return self.socket.close_code


class RawClient:
    """A connection on which WebSocket frames are written as bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def write(self, data: bytes) -> None:
        self._writer.write(data)
        with contextlib.suppress(ConnectionError):  # the server may have closed the connection
            await self._writer.drain()

    async def upgrade(self, *headers: str, method: str = "GET", path: str = frames.PATH) -> int:
        """Ask for a WebSocket connection. Returns the status of the response."""
        lines = [
            f"{method} {path} HTTP/1.1",
            "Host: localhost",
            "Connection: Upgrade",
            "Upgrade: websocket",
            "Sec-WebSocket-Version: 13",
            "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
            *headers,
        ]
        await self.write("\r\n".join([*lines, "", ""]).encode())
        return int((await self._reader.readuntil(b"\r\n\r\n")).split()[1])

    async def frame(self, payload: bytes, kind: int = BINARY, *, fin: bool = True) -> None:
        await self.write(frame(payload, kind, fin=fin))

    async def receive(self) -> tuple[int, bytes]:
        """The next frame: its kind and its payload."""
        kind, size = await self._reader.readexactly(2)
        if size >= 126:
            size = int.from_bytes(await self._reader.readexactly(2 if size == 126 else 8), "big")
        return kind & 15, await self._reader.readexactly(size)

    async def closed(self) -> int | None:
        """The code with which the broker closes the connection, after any messages. None if it sends none."""
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                kind, payload = await self.receive()
                if kind == CLOSE:
                    return int.from_bytes(payload[:2], "big")
        return None

    async def ended(self) -> bytes:
        """What is received until the connection has ended."""
        received = b""
        with contextlib.suppress(ConnectionError):
            while part := await self._reader.read(65536):
                received += part
        return received

    def close(self) -> None:
        self._writer.close()


def frame(payload: bytes, kind: int = BINARY, *, fin: bool = True, declared: int | None = None) -> bytes:
    """A WebSocket frame of a client, with a mask of zeros. `declared`: the length that it says to have."""
    size = len(payload) if declared is None else declared
    length = (
        bytes([128 | size])
        if size < 126
        else b"\xfe%b" % size.to_bytes(2)
        if size < 2**16
        else b"\xff%b" % size.to_bytes(8)
    )
    return bytes([128 * fin | kind]) + length + bytes(4) + payload


@dataclass(frozen=True, slots=True)
class Running:
    """A server for the duration of a test, with the topic `orders` of one partition."""

    server: Server
    serving: "asyncio.Task[None]"
    log: MemoryLog
    url: str
    port: int
    session: aiohttp.ClientSession
    clients: list[Client]
    raw_clients: list[RawClient]

    async def connect(self, token: str | None = None, headers: Mapping[str, str] | None = None) -> Client:
        headers = dict(headers or {})
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        socket = await self.session.ws_connect(self.url + frames.PATH, protocols=[frames.SUBPROTOCOL], headers=headers)
        self.clients.append(Client(socket))
        return self.clients[-1]

    async def open(self, receive_bytes: int | None = None) -> RawClient:
        """A TCP connection, on which the kernel takes as many bytes that were not read yet."""
        client = socket.socket()
        if receive_bytes is not None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", self.port))
        self.raw_clients.append(RawClient(*await asyncio.open_connection(sock=client)))
        return self.raw_clients[-1]

    async def upgraded(self, receive_bytes: int | None = None) -> RawClient:
        """A WebSocket connection on which frames are written as bytes."""
        client = await self.open(receive_bytes)
        assert await client.upgrade(f"Sec-WebSocket-Protocol: {frames.SUBPROTOCOL}") == 101
        return client

    async def stored(self) -> list[str]:
        """The ids of the records, in their order."""
        (partition,) = await self.log.topic("orders")
        return [record.id for record in (await self.log.read(partition, 0)).records()]


@contextlib.asynccontextmanager
async def a_server(
    limits: ServerLimits | None = None, *, token: str | None = None, drain_seconds: float = 5.0, **options: Any
) -> AsyncIterator[Running]:
    async with MemoryLog() as log, aiohttp.ClientSession() as session:
        await log.create_topic("orders", 1)
        with MemoryRegistry() as registry:
            async with serving(
                log,
                registry,
                port=0,
                token=token,
                drain_seconds=drain_seconds,
                limits=limits or ServerLimits(),
                **options,
            ) as server:
                listening = server.config.bind_socket()
                listening.listen()
                port = listening.getsockname()[1]
                work = asyncio.create_task(server.serve([listening]))
                running = Running(server, work, log, f"http://127.0.0.1:{port}", port, session, [], [])
                try:
                    async with asyncio.timeout(TIMEOUT_SECONDS):
                        yield running
                finally:
                    for client in running.clients:
                        await client.socket.close()  # closing the session leaves them open to the garbage collection
                    for raw_client in running.raw_clients:
                        raw_client.close()
                    server.should_exit = True
                    await work


def run(scenario: Callable[[Running], Awaitable[None]], limits: ServerLimits | None = None, **options: Any) -> None:
    async def whole() -> None:
        async with a_server(limits, **options) as running:
            await scenario(running)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as brokers have it
        runner.run(whole())


def publish(
    *ids: str, after: int | None = None, topic: str = "orders", size: int = 1, **options: Any
) -> frames.Publish:
    """A call that publishes records with these ids."""
    columns = RecordColumns(list(ids), [b"x" * size] * len(ids), [1] * len(ids))
    return frames.Publish(topic, columns, requests.Publish(**options), after)


def read(owner: int, offset: int = 0, *, group: str = "billing", wait_seconds: float = 30.0) -> frames.Read:
    return frames.Read(group, "orders/0", requests.Read(offset, owner, wait_seconds=wait_seconds))
