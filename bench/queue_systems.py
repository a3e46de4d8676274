"""One interface to Shardyard's queues, RabbitMQ and Redis streams, so that `bench/queues.py` measures them alike.

Each is used as its Python client is meant to be used, with one process that publishes and another that consumes.
"""

import asyncio
import base64
import os
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Self, cast

import aio_pika
import redis
from aio_pika.abc import AbstractIncomingMessage
from redis import asyncio as aioredis

from shardyard.client import Brokers, Consumer, Producer
from shardyard.groups import OwnedBatch
from shardyard.model import Record

PARTITIONS = 8
BATCH_RECORDS = 500
RECORD_BYTES = 256
QUEUE, GROUP = "bench", "bench"
PREFETCH = 4 * BATCH_RECORDS
"""Messages that RabbitMQ delivers ahead of their acknowledgements."""

VALUES = [os.urandom(RECORD_BYTES) for _ in range(BATCH_RECORDS)]
"""Random bytes, which no system can compress."""

Deliver = Callable[[Sequence[bytes]], None]


class System(AsyncExitStack, ABC):
    """A queue that is open inside its `async with` block."""

    @abstractmethod
    async def __aenter__(self) -> Self: ...

    @abstractmethod
    async def create(self) -> None:
        """Create the queue."""

    @abstractmethod
    async def publish(self, values: Sequence[bytes]) -> None:
        """Publish a batch; returns when all of its records are durable."""

    @abstractmethod
    async def post(self, value: bytes) -> None:
        """Publish one record in a request of its own; returns when it is durable."""

    @abstractmethod
    async def send(self, values: Sequence[bytes]) -> None:
        """Publish records that are due at the same moment, as a program that sends single records would; returns when
        all of them are durable."""

    @abstractmethod
    async def consume(self, count: int, deliver: Deliver) -> None:
        """Call `deliver` with each batch and then commit it, until `count` records are committed."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """How to connect to a running system, from any process."""

    kind: str
    address: str
    """The URL of a broker, or the port of a server."""

    def open(self) -> System:
        match self.kind:
            case "shardyard":
                return Shardyard(self.address)
            case "rabbitmq":
                return RabbitMq(int(self.address))
            case _:
                return Redis(int(self.address))


class Shardyard(System):
    """A broker, used through Shardyard's client; single records are posted as JSON, as any HTTP client would."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url

    async def __aenter__(self) -> Self:
        self._brokers = await self.enter_async_context(Brokers(self._url))
        self._producer = await self.enter_async_context(Producer(self._brokers))
        return self

    async def create(self) -> None:
        await self._brokers.post("/v1/topics", {"name": QUEUE, "partitions": PARTITIONS})

    async def publish(self, values: Sequence[bytes]) -> None:
        await self._producer.publish(QUEUE, [Record.new(value) for value in values])

    async def post(self, value: bytes) -> None:
        await self._brokers.post(f"/v1/topics/{QUEUE}/records", {"value_base64": base64.b64encode(value).decode()})

    async def send(self, values: Sequence[bytes]) -> None:
        await asyncio.gather(*(self._producer.send(QUEUE, value) for value in values))

    async def consume(self, count: int, deliver: Deliver) -> None:
        """Batches of different partitions are handled and committed concurrently."""
        remaining, done = count, asyncio.Event()

        async def handle(batch: OwnedBatch) -> None:
            nonlocal remaining
            deliver([record.value for record in batch.records()])
            await batch.commit()
            remaining -= len(batch)
            if remaining <= 0:
                done.set()

        async def handle_all(consumer: Consumer) -> None:
            async with asyncio.TaskGroup() as tasks:
                async for batch in consumer:
                    tasks.create_task(handle(batch))

        async with Consumer(self._brokers, GROUP, [QUEUE]) as consumer:
            await _run_until(done, handle_all(consumer))


