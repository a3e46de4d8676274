"""What callers can take of a server: connections, memory and time, over real sockets."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Protocol
from unittest.mock import Mock

import pytest
from uvicorn import Config
from uvicorn.server import ServerState

from shardyard.cli.broker import MAX_CONNECTIONS
from shardyard.client import Producer
from shardyard.log.memory import MemoryLog
from shardyard.model import Record
from shardyard.registry.memory import MemoryRegistry
from shardyard.runtime.metrics import BODY_BYTES, CONNECTIONS, ERRORS
from shardyard.server.app import serving
from shardyard.server.connections import Connection
from shardyard.server.limits import RESERVED_FILES, ServerLimits, raise_open_files
from shardyard.wire.media import MAX_BODY_BYTES

KIB = 1024
PUBLISH = "/v1/topics/orders/records"
LARGE = b'{"value": "%b"}' % (b"x" * 700 * KIB)
"""The body of a publish; larger than what is always read."""
ONE_LARGE = ServerLimits(body_bytes=1024 * KIB)
"""Room for one such body, not for two."""


class Caller:
    """A connection to a server, on which a request is written as bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def write(self, data: bytes) -> None:
        self._writer.write(data)
        with contextlib.suppress(ConnectionError):  # the server may have answered and closed the connection
            await self._writer.drain()

    async def start(self, path: str, size: int, *headers: str, method: str = "POST") -> None:
        """The headers of a request with a body of `size` bytes."""
        lines = [f"{method} {path} HTTP/1.1", "Host: broker", f"Content-Length: {size}", *headers]
        await self.write("\r\n".join([*lines, "", ""]).encode())

    async def head(self) -> tuple[int, dict[str, str]]:
        status, *lines = (await self._reader.readuntil(b"\r\n\r\n")).decode().splitlines()
        return int(status.split()[1]), {
            name.lower(): value for name, _, value in (line.partition(": ") for line in lines)
        }

    async def response(self) -> tuple[int, dict[str, str], bytes]:
        status, headers = await self.head()
        return status, headers, await self._reader.readexactly(int(headers.get("content-length", "0")))

    async def status(self) -> int:
        return (await self.response())[0]

    async def code(self) -> str:
        """The code of the error that is answered."""
        code: str = json.loads((await self.response())[2])["error"]["code"]
        return code

    async def publish(self, body: bytes = b'{"value": "x"}', *headers: str) -> int:
        await self.start(PUBLISH, len(body), *headers)
        await self.write(body)
        return await self.status()

    async def rest(self) -> bytes:
        """What comes until the server closes the connection."""
        try:
            return await self._reader.read()
        except ConnectionError:
            return b""

    @property
    def url(self) -> str:
        """Of the server."""
        host, port = self._writer.get_extra_info("peername")
        return f"http://{host}:{port}"

    def close(self) -> None:
        self._writer.close()


class Connect(Protocol):
    """Opens a connection, on which the kernel takes as many bytes that were not read yet."""

    async def __call__(self, receive_bytes: int | None = None, /) -> Caller: ...


@contextlib.asynccontextmanager
async def a_server(limits: ServerLimits, token: str | None = None) -> AsyncIterator[Connect]:
    callers: list[Caller] = []
    async with MemoryLog() as log:
        await log.create_topic("orders", 1)
        with MemoryRegistry() as registry:
            async with serving(log, registry, port=0, token=token, drain_seconds=0.1, limits=limits) as server:
                listening = server.config.bind_socket()
                listening.listen()
                port = listening.getsockname()[1]

                async def connect(receive_bytes: int | None = None) -> Caller:
                    client = socket.socket()
                    if receive_bytes is not None:
                        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
                    client.setblocking(False)
                    await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", port))
                    callers.append(Caller(*await asyncio.open_connection(sock=client)))
                    return callers[-1]

                work = asyncio.create_task(server.serve([listening]))
                try:
                    async with asyncio.timeout(30):
                        yield connect
                finally:
                    for caller in callers:
                        caller.close()
                    server.should_exit = True
                    await work


