"""Real brokers on a log and a registry, in the test's own process, and what tests ask of them."""

import asyncio
import contextlib
import io
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from uvicorn import Server

from shardyard.client import Consumer, Producer
from shardyard.log import Log
from shardyard.log.memory import MemoryLog
from shardyard.log.sqlite import SqliteLog
from shardyard.model import Partition, Record
from shardyard.registry import Registry, open_registry
from shardyard.registry.memory import MemoryRegistry
from shardyard.server.app import serving
from shardyard.wire.media import JSON
from tests.log.samples import contents

PATIENCE_SECONDS = 20.0

Story = Callable[["Yard"], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True)
class Told:
    """What a broker answered."""

    status: int
    body: bytes
    headers: Any

    @property
    def json(self) -> Any:
        return msgspec.json.decode(self.body)

    @property
    def code(self) -> str:
        """Of a refusal, which has a sentence too."""
        error = self.json["error"]
        assert len(error["message"]) > 10
        code: str = error["code"]
        return code


class Yard:
    """Brokers for the length of a story."""

    def __init__(
        self, log: Log, registry: Registry, brokers: list[tuple[str, Server]], session: aiohttp.ClientSession
    ) -> None:
        self.log, self.registry = log, registry
        self.urls = [url for url, _ in brokers]
        self._servers = [server for _, server in brokers]
        self._session = session

    def stop(self, broker: int) -> None:
        """As by SIGTERM."""
        self._servers[broker].should_exit = True

    async def ask(
        self,
        method: str,
        path: str,
        content: object = None,
        *,
        body: bytes | None = None,
        media: str = JSON,
        broker: int = 0,
        token: str | None = None,
        **query: Any,
    ) -> Told:
        if content is not None:
            body = msgspec.json.encode(content)
        headers = {"X-Shardyard-User": "ann"}
        if body is not None:
            headers["Content-Type"] = media
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        params = {name: str(value) for name, value in query.items()}
        url = self.urls[broker] + path
        data = None if body is None else io.BytesIO(body)
        async with self._session.request(method, url, data=data, headers=headers, params=params) as response:
            return Told(response.status, await response.read(), response.headers)

    async def get(self, path: str, **query: Any) -> Any:
        told = await self.ask("GET", path, **query)
        assert told.status == 200, told.body
        return told.json

    async def do(self, method: str, path: str, content: object = None, **query: Any) -> Any:
        """What must succeed."""
        told = await self.ask(method, path, content, **query)
        assert told.status in (200, 201, 204), told.body
        return told.json if told.body else None

    async def topic(self, name: str = "orders", partitions: int = 4, **options: Any) -> None:
        await self.do("POST", "/v1/topics", {"name": name, "partitions": partitions, **options})

    async def publish(self, *values: str, topic: str = "orders", **query: Any) -> Any:
        records = [{"value": value} for value in values]
        return await self.do("POST", f"/v1/topics/{topic}/records", {"records": records}, **query)

    async def set(self, group: str = "billing", **settings: Any) -> Any:
        return await self.do("PATCH", f"/v1/groups/{group}", settings)

    async def records(self, topic: str = "orders") -> list[list[Record]]:
        """Of each partition."""
        return [await contents(self.log, partition) for partition in await self.log.topic(topic)]

    async def count(self) -> int:
        """All records of all topics."""
        count = 0
        for topic in await self.log.topics():
            for partition in topic:
                count += (await self.log.span(partition)).end
        return count

    def producer(self, **options: Any) -> Producer:
        return Producer(self.urls, **{"patience": PATIENCE_SECONDS, **options})

    def consumer(self, name: str | None = None, group: str = "billing", **options: Any) -> Consumer:
        return Consumer(self.urls, group, ["orders"], name=name, **{"session_timeout": 2.0, **options})

    async def rows(self, group: str = "billing", topic: str = "orders") -> dict[int, dict[str, Any]]:
        """The queueOffset rows of a topic, by partition."""
        told = await self.ask("GET", f"/v1/groups/{group}")
        rows = told.json["partitions"] if told.status == 200 else []
        return {row["partition"]: row for row in rows if row["topic"] == topic}

    async def owners(self, group: str = "billing", topic: str = "orders") -> dict[int, str | None]:
        return {index: row["owner"] for index, row in (await self.rows(group, topic)).items()}

    async def until(self, condition: Callable[[], Awaitable[object] | object]) -> None:
        """What is waited for shows in the state of several parts: there is no one event for it."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                found = condition()
                if await found if isinstance(found, Awaitable) else found:
                    return
                await asyncio.sleep(0.02)

    async def until_shared(self, *sizes: int, group: str = "billing", topic: str = "orders") -> dict[int, str | None]:
        """Until members own that many partitions each, and nothing is about to move; returns the owners."""

        async def shared() -> bool:
            rows = (await self.rows(group, topic)).values()
            held = Counter(row["owner"] for row in rows)
            still = all(row["next_owner"] is None for row in rows)
            return still and sorted(held.values()) == sorted(sizes) and None not in held

        await self.until(shared)
        return await self.owners(group, topic)

    async def until_done(self, group: str = "billing", topic: str = "orders") -> None:
        """Until all there is is committed."""

        async def done() -> bool:
            rows = await self.rows(group, topic)
            return bool(rows) and all(row["lag"] == 0 for row in rows.values())

        await self.until(done)


class Handled:
    """What handlers were given: (member, partition, value), in the order in which they were done."""

    def __init__(self) -> None:
        self.all: list[tuple[str, Partition, str]] = []

    @property
    def values(self) -> list[str]:
        return [value for _, _, value in self.all]

    def by(self, member: str) -> list[str]:
        return [value for who, _, value in self.all if who == member]

    @contextlib.asynccontextmanager
    async def at_work(self, consumer: Consumer, **options: Any) -> AsyncIterator[Consumer]:
        """A consumer that notes what it is given."""

        async def note(message: Any) -> None:
            self.all.append((consumer.member.name, message.partition, message.value.decode()))

        async with running(consumer, options.pop("handler", note), **options):
            yield consumer


@contextlib.asynccontextmanager
async def running(consumer: Consumer, handler: Callable[[Any], Any], **options: Any) -> AsyncIterator[Consumer]:
    """A consumer at work; if it breaks down, so does the test."""
    async with consumer:
        work = asyncio.create_task(consumer.run(handler, **options))
        try:
            yield consumer
        finally:
            work.cancel()
            (outcome,) = await asyncio.gather(work, return_exceptions=True)
        assert isinstance(outcome, asyncio.CancelledError), outcome


@contextlib.asynccontextmanager
async def a_broker(log: Log, registry: Registry, token: str | None = None) -> AsyncIterator[tuple[str, Server]]:
    """Its address, and what can be told to stop."""
    async with serving(log, registry, port=0, token=token) as server:
        listening = server.config.bind_socket()
        serve = asyncio.create_task(server.serve([listening]))
        try:
            while not server.started:  # noqa: ASYNC110 it has no event for it
                await asyncio.sleep(0.005)
            yield f"http://127.0.0.1:{listening.getsockname()[1]}", server
        finally:
            server.should_exit = True
            await serve


@contextlib.asynccontextmanager
async def a_yard(folder: Path | None = None, *, brokers: int = 1, token: str | None = None) -> AsyncIterator[Yard]:
    async with contextlib.AsyncExitStack() as stack:
        log: Log = await stack.enter_async_context(MemoryLog() if folder is None else SqliteLog(folder / "log"))
        registry: Registry = stack.enter_context(
            MemoryRegistry() if folder is None else open_registry(f"sqlite:///{folder / 'registry.db'}")
        )
        served = [await stack.enter_async_context(a_broker(log, registry, token)) for _ in range(brokers)]
        session = await stack.enter_async_context(aiohttp.ClientSession())
        yield Yard(log, registry, served, session)


def tell(story: Story, folder: Path | None = None, *, brokers: int = 1, token: str | None = None) -> None:
    """Tell a story: on SQLite in a folder, or in memory. Brokers share log and registry."""

    async def whole() -> None:
        async with a_yard(folder, brokers=brokers, token=token) as yard, asyncio.timeout(3 * PATIENCE_SECONDS):
            await story(yard)

    asyncio.run(whole())