class RabbitMq(System):
    """A durable queue, persistent messages and publisher confirms, through aio-pika."""

    def __init__(self, port: int) -> None:
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
        await asyncio.gather(*(self.post(value) for value in values))

    async def post(self, value: bytes) -> None:
        message = aio_pika.Message(value, delivery_mode=aio_pika.DeliveryMode.PERSISTENT)
        await self._channel.default_exchange.publish(message, QUEUE)

    async def send(self, values: Sequence[bytes]) -> None:
        await self.publish(values)

    async def consume(self, count: int, deliver: Deliver) -> None:
        """One acknowledgement covers all messages before it, up to a batch."""
        remaining, done, arrived = count, asyncio.Event(), asyncio.Event()
        unacknowledged: list[AbstractIncomingMessage] = []

        async def on_message(message: AbstractIncomingMessage) -> None:
            deliver([message.body])
            unacknowledged.append(message)
            arrived.set()

        async def acknowledge() -> None:
            nonlocal remaining
            while True:
                await arrived.wait()
                arrived.clear()
                while unacknowledged:
                    batch = unacknowledged[:BATCH_RECORDS]
                    del unacknowledged[:BATCH_RECORDS]
                    await batch[-1].ack(multiple=True)
                    remaining -= len(batch)
                if remaining <= 0:
                    done.set()

        queue = await self._channel.get_queue(QUEUE)
        tag = await queue.consume(on_message)
        await _run_until(done, acknowledge())
        await queue.cancel(tag)


class Redis(System):
    """A stream through redis-py.

    Single records use the asyncio client, with one connection for each command in flight. Batches (pipelines of XADD)
    and consuming use the blocking client, which is twice as fast.
    """

    def __init__(self, port: int) -> None:
        super().__init__()
        self._port = port

    async def __aenter__(self) -> Self:
        self._client = aioredis.Redis(host="127.0.0.1", port=self._port)
        self.push_async_callback(self._client.aclose)
        self._blocking = redis.Redis(host="127.0.0.1", port=self._port)
        self.callback(self._blocking.close)
        return self

    async def create(self) -> None:
        self._blocking.xgroup_create(QUEUE, GROUP, id="0", mkstream=True)

    async def publish(self, values: Sequence[bytes]) -> None:
        pipeline = self._blocking.pipeline(transaction=False)
        for value in values:
            pipeline.xadd(QUEUE, {"v": value})
        pipeline.execute()  # it may block: this process does nothing else

    async def post(self, value: bytes) -> None:
        await cast(Awaitable[Any], self._client.xadd(QUEUE, {"v": value}))

    async def send(self, values: Sequence[bytes]) -> None:
        pipeline = self._client.pipeline(transaction=False)
        for value in values:
            pipeline.xadd(QUEUE, {"v": value})
        await pipeline.execute()

    async def consume(self, count: int, deliver: Deliver) -> None:
        remaining = count
        while remaining > 0:
            response: Any = self._blocking.xreadgroup(GROUP, "one", {QUEUE: ">"}, count=BATCH_RECORDS, block=10_000)
            entries = _entries(response)
            if not entries:
                raise RuntimeError(f"{remaining} of {count} records never arrived")
            deliver([fields[b"v"] for _, fields in entries])
            self._blocking.xack(QUEUE, GROUP, *(entry for entry, _ in entries))
            remaining -= len(entries)


def _entries(response: Any) -> list[tuple[bytes, dict[bytes, bytes]]]:
    """The entries in a response to XREADGROUP on one stream: a list with RESP2, a dict of lists of lists with RESP3."""
    if isinstance(response, dict):
        return [entry for lists in response.values() for entries in lists for entry in entries]
    return [entry for _, entries in response or () for entry in entries]


async def _run_until(done: asyncio.Event, work: Awaitable[None]) -> None:
    """Run `work` until `done` is set, then cancel it; an error in `work` is raised."""
    working = asyncio.ensure_future(work)
    waiting = asyncio.ensure_future(done.wait())
    try:
        await asyncio.wait([working, waiting], return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
    finally:
        working.cancel()
        waiting.cancel()
        await asyncio.gather(working, return_exceptions=True)
