"""Nodes of sharded queues within this process, for the length of a test: topology, routing and attachments."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Self

from shardyard.groups import Directory, Node, protocol
from shardyard.groups.coordinator import MemberIdentity
from shardyard.log import Log
from shardyard.model import Record
from shardyard.model.sharding import NODES_GROUP, Exchange, ExchangeType, Policy, Queue, Remaining
from shardyard.registry import Registry
from shardyard.sharding.administration import Administration
from shardyard.sharding.attachments import Attachments
from shardyard.sharding.topology import Topology
from shardyard.sharding.topology_cache import TopologyCache
from tests.queues.engines import ENGINES

WHO = "test"
WAIT_SECONDS = 60.0


async def until(condition: Callable[[], bool]) -> None:
    """Wait until the condition is true."""
    async with asyncio.timeout(WAIT_SECONDS):
        while not condition():  # noqa: ASYNC110 it becomes true in many ways
            await asyncio.sleep(0.005)


class ShardingYard:
    """A log and a registry, with the administration of one node."""

    def __init__(self, log: Log, registry: Registry, node: Node) -> None:
        self.log = log
        self.registry = registry
        self.node = node
        self.administration = Administration(node)

    async def topology(self) -> Topology:
        return await self.administration.topology()

    async def declare(self, name: str, kind: ExchangeType = ExchangeType.MODULUS_HASH) -> Exchange:
        return await self.administration.declare_exchange(Exchange(name, kind), WHO)

    async def set_policy(self, shards: int, *, pattern: str = "^images$", routing_key: str = "") -> Remaining:
        return await self.administration.set_policy(Policy("sharded", pattern, shards, routing_key), WHO)

    async def shards(self, exchange: str = "images") -> list[str]:
        return [queue.name for queue in (await self.topology()).shards(exchange)]

    async def store(self, queue: Queue, *bodies: bytes) -> None:
        """Store messages in a queue as publishers do."""
        records = [Record.new(body) for body in bodies]
        await self.log.append(queue.partition, records, fence=queue.routing_fence)


class AttachingNode:
    """A node that has consumers. It is a member of the group of nodes, without serving anything."""

    def __init__(self, yard: ShardingYard, name: str) -> None:
        self.yard = yard
        self.name = name
        self.node = Node(yard.log, yard.registry, name=name)
        self.epoch = 0

    async def __aenter__(self) -> Self:
        self._stack = AsyncExitStack()
        await self._stack.enter_async_context(self.node)
        await self.join()
        topology = await self._stack.enter_async_context(TopologyCache(self.node))
        directory = await self._stack.enter_async_context(Directory(self.node, NODES_GROUP))
        self.attachments = Attachments(self.node, topology, directory, lambda: self.identity)
        await self._stack.enter_async_context(self.attachments)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    @property
    def identity(self) -> MemberIdentity:
        return MemberIdentity(NODES_GROUP, self.name, self.epoch)

    async def join(self) -> None:
        row = await self.node.transactions.run(
            lambda tx: protocol.join(tx, NODES_GROUP, self.name, session_timeout=600.0)
        )
        self.epoch = row.epoch

    async def evict(self) -> None:
        """What the others do when it is gone."""
        await self.yard.node.transactions.run(lambda tx: protocol.leave(tx, NODES_GROUP, self.name, self.epoch))


@asynccontextmanager
async def sharding_yard(engine: str, folder: Path) -> AsyncIterator[ShardingYard]:
    async with AsyncExitStack() as stack:
        log = await stack.enter_async_context(ENGINES[engine].log(folder))
        registry = stack.enter_context(ENGINES[engine].open_registry(folder))
        node = await stack.enter_async_context(Node(log, registry, name="test"))
        yield ShardingYard(log, registry, node)
