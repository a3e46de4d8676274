"""Nodes of sharded queues in this process, and clients that speak to them by hand."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
import uvloop
from uvicorn import Server

from shardyard.client.sharding import ShardingClient
from shardyard.log.memory import MemoryLog
from shardyard.registry.memory import MemoryRegistry
from shardyard.server.app import serving
from shardyard.server.limits import DEFAULT_LIMITS, ServerLimits
from shardyard.server.sharding.host import NodeOptions
from shardyard.wire import sharding_frames as frames
from shardyard.wire.frames import SUBPROTOCOL, messages
from tests.servers import free_port

TIMEOUT_SECONDS = 60.0


class Connection:
    """A WebSocket connection, by aiohttp."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.socket = socket
        self._others: list[tuple[int, frames.Answer]] = []

    async def send(self, *calls: tuple[int, frames.Call]) -> None:
        for message in messages(frames.encode_frame(*call) for call in calls):
            await self.socket.send_bytes(message)

    async def answer(self, number: int) -> frames.Answer:
        """The next answer to this call."""
        while True:
            for each in self._others:
                if each[0] == number:
                    self._others.remove(each)
                    return each[1]
            self._others += frames.decode_answers(await self.socket.receive_bytes())

    async def call(self, number: int, call: frames.Call) -> frames.Answer:
        await self.send((number, call))
        return await self.answer(number)

    async def code(self, number: int, call: frames.Call) -> str:
        """The code of the error with which a call is answered."""
        answer = await self.call(number, call)
        assert isinstance(answer, frames.Failed), answer
        return answer.error.code

    async def deliveries(self, number: int) -> frames.Deliveries:
        answer = await self.answer(number)
        assert isinstance(answer, frames.Deliveries), answer
        return answer

    async def bodies(self, number: int, count: int) -> list[bytes]:
        """So many deliveries of a subscription."""
        found: list[bytes] = []
        while len(found) < count:
            found += (await self.deliveries(number)).bodies
        return found

    async def closed(self) -> int | None:
        """The code with which the node closes the connection, after any answers."""
        while (await self.socket.receive()).type is aiohttp.WSMsgType.BINARY:
            pass
        return self.socket.close_code


@dataclass
class RunningNode:
    """A node for the duration of a test."""

    name: str
    url: str
    server: Server
    work: "asyncio.Task[None]"

    async def stop(self) -> None:
        self.server.should_exit = True
        await self.work


@dataclass
class Nodes:
    """Nodes on one log and registry, and a client of the first one."""

    log: MemoryLog
    registry: MemoryRegistry
    session: aiohttp.ClientSession
    limits: ServerLimits
    token: str | None
    stack: contextlib.AsyncExitStack
    running: dict[str, contextlib.AsyncExitStack] = field(default_factory=dict)
    """By name; closing one stops the node."""

    async def start(self, name: str) -> RunningNode:
        """Start a node, and stop it at the end."""
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        stack = await self.stack.enter_async_context(contextlib.AsyncExitStack())
        server = await stack.enter_async_context(
            serving(
                *(self.log, self.registry),
                port=port,
                token=self.token,
                limits=self.limits,
                drain_seconds=1.0,
                node=NodeOptions(name, url),
            )
        )
        listening = server.config.bind_socket()
        listening.listen()
        work = asyncio.create_task(server.serve([listening]))
        node = RunningNode(name, url, server, work)
        stack.push_async_callback(node.stop)
        self.running[name] = stack
        return node

    async def stop(self, name: str) -> None:
        """Stop a node cleanly."""
        await self.running.pop(name).aclose()

    async def connect(self, node: RunningNode) -> Connection:
        headers = {} if self.token is None else {"Authorization": f"Bearer {self.token}"}
        return Connection(
            await self.session.ws_connect(node.url + frames.PATH, protocols=[SUBPROTOCOL], headers=headers)
        )

    async def request(self, node: RunningNode, method: str, path: str, content: object = None) -> tuple[int, Any]:
        """Status and body of the response to a request."""
        headers = {} if self.token is None else {"Authorization": f"Bearer {self.token}"}
        body = None if content is None else msgspec.json.encode(content)
        async with self.session.request(method, node.url + path, data=body, headers=headers) as response:
            return response.status, msgspec.json.decode(await response.read())

    def client(self, *nodes: RunningNode, **options: Any) -> ShardingClient:
        return ShardingClient([node.url for node in nodes], token=self.token, **options)


@contextlib.asynccontextmanager
async def some_nodes(
    *names: str, limits: ServerLimits = DEFAULT_LIMITS, token: str | None = None
) -> AsyncIterator[tuple[Nodes, list[RunningNode]]]:
    """Nodes with these names."""
    with MemoryRegistry() as registry:
        async with (
            asyncio.timeout(TIMEOUT_SECONDS),
            MemoryLog() as log,
            aiohttp.ClientSession() as session,
            contextlib.AsyncExitStack() as stack,
        ):
            nodes = Nodes(log, registry, session, limits, token, stack)
            yield nodes, [await nodes.start(name) for name in names]


async def until(condition: Callable[[], Awaitable[object]]) -> None:
    """Return when the condition holds."""
    while not await condition():  # noqa: ASYNC110 any condition
        await asyncio.sleep(0.01)


def run(scenario: Callable[[Nodes, RunningNode], Awaitable[None]], **options: Any) -> None:
    """A scenario with one node."""

    async def whole() -> None:
        async with some_nodes("a", **options) as (nodes, (node,)):
            await scenario(nodes, node)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as brokers have it
        runner.run(whole())


def run_two(scenario: Callable[[Nodes, RunningNode, RunningNode], Awaitable[None]], **options: Any) -> None:
    """A scenario with two nodes."""

    async def whole() -> None:
        async with some_nodes("a", "b", **options) as (nodes, (one, other)):
            await scenario(nodes, one, other)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(whole())
