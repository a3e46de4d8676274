"""Nodes of sharded queues within this process, on one log and one registry."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from shardyard.groups import Node
from shardyard.log import Log
from shardyard.model.sharding import (
    NO_LIMITS,
    NODES_GROUP,
    Exchange,
    ExchangeType,
    OutgoingMessage,
    Policy,
    QueueLimits,
)
from shardyard.registry import Registry, Transaction
from shardyard.sharding.config import ShardingConfig
from shardyard.sharding.node import ShardingNode
from shardyard.sharding.queue import ShardQueue
from tests.queues.engines import ENGINES
from tests.sharding.owner import Consumer, consume, until

WHO = "test"
CONFIG = ShardingConfig(session_timeout=3.0, store_seconds=0.005)


@dataclass
class Nodes:
    """Nodes that come and go."""

    log: Log
    registry: Registry
    running: dict[str, ShardingNode] = field(default_factory=dict)
    _stacks: dict[str, AsyncExitStack] = field(default_factory=dict)

    async def start(self, name: str, config: ShardingConfig = CONFIG) -> ShardingNode:
        stack = AsyncExitStack()
        host = await stack.enter_async_context(Node(self.log, self.registry, name=f"host of {name}"))
        node = ShardingNode(host, name=name, address=f"http://{name}", config=config)
        self._stacks[name] = stack
        self.running[name] = await stack.enter_async_context(node)
        return node

    async def stop(self, name: str) -> None:
        """Stop a node in an orderly way."""
        self.running.pop(name, None)
        await self._stacks.pop(name).aclose()

    async def kill(self, name: str) -> None:
        """Stop a node as if its process was killed some seconds ago: nothing was stored, it did not leave its group,
        and its session is over."""
        node = self.running.pop(name)
        membership = node._ownership._membership
        assert membership is not None
        for served in node.queues:
            await served.close(clean=False)
        await membership.stop()
        membership._task = None  # so it does not leave
        await self._stacks.pop(name).aclose()

        def end_session(tx: Transaction) -> None:
            member = tx.member(NODES_GROUP, name)
            assert member is not None
            tx.put_member(replace(member, expires_at=tx.now))

        self.registry.run(end_session)

    async def declare(
        self,
        shards: int,
        exchange: str = "images",
        kind: ExchangeType = ExchangeType.MODULUS_HASH,
        limits: QueueLimits = NO_LIMITS,
    ) -> None:
        """Declare a sharded exchange, and wait until all of its shards are served."""
        node = self.any
        await node.administration.declare_exchange(Exchange(exchange, kind), WHO)
        await node.administration.set_policy(Policy(exchange, f"^{exchange}$", shards, limits=limits), WHO)
        await self.served(exchange, shards * len(node.topology.nodes))

    @property
    def any(self) -> ShardingNode:
        return next(iter(self.running.values()))

    def queues(self, exchange: str = "images") -> list[ShardQueue]:
        """The shards of an exchange that are served, by any node."""
        found = [
            served for node in self.running.values() for served in node.queues if served.queue.exchange == exchange
        ]
        return sorted(found, key=lambda served: served.name)

    async def served(self, exchange: str, count: int) -> list[ShardQueue]:
        await until(lambda: len(self.queues(exchange)) == count)
        return self.queues(exchange)

    async def queue(self, name: str) -> ShardQueue:
        """A queue, as soon as it is served somewhere."""

        def find() -> list[ShardQueue]:
            return [served for node in self.running.values() for served in node.queues if served.name == name]

        await until(find)
        return find()[0]

    async def publish(self, bodies: Sequence[str], exchange: str = "images", *, by: str | None = None) -> list[int]:
        """Publish messages whose bodies are their routing keys."""
        node = self.any if by is None else self.running[by]
        return await node.publisher.publish(exchange, [OutgoingMessage(body.encode(), body) for body in bodies])

    def consume(self, exchange: str = "images", prefetch: int = 0) -> list[Consumer]:
        """A consumer of each shard."""
        return [consume(served, prefetch=prefetch) for served in self.queues(exchange)]


@asynccontextmanager
async def nodes(engine: str, folder: Path) -> AsyncIterator[Nodes]:
    async with AsyncExitStack() as stack:
        log = await stack.enter_async_context(ENGINES[engine].log(folder))
        registry = stack.enter_context(ENGINES[engine].open_registry(folder))
        yard = Nodes(log, registry)
        try:
            yield yard
        finally:
            await asyncio.gather(*(yard.stop(name) for name in list(yard._stacks)))


def bodies(consumers: Sequence[Consumer]) -> list[str]:
    return sorted(body.decode() for consumer in consumers for body in consumer.bodies)
