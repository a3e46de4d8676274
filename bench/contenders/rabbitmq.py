"""RabbitMQ: a durable queue, persistent messages and publisher confirms, through aio-pika."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import aio_pika
from aio_pika.abc import AbstractIncomingMessage
from bench.contenders.system import PREFETCH, QUEUE, AsyncSystem, Contender, CumulativeAcks, Deliver
from tests.rabbitmq import find_rabbitmq, rabbitmq_server


class RabbitMq(AsyncSystem):
    def __init__(self, port: str) -> None:
        super().__init__()
        self._port = port

    async def __aenter__(self) -> Self:
        connection = await aio_pika.connect(f"amqp://guest:guest@127.0.0.1:{self._port}/")
        await self.enter_async_context(connection)
        self._channel = await connection.channel(publisher_confirms=True)
        await self._channel.set_qos(prefetch_count=PREFETCH)
        return self

    async def create(self) -> None:
        await self._channel.declare_queue(QUEUE, durable=True)

    async def publish(self, values: Sequence[bytes]) -> None:
        await asyncio.gather(*(self.send(value) for value in values))

    async def send(self, value: bytes) -> None:
        message = aio_pika.Message(value, delivery_mode=aio_pika.DeliveryMode.PERSISTENT)
        await self._channel.default_exchange.publish(message, QUEUE)

    async def consume(self, count: int, deliver: Deliver) -> None:
        acks = CumulativeAcks[AbstractIncomingMessage](count, deliver, lambda message: message.ack(multiple=True))

        async def on_message(message: AbstractIncomingMessage) -> None:
            acks.arrived(message, message.body)

        queue = await self._channel.get_queue(QUEUE)
        tag = await queue.consume(on_message)
        await acks.run()
        await queue.cancel(tag)


@contextmanager
def serve(folder: Path) -> Iterator[str | None]:
    if server := find_rabbitmq():
        with rabbitmq_server(server, folder) as rabbitmq:
            yield str(rabbitmq.port)
    else:
        yield None


RABBITMQ = Contender("RabbitMQ", serve, RabbitMq)
