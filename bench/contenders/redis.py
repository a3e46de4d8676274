"""Redis: a stream with a consumer group, `appendfsync always`, through redis-py."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import redis
from bench.contenders.system import BATCH_RECORDS, GROUP, QUEUE, AsyncSystem, Contender, Deliver
from bench.servers import find_redis, redis_server
from redis import asyncio as aioredis


class Redis(AsyncSystem):
    """Batches and consuming use the blocking client, which is twice as fast. Single records use the asyncio client;
    those that come while a pipeline is under way are sent together in the next one."""

    def __init__(self, port: str) -> None:
        super().__init__()
        self._port = int(port)
        self._waiting: list[tuple[bytes, asyncio.Future[None]]] = []
        self._sending: asyncio.Task[None] | None = None

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
        pipeline.execute()

    async def send(self, value: bytes) -> None:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((value, done))
        if self._sending is None:
            self._sending = asyncio.create_task(self._send_waiting())
        await done

    async def _send_waiting(self) -> None:
        while batch := self._waiting:
            self._waiting = []
            pipeline = self._client.pipeline(transaction=False)
            for value, _ in batch:
                pipeline.xadd(QUEUE, {"v": value})
            await pipeline.execute()
            for _, done in batch:
                done.set_result(None)
        self._sending = None

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


@contextmanager
def serve(folder: Path) -> Iterator[str | None]:
    if server := find_redis():
        with redis_server(server, folder, "always") as port:
            yield str(port)
    else:
        yield None


REDIS = Contender("Redis", serve, Redis)
