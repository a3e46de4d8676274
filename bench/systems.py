"""Three logs behind one face: what `bench/log.py` measures is the same code for each of them.

Each is used the way its Python client is meant to be, from one process, with one stream per partition.
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
from pathlib import Path
from typing import Any, Self, cast

import nats
import nats.js
import pyarrow as pa
import redis
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy
from redis import asyncio as aioredis

from shardyard.log.sqlite import Durability, SqliteLog
from shardyard.model import Partition, Record, TopicExists
from shardyard.model.batch import SCHEMA

PARTITIONS = 16
BATCH_RECORDS = 500
RECORD_BYTES = 256
READ_RECORDS = 10_000
NATS_FETCH_RECORDS = 1_000
REDIS_READ_RECORDS = 2_000
"""The fastest, for its client."""
REDIS_THREADS = 1
"""More only fight for Python's lock."""
TOPIC = "bench"

VALUES = [os.urandom(RECORD_BYTES) for _ in range(BATCH_RECORDS)]
"""Random, so that nobody can compress them."""
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

Seen = Callable[[bytes], None]


class System(AsyncExitStack, ABC):
    """A log that is open while it is entered."""

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
        """Read from the beginning to the end; how many records each answer had."""

    @abstractmethod
    async def follow(self, seen: Seen) -> None:
        """Call `seen` with every new value of every partition, from now on and without end."""


@dataclass(frozen=True, slots=True)
class Host:
    """Where to find a system, for another process too."""

    kind: str
    at: str
    durability: Durability = "power"

    def open(self, *, arrow: bool = True) -> System:
        if self.kind == "ours":
            return Ours(Path(self.at), self.durability, arrow=arrow)
        return Redis(int(self.at)) if self.kind == "redis" else Nats(int(self.at))


class Ours(System):
    """Shardyard's embedded log; `arrow`: batches are Arrow's, otherwise lists of records."""

    def __init__(self, folder: Path, durability: Durability, *, arrow: bool) -> None:
        super().__init__()
        self._folder = folder
        self._durability: Durability = durability
        self._arrow = arrow
        self._partitions = [Partition(TOPIC, i) for i in range(PARTITIONS)]

    async def __aenter__(self) -> Self:
        self._log = await self.enter_async_context(SqliteLog(self._folder, durability=self._durability))
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

    async def follow(self, seen: Seen) -> None:
        async def one(partition: Partition) -> None:
            offset = (await self._log.span(partition)).end
            while True:
                batch = await self._log.read(partition, offset, wait=30)
                for record in batch.records():
                    seen(record.value)
                offset = batch.end

        await asyncio.gather(*(one(partition) for partition in self._partitions))


class Redis(System):
    """Redis streams through redis-py: single records by its asyncio client with a connection for each command under
    way; batches (500 XADD a pipeline) and reading by its blocking client in threads, which is twice as fast."""

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

    async def follow(self, seen: Seen) -> None:
        last: dict[Any, Any] = {}
        for partition in range(PARTITIONS):
            stream = f"{TOPIC}-{partition}"
            newest = await cast(Awaitable[Any], self._client.xrevrange(stream, count=1))
            last[stream] = newest[0][0] if newest else "0"
        while True:
            answer = await cast(Awaitable[Any], self._client.xread(last, block=30_000))
            for stream, entries in _streams(answer):
                for entry, fields in entries:
                    seen(fields[b"v"])
                    last[stream] = entry


def _streams(answer: Any) -> list[tuple[str, list[tuple[bytes, dict[bytes, bytes]]]]]:
    """XREAD's answer: a list, or a dict of lists of lists, as the protocol has it."""
    if isinstance(answer, dict):
        return [(stream.decode(), [e for entries in lists for e in entries]) for stream, lists in answer.items()]
    return [(stream.decode(), entries) for stream, entries in answer or ()]


class Nats(System):
    """JetStream with file storage through nats-py: one connection, up to 32 batches of 500 unacknowledged at once."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self._port = port

    async def __aenter__(self) -> Self:
        connection = await nats.connect(f"nats://127.0.0.1:{self._port}", pending_size=64 * 1024 * 1024)
        self.push_async_callback(connection.close)
        self._stream = connection.jetstream(timeout=30, publish_async_max_pending=64 * BATCH_RECORDS)
        for partition in range(PARTITIONS):
            name = f"{TOPIC}-{partition}"
            await self._stream.add_stream(name=name, subjects=[name])  # files are its default storage
        return self

    async def send_batch(self, partition: int) -> None:
        subject = f"{TOPIC}-{partition}"
        await asyncio.gather(*[await self._stream.publish_async(subject, value) for value in VALUES])

    async def send(self, partition: int, value: bytes) -> None:
        await self._stream.publish(f"{TOPIC}-{partition}", value)

    async def read(self, partition: int) -> AsyncIterator[int]:
        name = f"{TOPIC}-{partition}"
        left = (await self._stream.stream_info(name)).state.messages
        config = ConsumerConfig(ack_policy=AckPolicy.NONE, deliver_policy=DeliverPolicy.ALL)
        consumer = await self._stream.pull_subscribe(name, stream=name, config=config)
        try:
            while left > 0:
                messages = await consumer.fetch(min(NATS_FETCH_RECORDS, left), timeout=10)
                left -= len(messages)
                yield len(messages)
        finally:
            await consumer.unsubscribe()

    async def follow(self, seen: Seen) -> None:
        async def one(name: str) -> None:
            messages = await self._stream.subscribe(
                name, stream=name, ordered_consumer=True, deliver_policy=DeliverPolicy.NEW
            )
            async for message in messages.messages:
                seen(message.data)

        await asyncio.gather(*(one(f"{TOPIC}-{partition}") for partition in range(PARTITIONS)))
