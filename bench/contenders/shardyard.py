"""Shardyard: one broker with the embedded log and registry, through `Producer` and `Consumer`."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from bench.contenders.system import GROUP, PARTITIONS, QUEUE, AsyncSystem, Contender, Deliver
from bench.servers import shardyard_broker

from shardyard.client import Brokers, Consumer, Producer
from shardyard.groups import OwnedBatch
from shardyard.model import Record


class Shardyard(AsyncSystem):
    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url
        self._producer: Producer | None = None

    async def __aenter__(self) -> Self:
        return self

    async def create(self) -> None:
        async with Brokers(self._url) as brokers:
            await brokers.post("/v1/topics", {"name": QUEUE, "partitions": PARTITIONS})

    async def _open_producer(self) -> Producer:
        """The process that consumes has none."""
        if self._producer is None:
            self._producer = Producer(self._url)
            await self.enter_async_context(self._producer)
        return self._producer

    async def publish(self, values: Sequence[bytes]) -> None:
        producer = await self._open_producer()
        await producer.publish(QUEUE, [Record.new(value) for value in values])

    async def send(self, value: bytes) -> None:
        producer = await self._open_producer()
        await producer.send(QUEUE, value)

    async def consume(self, count: int, deliver: Deliver) -> None:
        """Batches of different partitions are handled and committed concurrently."""
        remaining = count

        async def handle(batch: OwnedBatch) -> None:
            nonlocal remaining
            deliver([record.value for record in batch.records()])
            await batch.commit()
            remaining -= len(batch)
            if remaining <= 0:
                all_committed.set()

        async def handle_all(consumer: Consumer) -> None:
            async with asyncio.TaskGroup() as tasks:
                async for batch in consumer:
                    tasks.create_task(handle(batch))

        all_committed = asyncio.Event()
        async with Consumer(self._url, GROUP, [QUEUE]) as consumer:
            handling = asyncio.create_task(handle_all(consumer))
            waiting = asyncio.create_task(all_committed.wait())
            await asyncio.wait([handling, waiting], return_when=asyncio.FIRST_COMPLETED)
            if handling.done():
                handling.result()  # raises
            handling.cancel()
            await asyncio.gather(handling, return_exceptions=True)


@contextmanager
def serve(folder: Path) -> Iterator[str]:
    with shardyard_broker(folder) as broker:
        yield broker.url


SHARDYARD = Contender("Shardyard", serve, Shardyard)
