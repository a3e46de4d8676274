"""Nodes that serve sharded queues within this process, and programs that publish to them and consume."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from shardyard.groups import Node
from shardyard.model.sharding import OutgoingMessage
from shardyard.sharding.config import ShardingConfig
from shardyard.sharding.delivery import Deliveries
from shardyard.sharding.node import ShardingNode
from shardyard.sharding.queue import ShardQueue
from tests.sharding.yard import ShardingYard, until

KEYS = [f"key-{n}" for n in range(20)]
CONFIG = ShardingConfig(session_timeout=2.0)


@asynccontextmanager
async def nodes(yard: ShardingYard, *names: str) -> AsyncIterator[list[ShardingNode]]:
    async with AsyncExitStack() as stack:
        found = []
        for name in names:
            node = await stack.enter_async_context(Node(yard.log, yard.registry, name=name))
            found.append(await stack.enter_async_context(ShardingNode(node, name=name, address=None, config=CONFIG)))
        yield found


async def publish(node: ShardingNode, numbers: range, exchange: str = "images") -> None:
    """Messages with these numbers, for each of the keys in turn."""
    messages = [OutgoingMessage(b"%d" % n, KEYS[n % len(KEYS)]) for n in numbers]
    await node.publisher.publish(exchange, messages)


async def served(nodes: list[ShardingNode], name: str) -> ShardingNode:
    """The node that serves a queue, as soon as one does."""
    await until(lambda: any(queue.name == name for node in nodes for queue in node.queues))
    return next(node for node in nodes if any(queue.name == name for queue in node.queues))


async def read_all(nodes: list[ShardingNode]) -> dict[str, list[tuple[str, int, int]]]:
    """By shard, the key, number and delivery count of each message that is ready, in order. They are settled."""
    topology = await nodes[0].topology_cache.refresh()
    found: defaultdict[str, list[tuple[str, int, int]]] = defaultdict(list)
    for queue in topology.shards("images"):
        owner = await served(nodes, queue.name)
        while (deliveries := await owner.queue(queue.name).get()) is not None:
            [record] = deliveries.records
            found[queue.name].append(((record.key or b"").decode(), int(record.value), deliveries.counts[0]))
    return found


class Acknowledging:
    """Consumes every queue that some nodes serve, and acknowledges what it gets in the next turn of the event loop."""

    def __init__(self, nodes: list[ShardingNode]) -> None:
        self.nodes = nodes
        self.got: defaultdict[str, list[int]] = defaultdict(list)
        """By key, the numbers of messages in the order in which they came, without those that came again."""
        self.again = 0
        self._queues: set[ShardQueue] = set()

    async def run(self) -> None:
        while True:
            for queue in [queue for node in self.nodes for queue in node.queues if not queue.is_frozen]:
                if queue not in self._queues:
                    self._queues.add(queue)
                    self._subscribe(queue)
            await asyncio.sleep(0.005)

    def _subscribe(self, queue: ShardQueue) -> None:
        def receive(deliveries: Deliveries) -> None:
            for record, again in zip(deliveries.records, deliveries.redelivered, strict=True):
                number = int(record.value)
                if again:
                    self.again += 1
                if not again or number not in self.got[(record.key or b"").decode()]:
                    self.got[(record.key or b"").decode()].append(number)
            tags = range(deliveries.first_tag, deliveries.first_tag + len(deliveries))
            asyncio.get_running_loop().call_soon(subscription.ack_tags, list(tags))

        subscription = queue.subscribe(receive, prefetch=20)

    def count(self) -> int:
        return len({number for numbers in self.got.values() for number in numbers})
