"""Hosts the node of sharded queues in a broker."""

import asyncio
import contextlib
import logging
import socket
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from shardyard.groups import Node
from shardyard.model import InvalidCall, RetryLater, ShardyardError
from shardyard.registry import ChangeSignal
from shardyard.runtime.retry import Backoff
from shardyard.server.sharding.forwarding import Forwarding
from shardyard.sharding.node import ShardingNode
from shardyard.sharding.rows import WATCH_NAME, read_topology

_log = logging.getLogger(__name__)

LOOK_SECONDS = 10.0
"""How often a broker looks whether sharded queues are used, also when nothing was signalled."""
START_SECONDS = 15.0
"""How long a request waits until the node has joined the others: after a kill, its session has to end first."""
BACKOFF = Backoff(first=0.2, longest=5.0)


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """How a broker takes part in sharded queues."""

    name: str
    """Stable over restarts: the shards of the node are named by it."""
    address: str
    """Where clients and other nodes reach it."""

    @classmethod
    def of(cls, address: str, port: int, name: str | None = None) -> "NodeOptions":
        return cls(name or f"shardyard-{port}@{socket.gethostname()}", address.rstrip("/"))


class HostedNode:
    """The node of a broker, from entering the block to leaving it.

    It joins the others when sharded queues are used: with the first request for them, or as soon as there are any. So a
    broker without sharded queues creates nothing for them.
    """

    def __init__(self, node: Node, token: str | None = None) -> None:
        """`token`: that of all nodes."""
        self._node = node
        self.forwarding = Forwarding(token)
        self._wanted = asyncio.Event()
        self._sharding: ShardingNode | None = None
        self._changed = asyncio.Event()
        """Set when the node has joined, or could not."""
        self._error: ShardyardError | None = None
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        return self

    def start(self, options: NodeOptions) -> None:
        """From now on it joins the others when that is needed."""
        self._task = asyncio.create_task(self._run(options), name="host of sharded queues")

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Hand the queues over to other nodes, with what was acknowledged."""
        if self._task is not None:
            if self._sharding is None:
                self._task.cancel()
            self._stopping.set()
            await asyncio.gather(self._task, return_exceptions=True)
        await self.forwarding.close()

    @property
    def running(self) -> ShardingNode | None:
        """The node, if it has joined the others."""
        return self._sharding

    async def get(self) -> ShardingNode:
        """The node, once it has joined the others. `RetryLater` if that takes long."""
        if self._sharding is not None:
            return self._sharding
        if self._task is None:
            raise InvalidCall("this server has no sharded queues: it was started without an address for its node")
        self._wanted.set()
        try:
            async with asyncio.timeout(START_SECONDS):
                return await self._joined()
        except TimeoutError:
            raise RetryLater("this node has not joined the others yet: try again in a moment") from None

    async def _joined(self) -> ShardingNode:
        while True:
            if self._sharding is not None:
                return self._sharding
            if self._error is not None:
                raise RetryLater(f"this node can't join the others for now: {self._error}")
            await self._changed.wait()

    async def _run(self, options: NodeOptions) -> None:
        await self._until_used()
        attempt = 0
        while not self._stopping.is_set():
            sharding = ShardingNode(self._node, name=options.name, address=options.address)
            try:
                async with sharding:
                    self._sharding, self._error = sharding, None
                    self._signal()
                    _log.info("node %s of sharded queues at %s", options.name, options.address)
                    failure = await self._until_stopped(sharding)
                    self._sharding = None
                if failure is not None:
                    raise RetryLater(f"its membership has ended: {failure}")
            except ShardyardError as error:
                attempt += 1
                self._error = error
                self._signal()
                _log.warning("joining the nodes of sharded queues will be retried: %s", error)
                await self._node.clock.sleep(BACKOFF.delay(attempt))

    async def _until_stopped(self, sharding: ShardingNode) -> BaseException | None:
        """Return when the server stops, or the node can't go on, with the reason."""
        failing = asyncio.ensure_future(sharding.failure())
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait((failing, stopping), return_when=asyncio.FIRST_COMPLETED)
            return failing.result() if failing.done() else None
        finally:
            for wait in (failing, stopping):
                wait.cancel()
            await asyncio.gather(failing, stopping, return_exceptions=True)

    def _signal(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _until_used(self) -> None:
        """Return when there are sharded queues, or a request for them."""
        with ChangeSignal(self._node.registry, WATCH_NAME, self._node.clock) as changes:
            while not self._wanted.is_set():
                with contextlib.suppress(ShardyardError):  # the registry is busy: look again later
                    topology = await self._node.transactions.read(read_topology)
                    if topology.exchanges or topology.policies or topology.queues:
                        return
                waits = [asyncio.ensure_future(changes.wait(LOOK_SECONDS)), asyncio.ensure_future(self._wanted.wait())]
                try:
                    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for wait in waits:
                        wait.cancel()
                    await asyncio.gather(*waits, return_exceptions=True)