def run(
    scenario: Callable[[Connect], Awaitable[None]], limits: ServerLimits | None = None, token: str | None = None
) -> None:
    async def whole() -> None:
        async with a_server(limits or ServerLimits(), token) as connect:
            await scenario(connect)

    asyncio.run(whole())


@pytest.mark.parametrize(
    ("method", "path"), [("POST", PUBLISH), ("POST", "/v1/topics"), ("PATCH", "/v1/groups/g"), ("POST", "/v1/nothing")]
)
def test_a_caller_without_the_token_is_refused_before_it_sends_the_body(method: str, path: str) -> None:
    async def scenario(connect: Connect) -> None:
        caller = await connect()
        await caller.start(path, MAX_BODY_BYTES, method=method)
        assert await caller.status() == (404 if path == "/v1/nothing" else 401)

    run(scenario, token="the broker's")


def test_the_token_of_a_topic_is_checked_before_the_body_too() -> None:
    async def scenario(connect: Connect) -> None:
        caller = await connect()
        change = b'{"token": "of-publishers"}'
        await caller.start("/v1/topics/orders", len(change), method="PATCH")
        await caller.write(change)
        assert await caller.status() == 200
        await caller.start(PUBLISH, MAX_BODY_BYTES, "Authorization: Bearer another-one")
        assert await caller.code() == "wrong_token"
        assert await (await connect()).publish(LARGE, "Authorization: Bearer of-publishers") == 200

    run(scenario)


