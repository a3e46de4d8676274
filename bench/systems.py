"""One interface to Shardyard's log, Redis streams and NATS JetStream, so that `bench/log.py` measures them alike.

Each is used from one process, as its Python client is meant to be used, with one stream per partition.
"""

import asyncio
import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, cast

import nats
import nats.js
import pyarrow as pa
import redis
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy
from redis import asyncio as aioredis

from shardyard.log import open_log
from shardyard.log.sqlite import Durability
from shardyard.model import Partition, Record, TopicExists
from shardyard.model.batch import SCHEMA

PARTITIONS = 16
BATCH_RECORDS = 500
RECORD_BYTES = 256
READ_RECORDS = 10_000
NATS_FETCH_RECORDS = 1_000
REDIS_READ_RECORDS = 2_000
"""The batch size at which its client reads fastest."""
REDIS_THREADS = 1
"""More threads only contend for the GIL."""
TOPIC = "bench"

VALUES = [os.urandom(RECORD_BYTES) for _ in range(BATCH_RECORDS)]
"""Random bytes, which no system can compress."""
RECORDS = [Record.new(value) for value in VALUES]
ARROW = pa.RecordBatch.from_pydict(
    {
        "id": [record.id for record in RECORDS],
        "key": [None] * BATCH_RECORDS,
        "value": VALUES,
        "headers": [None] * BATCH_RECORDS,
        "timestamp": [0] * BATCH_RECORDS,
    },
    schema=SCHEMA,
)

OnValue = Callable[[bytes], None]


class System(AsyncExitStack, ABC):
    """A log that is open inside its `async with` block."""

    @abstractmethod
    async def __aenter__(self) -> Self: ...

    @abstractmethod
    async def send_batch(self, partition: int) -> None:
        """Send the batch of 500; returns when the log has acknowledged all of it."""

    @abstractmethod
    async def send(self, partition: int, value: bytes) -> None:
        """Send one record; returns when the log has acknowledged it."""

    @abstractmethod
    def read(self, partition: int) -> AsyncIterator[int]:
        """Read the partition from its first to its last record; yields the number of records in each response."""

    async def settle(self) -> None:
        """Finish what the system does in the background after writes, such as merging small batches."""

    @abstractmethod
    async def follow(self, on_value: OnValue) -> None:
        """Call `on_value` with every new value of every partition, until cancelled."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """How to connect to a running system, from any process."""

    kind: str
    address: str
    """The URL of Shardyard's log, or the port of a server."""
    durability: Durability = "power"

    def open(self, *, arrow: bool = True) -> System:
        if self.kind == "shardyard":
            return Shardyard(self.address, self.durability, arrow=arrow)
        return Redis(int(self.address)) if self.kind == "redis" else Nats(int(self.address))


class Shardyard(System):
    """Shardyard's log, with Arrow batches if `arrow` is set and lists of `Record` otherwise."""

    def __init__(self, url: str, durability: Durability, *, arrow: bool) -> None:
        super().__init__()
        self._url = url
        self._durability: Durability = durability
        self._arrow = arrow
        self._partitions = [Partition(TOPIC, i) for i in range(PARTITIONS)]

    async def __aenter__(self) -> Self:
        self._log = await self.enter_async_context(open_log(self._url, durability=self._durability))
        with contextlib.suppress(TopicExists):
            await self._log.create_topic(TOPIC, PARTITIONS)
        return self

    async def send_batch(self, partition: int) -> None:
        await self._log.append(self._partitions[partition], ARROW if self._arrow else RECORDS)

    async def send(self, partition: int, value: bytes) -> None:
        await self._log.append(self._partitions[partition], [Record.new(value)])

    async def read(self, partition: int) -> AsyncIterator[int]:
        offset = 0
        while True:
            batch = await self._log.read(self._partitions[partition], offset, max_records=READ_RECORDS)
            if not len(batch):
                return
            offset = batch.end
            yield len(batch) if self._arrow else len(batch.records())

    async def settle(self) -> None:
        await self._log.maintain()

    async def follow(self, on_value: OnValue) -> None:
        async def follow_partition(partition: Partition) -> None:
            offset = (await self._log.span(partition)).end
            while True:
                batch = await self._log.read(partition, offset, wait=30)
                for record in batch.records():
                    on_value(record.value)
                offset = batch.end

        await asyncio.gather(*(follow_partition(partition) for partition in self._partitions))


