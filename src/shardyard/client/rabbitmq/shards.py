"""Which shards an exchange of RabbitMQ has.

AMQP can't list queues. But the names of shards say how they are built, and a node that is asked about a queue with the
name of the exchange answers with the name of its own first shard.
"""

from collections.abc import Sequence

from aio_pika.abc import AbstractChannel

from shardyard.client.rabbitmq.questions import asking, name_of
from shardyard.model import Conflict
from shardyard.model.sharding import shard_name


class NoShards(Conflict):
    """Raised when an exchange of RabbitMQ has no shards."""

    def __init__(self, exchange: str) -> None:
        super().__init__(
            f"exchange {exchange!r} of RabbitMQ has no shards: enable the plugin rabbitmq_sharding, and set a policy "
            "with shards-per-node whose pattern matches the exchange"
        )
        self.exchange = exchange


async def queues_of(urls: Sequence[str], name: str) -> list[str]:
    """The names of the shards that an exchange has on the nodes at these addresses, in order, or that of the queue
    itself; none if there is neither."""
    found: set[str] = set()
    for url in urls:
        async with asking(url) as channel:
            found.update(await _queues_of_node(channel, name))
    return sorted(found)


async def is_pseudo_queue(url: str, name: str) -> bool:
    """Whether it is the name of a sharded exchange, which stands for its shards."""
    async with asking(url) as channel:
        return await name_of(channel, name) not in (None, name)


async def _queues_of_node(channel: AbstractChannel, name: str) -> list[str]:
    first = await name_of(channel, name)
    node = (first or "").removeprefix(f"sharding: {name} - ").rpartition(" - ")[0]
    if first != shard_name(name, node, 0):
        return [] if first is None else [first]  # there is no queue of that name, or it is no shard
    found = [first]
    while await name_of(channel, shard_name(name, node, len(found))) is not None:
        found.append(shard_name(name, node, len(found)))
    return found
