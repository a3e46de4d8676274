"""NATS JetStream: a stream in files with `sync_interval: always` and a durable push consumer, through nats-py."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import nats
from bench.contenders.system import (
    GROUP,
    PREFETCH,
    QUEUE,
    AsyncSystem,
    Contender,
    CumulativeAcks,
    Deliver,
)
from bench.servers import find_nats, nats_server
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

MAX_PENDING_ACKS = 100_000
"""Above what any row has in flight, also if the server does not keep up with the schedule."""


class Nats(AsyncSystem):
    def __init__(self, port: str) -> None:
        super().__init__()
        self._port = port

    async def __aenter__(self) -> Self:
        connection = await nats.connect(f"nats://127.0.0.1:{self._port}", pending_size=64 * 1024 * 1024)
        self.push_async_callback(connection.close)
        self._stream = connection.jetstream(timeout=30, publish_async_max_pending=MAX_PENDING_ACKS)
        return self

    async def create(self) -> None:
        await self._stream.add_stream(name=QUEUE, subjects=[QUEUE])  # file storage is the default
        config = ConsumerConfig(
            durable_name=GROUP,
            deliver_subject=f"{GROUP}.delivery",
            deliver_policy=DeliverPolicy.ALL,
            ack_policy=AckPolicy.ALL,
            max_ack_pending=PREFETCH,
        )
        await self._stream.add_consumer(QUEUE, config)

    async def publish(self, values: Sequence[bytes]) -> None:
        await asyncio.gather(*[await self._stream.publish_async(QUEUE, value) for value in values])

    async def send(self, value: bytes) -> None:
        await (await self._stream.publish_async(QUEUE, value))

    async def consume(self, count: int, deliver: Deliver) -> None:
        acks = CumulativeAcks[Any](count, deliver, lambda message: message.ack())

        async def on_message(message: Any) -> None:
            acks.arrived(message, message.data)

        info = await self._stream.consumer_info(QUEUE, GROUP)
        subscription = await self._stream.subscribe_bind(QUEUE, info.config, info.name, cb=on_message, manual_ack=True)
        await acks.run()
        await subscription.unsubscribe()


@contextmanager
def serve(folder: Path) -> Iterator[str | None]:
    if server := find_nats():
        with nats_server(server, folder, "always") as port:
            yield str(port)
    else:
        yield None


NATS = Contender("NATS", serve, Nats)