class Redis(System):
    """Redis streams through redis-py.

    Single records use the asyncio client, with one connection for each command in flight. Batches (pipelines of 500
    XADD) and reads use the blocking client in a thread, which is twice as fast.
    """

    def __init__(self, port: int) -> None:
        super().__init__()
        self._port = port

    async def __aenter__(self) -> Self:
        self._client = aioredis.Redis(host="127.0.0.1", port=self._port)
        self.push_async_callback(self._client.aclose)
        self._blocking = redis.Redis(host="127.0.0.1", port=self._port)
        self.callback(self._blocking.close)
        self._threads = self.enter_context(ThreadPoolExecutor(REDIS_THREADS))
        return self

    async def send_batch(self, partition: int) -> None:
        await asyncio.get_running_loop().run_in_executor(self._threads, self._add, f"{TOPIC}-{partition}")

    def _add(self, stream: str) -> None:
        pipeline = self._blocking.pipeline(transaction=False)
        for value in VALUES:
            pipeline.xadd(stream, {"v": value})
        pipeline.execute()

    async def send(self, partition: int, value: bytes) -> None:
        await cast(Awaitable[Any], self._client.xadd(f"{TOPIC}-{partition}", {"v": value}))

    async def read(self, partition: int) -> AsyncIterator[int]:
        start = "-"
        while True:
            work = partial(self._blocking.xrange, f"{TOPIC}-{partition}", start, "+", count=REDIS_READ_RECORDS)
            entries: Any = await asyncio.get_running_loop().run_in_executor(self._threads, work)
            if not entries:
                return
            start = "(" + entries[-1][0].decode()
            yield len(entries)

    async def follow(self, on_value: OnValue) -> None:
        last: dict[Any, Any] = {}
        for partition in range(PARTITIONS):
            stream = f"{TOPIC}-{partition}"
            newest = await cast(Awaitable[Any], self._client.xrevrange(stream, count=1))
            last[stream] = newest[0][0] if newest else "0"
        while True:
            response = await cast(Awaitable[Any], self._client.xread(last, block=30_000))
            for stream, entries in _streams(response):
                for entry, fields in entries:
                    on_value(fields[b"v"])
                    last[stream] = entry


def _streams(response: Any) -> list[tuple[str, list[tuple[bytes, dict[bytes, bytes]]]]]:
    """The entries of each stream in a response to XREAD: a list with RESP2, a dict of lists of lists with RESP3."""
    if isinstance(response, dict):
        return [(stream.decode(), [e for entries in lists for e in entries]) for stream, lists in response.items()]
    return [(stream.decode(), entries) for stream, entries in response or ()]


class Nats(System):
    """JetStream with file storage, through nats-py: one connection, up to 32 batches of 500 in flight."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self._port = port

    async def __aenter__(self) -> Self:
        connection = await nats.connect(f"nats://127.0.0.1:{self._port}", pending_size=64 * 1024 * 1024)
        self.push_async_callback(connection.close)
        self._stream = connection.jetstream(timeout=30, publish_async_max_pending=64 * BATCH_RECORDS)
        for partition in range(PARTITIONS):
            name = f"{TOPIC}-{partition}"
            await self._stream.add_stream(name=name, subjects=[name])  # file storage is the default
        return self

    async def send_batch(self, partition: int) -> None:
        subject = f"{TOPIC}-{partition}"
        await asyncio.gather(*[await self._stream.publish_async(subject, value) for value in VALUES])

    async def send(self, partition: int, value: bytes) -> None:
        await self._stream.publish(f"{TOPIC}-{partition}", value)

    async def read(self, partition: int) -> AsyncIterator[int]:
        name = f"{TOPIC}-{partition}"
        remaining = (await self._stream.stream_info(name)).state.messages
        config = ConsumerConfig(ack_policy=AckPolicy.NONE, deliver_policy=DeliverPolicy.ALL)
        consumer = await self._stream.pull_subscribe(name, stream=name, config=config)
        try:
            while remaining > 0:
                messages = await consumer.fetch(min(NATS_FETCH_RECORDS, remaining), timeout=10)
                remaining -= len(messages)
                yield len(messages)
        finally:
            await consumer.unsubscribe()

    async def follow(self, on_value: OnValue) -> None:
        async def follow_stream(name: str) -> None:
            messages = await self._stream.subscribe(
                name, stream=name, ordered_consumer=True, deliver_policy=DeliverPolicy.NEW
            )
            async for message in messages.messages:
                on_value(message.data)

        await asyncio.gather(*(follow_stream(f"{TOPIC}-{partition}") for partition in range(PARTITIONS)))
