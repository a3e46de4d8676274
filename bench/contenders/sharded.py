"""Sharded queues: Shardyard through `ShardingClient`, and RabbitMQ's sharding plugin through aio-pika, with the same
number of shards and one consumer for each of them."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Self

import aio_pika
from aio_pika.abc import AbstractIncomingMessage
from bench.contenders.system import PREFETCH, QUEUE, AsyncSystem, Contender, CumulativeAcks, Deliver, SlowSchedule
from bench.servers import shardyard_broker
from tests.rabbitmq import find_rabbitmq, rabbitmq_server

from shardyard.client.sharding import ShardingClient
from shardyard.client.sharding.api import Message
from shardyard.model.sharding import OutgoingMessage

SHARDS = 4
POLICY = ("bench", f"^{QUEUE}$")
KEYS = [f"key{n}" for n in range(10_000)]


class Keys:
    """Routing keys, one after the other."""

    def __init__(self) -> None:
        self._numbers = count()

    def next(self) -> str:
        return KEYS[next(self._numbers) % len(KEYS)]


class ShardedShardyard(AsyncSystem):
    schedule = SlowSchedule

    def __init__(self, url: str) -> None:
        super().__init__()
        self._client = ShardingClient(url)
        self._keys = Keys()

    async def __aenter__(self) -> Self:
        await self.enter_async_context(self._client)
        self._exchange = self._client.exchange(QUEUE)
        return self

    async def create(self) -> None:
        await self._client.declare_exchange(QUEUE)
        await self._client.set_policy(*POLICY, shards_per_node=SHARDS)

    async def publish(self, values: Sequence[bytes]) -> None:
        await self._exchange.publish_batch([OutgoingMessage(value, self._keys.next()) for value in values])

    async def send(self, value: bytes) -> None:
        await self._exchange.publish(value, routing_key=self._keys.next())

    async def consume(self, count: int, deliver: Deliver) -> None:
        acks = CumulativeAcks[Message](count, deliver, lambda message: message.ack(multiple=True))

        async def read() -> None:
            async for message in channel.consume(QUEUE):
                acks.arrived(message, message.body)

        async with self._client.channel(prefetch=PREFETCH // SHARDS) as channel:
            reading = asyncio.create_task(read())
            await acks.run()
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)


class ShardingPlugin(AsyncSystem):
    schedule = SlowSchedule

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url
        self._keys = Keys()

    async def __aenter__(self) -> Self:
        connection = await aio_pika.connect(self._url)
        await self.enter_async_context(connection)
        self._channel = await connection.channel(publisher_confirms=True)
        await self._channel.set_qos(prefetch_count=PREFETCH)
        self._exchange = await self._channel.get_exchange(QUEUE, ensure=False)
        return self

    async def create(self) -> None:
        """The policy, which came first, creates the shards."""
        await self._channel.declare_exchange(QUEUE, "x-modulus-hash", durable=True)

    async def publish(self, values: Sequence[bytes]) -> None:
        await asyncio.gather(*(self.send(value) for value in values))

    async def send(self, value: bytes) -> None:
        message = aio_pika.Message(value, delivery_mode=aio_pika.DeliveryMode.PERSISTENT)
        await self._exchange.publish(message, self._keys.next())

    async def consume(self, count: int, deliver: Deliver) -> None:
        """One consumer for each shard, attached by the plugin one after the other."""
        acks = CumulativeAcks[AbstractIncomingMessage](count, deliver, lambda message: message.ack(multiple=True))

        async def on_message(message: AbstractIncomingMessage) -> None:
            acks.arrived(message, message.body)

        queue = await self._channel.get_queue(QUEUE, ensure=False)
        tags = [await queue.consume(on_message) for _ in range(SHARDS)]
        await acks.run()
        for tag in tags:
            await queue.cancel(tag)


@contextmanager
def serve_shardyard(folder: Path) -> Iterator[str]:
    with shardyard_broker(folder) as broker:
        yield broker.url


@contextmanager
def serve_plugin(folder: Path) -> Iterator[str | None]:
    if server := find_rabbitmq():
        with rabbitmq_server(server, folder, ["rabbitmq_sharding"]) as rabbitmq:
            rabbitmq.set_policy(*POLICY, f'{{"shards-per-node": {SHARDS}}}')
            yield rabbitmq.url
    else:
        yield None


SHARDED = Contender("Shardyard", serve_shardyard, ShardedShardyard)
PLUGIN = Contender("RabbitMQ's plugin", serve_plugin, ShardingPlugin)