def test_a_body_that_is_too_large_is_refused_by_its_declared_length_or_while_it_comes() -> None:
    async def scenario(connect: Connect) -> None:
        declared, chunked = await connect(), await connect()
        await declared.start(PUBLISH, MAX_BODY_BYTES + 1)
        assert await declared.code() == "too_large"
        await chunked.write(f"POST {PUBLISH} HTTP/1.1\r\nHost: broker\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        chunk = b"%x\r\n%b\r\n" % (1024 * KIB, b"x" * 1024 * KIB)
        for _ in range(MAX_BODY_BYTES // (1024 * KIB) + 1):
            await chunked.write(chunk)
        assert await chunked.code() == "too_large"

    run(scenario)


@pytest.mark.parametrize("path", [PUBLISH, "/v1/topics"])
def test_bodies_beyond_the_common_limit_are_refused_for_now_and_small_ones_are_not(path: str) -> None:
    async def scenario(connect: Connect) -> None:
        before = BODY_BYTES.value
        first, second = await connect(), await connect()
        await first.start(path, len(LARGE), "Expect: 100-continue")
        assert await first.status() == 100  # its body is being read
        await first.write(LARGE[:-1])
        await second.start(path, len(LARGE))
        status, headers, body = await second.response()
        assert (status, headers["retry-after"]) == (503, "1")
        assert json.loads(body)["error"]["code"] == "overloaded"
        assert await (await connect()).publish() == 200
        assert BODY_BYTES.value == before + len(LARGE)
        await first.write(LARGE[-1:])
        assert await first.status() == (200 if path == PUBLISH else 400)
        assert await (await connect()).publish(LARGE) == 200
        assert BODY_BYTES.value == before

    run(scenario, ONE_LARGE)


def test_a_client_repeats_what_was_refused_because_of_the_common_limit() -> None:
    async def scenario(connect: Connect) -> None:
        refused = ERRORS.series("overloaded")
        before = refused.value
        first = await connect()
        await first.start(PUBLISH, len(LARGE), "Expect: 100-continue")
        assert await first.status() == 100
        async with Producer(first.url) as producer:
            publishing = asyncio.create_task(producer.publish("orders", [Record.new(b"x" * 700 * KIB)]))
            while refused.value == before:  # noqa: ASYNC110 it has no event for it
                await asyncio.sleep(0)
            await first.write(LARGE)
            assert await first.status() == 200
            (stored,) = await publishing
            assert (stored.first.offset, stored.count) == (1, 1)

    run(scenario, ONE_LARGE)


def test_a_chunked_body_counts_with_what_has_come_of_it() -> None:
    async def scenario(connect: Connect) -> None:
        before = BODY_BYTES.value
        chunked, declared = await connect(), await connect()
        await chunked.write(f"POST {PUBLISH} HTTP/1.1\r\nHost: broker\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        await chunked.write(b"%x\r\n%b\r\n" % (len(LARGE), LARGE))
        while BODY_BYTES.value < before + len(LARGE):  # noqa: ASYNC110 it has no event for it
            await asyncio.sleep(0)
        await declared.start(PUBLISH, len(LARGE))
        assert await declared.code() == "overloaded"
        await chunked.write(b"0\r\n\r\n")
        assert await chunked.status() == 200

    run(scenario, ONE_LARGE)


def test_a_caller_that_goes_away_gives_its_share_of_the_common_limit_back() -> None:
    async def scenario(connect: Connect) -> None:
        before = BODY_BYTES.value
        first = await connect()
        await first.start(PUBLISH, len(LARGE), "Expect: 100-continue")
        assert await first.status() == 100
        first.close()
        while BODY_BYTES.value > before:  # noqa: ASYNC110 it has no event for it
            await asyncio.sleep(0)
        assert await (await connect()).publish(LARGE) == 200

    run(scenario, ONE_LARGE)


@pytest.mark.parametrize("path", [PUBLISH, pytest.param("/v1/topics", marks=pytest.mark.long)])
def test_a_body_that_stalls_is_cut_and_one_that_is_only_slow_succeeds(path: str) -> None:
    async def scenario(connect: Connect) -> None:
        slow, stalled, other = await connect(), await connect(), await connect()
        size = 64 * KIB
        for caller in (slow, stalled):
            await caller.start(path, size, "Expect: 100-continue")
            assert await caller.status() == 100
        await stalled.write(b"{")
        cut = asyncio.create_task(stalled.response())
        sent = 0
        while not cut.done():  # so `slow` takes at least as long as a body may stall
            assert await other.publish() == 200
            await slow.write(b" ")
            sent += 1
        status, headers, body = await cut
        assert (status, headers["connection"], headers["retry-after"]) == (408, "close", "1")
        assert json.loads(body)["error"]["fields"] == {"received": 1, "seconds": 2.0}
        assert await stalled.rest() == b""
        record = b'{"value": "x"}' if path == PUBLISH else b'{"name": "slow", "partitions": 1}'
        await slow.write(b" " * (size - sent - len(record)) + record)
        assert await slow.status() in (200, 201)

    run(scenario, ServerLimits(stalled_seconds=2.0))


def test_connections_beyond_the_limit_are_refused_until_others_are_closed() -> None:
    async def scenario(connect: Connect) -> None:
        callers = [await connect() for _ in range(3)]
        for caller in callers:
            await caller.start(PUBLISH, 5, "Expect: 100-continue")
            assert await caller.status() == 100
        before = CONNECTIONS.value
        refused = await connect()
        status, headers, body = await refused.response()
        assert (status, headers["retry-after"], headers["connection"]) == (503, "1", "close")
        assert json.loads(body)["error"]["fields"] == {"what": "connections", "limit": 3}
        assert await refused.rest() == b""
        callers[0].close()
        while CONNECTIONS.value >= before:  # noqa: ASYNC110 it has no event for it
            await asyncio.sleep(0)
        assert await (await connect()).publish() == 200

    run(scenario, ServerLimits(connections=3))


@pytest.mark.parametrize("sent", [b"", b"GET /healthz HTTP/1.1\r\nHost: bro"])
def test_a_connection_without_a_complete_request_is_closed(sent: bytes) -> None:
    async def scenario(connect: Connect) -> None:
        caller = await connect()
        await caller.write(sent)
        assert await caller.rest() == b""

    run(scenario, ServerLimits(head_seconds=0.2))


def test_a_caller_that_goes_on_sending_after_its_response_is_cut() -> None:
    async def scenario(connect: Connect) -> None:
        caller = await connect()
        await caller.start(PUBLISH, MAX_BODY_BYTES)
        assert await caller.status() == 401
        closed = asyncio.create_task(caller.rest())
        while not closed.done():
            await caller.write(b"x")
            await asyncio.sleep(0)

    run(scenario, ServerLimits(head_seconds=1.0), token="the broker's")


def test_headers_that_are_too_large_are_refused() -> None:
    async def scenario(connect: Connect) -> None:
        caller = await connect()
        await caller.write(b"GET /healthz HTTP/1.1\r\nHost: broker\r\nX-Long: " + b"x" * 100 * KIB)
        assert await caller.code() == "too_large"
        await caller.rest()

    run(scenario)


def test_too_many_pipelined_requests_end_the_connection() -> None:
    async def scenario(connect: Connect) -> None:
        few, many = await connect(), await connect()
        request = b"GET /healthz HTTP/1.1\r\nHost: broker\r\n\r\n"
        await few.write(request * 5)
        assert [await few.status() for _ in range(5)] == [200] * 5
        await many.write(request * 6)
        assert (await many.rest()).startswith(b"HTTP/1.1 400")

    run(scenario, ServerLimits(pipelined=4))


def test_a_caller_that_does_not_read_its_response_is_cut() -> None:
    async def scenario(connect: Connect) -> None:
        before = CONNECTIONS.value
        other, stuck = await connect(), await connect(64 * KIB)
        assert await other.publish(b'{"records": [%b]}' % b",".join([LARGE] * 16)) == 200
        await stuck.start("/v1/topics/orders/records?offset=0&limit=16", 0, method="GET")
        length = int((await stuck.head())[1]["content-length"])
        other.close()
        while CONNECTIONS.value > before:  # noqa: ASYNC110 it has no event for it
            await asyncio.sleep(0)
        assert len(await stuck.rest()) < length

    run(scenario, ServerLimits(unread_seconds=0.5))


def test_a_caller_that_reads_its_response_slowly_is_not_cut() -> None:
    loop, transport = Mock(), Mock()
    loop.time.return_value = 0.0
    transport.get_extra_info.side_effect = {"socket": Mock()}.get
    transport.get_write_buffer_size.side_effect = [900 * KIB, 500 * KIB, 100 * KIB, 100 * KIB]
    connection = Connection(Config(Mock()), ServerState(), {}, loop, limits=ServerLimits(unread_seconds=60.0))
    connection.connection_made(transport)
    connection.pause_writing()
    for _ in range(2):
        seconds, check = loop.call_later.call_args.args
        assert seconds == 60.0
        check()
        transport.abort.assert_not_called()
    check()
    transport.abort.assert_called_once_with()
    connection.connection_lost(None)


def test_a_response_does_not_wait_until_the_caller_has_acknowledged_its_headers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_options: list[int] = []
    connection_made = Connection.connection_made

    def noting(self: Connection, transport: asyncio.Transport) -> None:
        connection_made(self, transport)
        accepted = transport.get_extra_info("socket")
        set_options.append(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    monkeypatch.setattr(Connection, "connection_made", noting)

    async def scenario() -> None:
        async with a_server(ServerLimits()) as connect:
            assert await (await connect()).publish() == 200

    asyncio.run(scenario())
    assert set_options == [1]


def test_connections_leave_files_for_the_log_and_the_registry() -> None:
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limits = replace(ServerLimits(), connections=10**9)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (RESERVED_FILES + 200, hard))
        assert limits.within_open_files().connections == 200
        raise_open_files(300)
        assert limits.within_open_files().connections == 300
        raise_open_files(100)
        assert ServerLimits(connections=100).within_open_files().connections == 100
        assert limits.within_open_files().connections == 300
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_command_has_the_same_default_as_the_server() -> None:
    assert ServerLimits().connections == MAX_CONNECTIONS
