"""Three queues behind one face: what `bench/queues.py` measures is the same code for each of them.

Each is used the way its Python client is meant to be, publishing from one process, consuming in another.
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
"""RabbitMQ sends so many ahead of their acknowledgements."""

VALUES = [os.urandom(RECORD_BYTES) for _ in range(BATCH_RECORDS)]
"""Random, so that nobody can compress them."""

Deliver = Callable[[Sequence[bytes]], None]


class System(AsyncExitStack, ABC):
    """A queue that is open while it is entered."""

    @abstractmethod
    async def __aenter__(self) -> Self: ...

    @abstractmethod
    async def create(self) -> None:
        """Make the queue."""

    @abstractmethod
    async def publish(self, values: Sequence[bytes]) -> None:
        """Publish a batch; returns when all of it is durable."""

    @abstractmethod
    async def post(self, value: bytes) -> None:
        """Publish one record in a request of its own; returns when it is durable."""

    @abstractmethod
    async def send(self, values: Sequence[bytes]) -> None:
        """Publish records that came up just now, one by one as far as the client's user sees; returns when all are
        durable."""

    @abstractmethod
    async def consume(self, count: int, deliver: Deliver) -> None:
        """Hand over what comes, then commit it, batch by batch, until `count` records are committed."""


@dataclass(frozen=True, slots=True)
class Host:
    """Where to find a system, for another process too."""

    kind: str
    at: str

    def open(self) -> System:
        match self.kind:
            case "ours":
                return Ours(self.at)
            case "rabbitmq":
                return RabbitMq(int(self.at))
            case _:
                return Redis(int(self.at))


class Ours(System):
    """A broker, through the client; single records as any HTTP client would post them, in JSON."""

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
        """The partitions' batches are committed side by side."""
        left, done = count, asyncio.Event()

        async def handle(batch: OwnedBatch) -> None:
            nonlocal left
            deliver([record.value for record in batch.records()])
            await batch.commit()
            left -= len(batch)
            if left <= 0:
                done.set()

        async def handle_all(consumer: Consumer) -> None:
            async with asyncio.TaskGroup() as working:
                async for batch in consumer:
                    working.create_task(handle(batch))

        async with Consumer(self._brokers, GROUP, [QUEUE]) as consumer:
            await _until(done, handle_all(consumer))


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
        """One acknowledgement stands for all that came before it, up to a batch."""
        left, done, fresh = count, asyncio.Event(), asyncio.Event()
        waiting: list[AbstractIncomingMessage] = []

        async def take(message: AbstractIncomingMessage) -> None:
            deliver([message.body])
            waiting.append(message)
            fresh.set()

        async def acknowledge() -> None:
            nonlocal left
            while True:
                await fresh.wait()
                fresh.clear()
                while waiting:
                    last, size = waiting[:BATCH_RECORDS][-1], min(len(waiting), BATCH_RECORDS)
                    del waiting[:BATCH_RECORDS]
                    await last.ack(multiple=True)
                    left -= size
                if left <= 0:
                    done.set()

        queue = await self._channel.get_queue(QUEUE)
        tag = await queue.consume(take)
        await _until(done, acknowledge())
        await queue.cancel(tag)


class Redis(System):
    """A stream through redis-py: single records by its asyncio client with a connection for each command under way;
    batches (a pipeline of XADD) and consuming by its blocking client, which is twice as fast."""

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
        pipeline.execute()  # the process has nothing else to do

    async def post(self, value: bytes) -> None:
        await cast(Awaitable[Any], self._client.xadd(QUEUE, {"v": value}))

    async def send(self, values: Sequence[bytes]) -> None:
        pipeline = self._client.pipeline(transaction=False)
        for value in values:
            pipeline.xadd(QUEUE, {"v": value})
        await pipeline.execute()

    async def consume(self, count: int, deliver: Deliver) -> None:
        left = count
        while left > 0:
            answer: Any = self._blocking.xreadgroup(GROUP, "one", {QUEUE: ">"}, count=BATCH_RECORDS, block=10_000)
            entries = _entries(answer)
            if not entries:
                raise RuntimeError(f"{left} of {count} records never came")
            deliver([fields[b"v"] for _, fields in entries])
            self._blocking.xack(QUEUE, GROUP, *(entry for entry, _ in entries))
            left -= len(entries)


def _entries(answer: Any) -> list[tuple[bytes, dict[bytes, bytes]]]:
    """Those of the one stream in XREADGROUP's answer: a list, or a dict of lists of lists, as the protocol has it."""
    if isinstance(answer, dict):
        return [entry for lists in answer.values() for entries in lists for entry in entries]
    return [entry for _, entries in answer or () for entry in entries]


async def _until(done: asyncio.Event, work: Awaitable[None]) -> None:
    """Work until it is done; what fails is raised."""
    working = asyncio.ensure_future(work)
    finished = asyncio.ensure_future(done.wait())
    try:
        await asyncio.wait([working, finished], return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
    finally:
        working.cancel()
        finished.cancel()
        await asyncio.gather(working, return_exceptions=True)
