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


async def shards_of(urls: Sequence[str], exchange: str) -> list[str]:
    """The names of the shards on the nodes at these addresses, in order. `NoShards` if there are none."""
    found: set[str] = set()
    for url in urls:
        async with asking(url) as channel:
            found.update(await _shards_of_node(channel, exchange))
    if not found:
        raise NoShards(exchange)
    return sorted(found)


async def _shards_of_node(channel: AbstractChannel, exchange: str) -> list[str]:
    first = await name_of(channel, exchange)
    node = (first or "").removeprefix(f"sharding: {exchange} - ").rpartition(" - ")[0]
    if first != shard_name(exchange, node, 0):
        return []  # there is no queue of that name, or it is no shard
    found = [first]
    while await name_of(channel, shard_name(exchange, node, len(found))) is not None:
        found.append(shard_name(exchange, node, len(found)))
    return found
