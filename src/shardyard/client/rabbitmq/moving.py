"""Moving all messages of a sharded exchange from RabbitMQ to Shardyard."""

import asyncio
from collections.abc import Callable, Sequence

from shardyard.client.rabbitmq.client import RabbitMQClient
from shardyard.client.rabbitmq.errors import translated
from shardyard.client.rabbitmq.mover import BATCH_MESSAGES, QueueMover
from shardyard.client.sharding import ShardingClient
from shardyard.model import Stamp
from shardyard.model.sharding import OutgoingMessage

Moved = Callable[[str, int], None]
"""Gets the name of a queue, and how many more of its messages were moved."""


async def move_exchange(
    source: RabbitMQClient,
    target: ShardingClient,
    exchange: str,
    *,
    to: str | None = None,
    batch_messages: int = BATCH_MESSAGES,
    moved: Moved = lambda _queue, _count: None,
) -> dict[str, int]:
    """Move the messages of all shards of an exchange to the exchange `to`, by default of the same name. Returns how
    many each shard had.

    None is lost, and none is stored twice, also when this is killed and run again; see `mover`. The order of each shard
    is kept. Shards must not have other consumers. The exchange in Shardyard must exist and have shards, and these must
    stay the same while a batch is in flight.
    """
    name = to or exchange

    async def publish(messages: Sequence[OutgoingMessage], stamp: Stamp) -> None:
        await target.exchange(name).publish_batch(messages, stamp=stamp)

    async def move(queue: str) -> int:
        mover = QueueMover(connection, queue, publish, batch_messages=batch_messages)
        with translated("move the messages again to continue"):
            return await mover.run(lambda count: moved(queue, count))

    await target.administration.describe(name)  # it exists
    shards = await source.shards(exchange)
    connection = await source.connection()
    try:
        async with asyncio.TaskGroup() as tasks:
            running = {shard: tasks.create_task(move(shard)) for shard in shards}
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return {shard: task.result() for shard, task in running.items()}
