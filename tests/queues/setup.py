"""Real brokers on a log and a registry, in the process of the test."""

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
from shardyard.model import Partition, Record
from shardyard.registry import Registry
from shardyard.server.app import serving
from shardyard.wire.media import JSON
from tests.queues.engines import ENGINES
from tests.queues.stored import contents, offsets

TIMEOUT_SECONDS = 60.0

Scenario = Callable[["Cluster"], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True)
class Response:
    """The response of a broker."""

    status: int
    body: bytes
    headers: Any

    @property
    def json(self) -> Any:
        return msgspec.json.decode(self.body)

    @property
    def code(self) -> str:
        """The code of an error, which has a message as well."""
        error = self.json["error"]
        assert len(error["message"]) > 10
        code: str = error["code"]
        return code


class Cluster:
    """Brokers for the duration of a test."""

    def __init__(
        self, log: Log, registry: Registry, brokers: list[tuple[str, Server]], session: aiohttp.ClientSession
    ) -> None:
        self.log, self.registry = log, registry
        self.urls = [url for url, _ in brokers]
        self._servers = [server for _, server in brokers]
        self._session = session

    def stop(self, broker: int) -> None:
        """Stop a broker, as SIGTERM does."""
        self._servers[broker].should_exit = True

    async def request(
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
    ) -> Response:
        """Send a request, and return its response, also if it is an error."""
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
            return Response(response.status, await response.read(), response.headers)

    async def get(self, path: str, **query: Any) -> Any:
        response = await self.request("GET", path, **query)
        assert response.status == 200, response.body
        return response.json

    async def do(self, method: str, path: str, content: object = None, **query: Any) -> Any:
        """Send a request that must succeed, and return its body."""
        response = await self.request(method, path, content, **query)
        assert response.status in (200, 201, 204), response.body
        return response.json if response.body else None

    async def topic(self, name: str = "orders", partitions: int = 4, **options: Any) -> None:
        await self.do("POST", "/v1/topics", {"name": name, "partitions": partitions, **options})

    async def publish(self, *values: str, topic: str = "orders", **query: Any) -> Any:
        records = [{"value": value} for value in values]
        return await self.do("POST", f"/v1/topics/{topic}/records", {"records": records}, **query)

    async def set(self, group: str = "billing", **settings: Any) -> Any:
        return await self.do("PATCH", f"/v1/groups/{group}", settings)

    async def records(self, topic: str = "orders") -> list[list[Record]]:
        """The records of each partition."""
        return [await contents(self.log, partition) for partition in await self.log.topic(topic)]

    async def count(self) -> int:
        """How many records all topics have."""
        count = 0
        for topic in await self.log.topics():
            for partition in topic:
                count += len(await offsets(self.log, partition))
        return count

    def producer(self, **options: Any) -> Producer:
        return Producer(self.urls, **{"retry_seconds": TIMEOUT_SECONDS, **options})

    def consumer(self, name: str | None = None, group: str = "billing", **options: Any) -> Consumer:
        return Consumer(self.urls, group, ["orders"], name=name, **{"session_timeout": 2.0, **options})

    async def rows(self, group: str = "billing", topic: str = "orders") -> dict[int, dict[str, Any]]:
        """A group's status of the partitions of a topic, by index."""
        response = await self.request("GET", f"/v1/groups/{group}")
        rows = response.json["partitions"] if response.status == 200 else []
        return {row["partition"]: row for row in rows if row["topic"] == topic}

    async def owners(self, group: str = "billing", topic: str = "orders") -> dict[int, str | None]:
        return {index: row["owner"] for index, row in (await self.rows(group, topic)).items()}

    async def until(self, condition: Callable[[], Awaitable[object] | object]) -> None:
        """Wait until the condition holds. It is polled, because no single event signals it."""
        async with asyncio.timeout(TIMEOUT_SECONDS):
            while True:
                found = condition()
                if await found if isinstance(found, Awaitable) else found:
                    return
                await asyncio.sleep(0.02)

    async def until_shared(self, *sizes: int, group: str = "billing", topic: str = "orders") -> dict[int, str | None]:
        """Wait until members own that many partitions each, and no partition is about to move. Returns the owners."""

        async def shared() -> bool:
            rows = (await self.rows(group, topic)).values()
            owned = Counter(row["owner"] for row in rows)
            still = all(row["next_owner"] is None for row in rows)
            return still and sorted(owned.values()) == sorted(sizes) and None not in owned

        await self.until(shared)
        return await self.owners(group, topic)

    async def until_done(self, group: str = "billing", topic: str = "orders") -> None:
        """Wait until the group has committed all records."""

        async def done() -> bool:
            rows = await self.rows(group, topic)
            return bool(rows) and all(row["lag"] == 0 for row in rows.values())

        await self.until(done)


class Handled:
    """The records that handlers have handled: (member, partition, value), in order."""

    def __init__(self) -> None:
        self.all: list[tuple[str, Partition, str]] = []

    @property
    def values(self) -> list[str]:
        return [value for _, _, value in self.all]

    def by(self, member: str) -> list[str]:
        return [value for who, _, value in self.all if who == member]

    @contextlib.asynccontextmanager
    async def at_work(self, consumer: Consumer, **options: Any) -> AsyncIterator[Consumer]:
        """Run a consumer that records what it handles."""

        async def handle(message: Any) -> None:
            self.all.append((consumer.member.name, message.partition, message.value.decode()))

        async with running(consumer, options.pop("handler", handle), **options):
            yield consumer


@contextlib.asynccontextmanager
async def running(consumer: Consumer, handler: Callable[[Any], Any], **options: Any) -> AsyncIterator[Consumer]:
    """Run a consumer; if it fails, so does the test."""
    async with consumer:
        work = asyncio.create_task(consumer.run(handler, **options))
        try:
            yield consumer
        finally:
            work.cancel()
            (outcome,) = await asyncio.gather(work, return_exceptions=True)
        assert isinstance(outcome, asyncio.CancelledError), outcome


@contextlib.asynccontextmanager
async def open_broker(log: Log, registry: Registry, token: str | None = None) -> AsyncIterator[tuple[str, Server]]:
    """Run a broker: its address, and its server."""
    async with serving(log, registry, port=0, token=token) as server:
        listening = server.config.bind_socket()
        serve = asyncio.create_task(server.serve([listening]))
        try:
            while not server.started:  # noqa: ASYNC110 there is no event for it
                await asyncio.sleep(0.005)
            yield f"http://127.0.0.1:{listening.getsockname()[1]}", server
        finally:
            server.should_exit = True
            await serve


@contextlib.asynccontextmanager
async def open_cluster(
    folder: Path | None = None, *, engine: str | None = None, brokers: int = 1, token: str | None = None
) -> AsyncIterator[Cluster]:
    chosen = ENGINES[engine or ("memory" if folder is None else "sqlite")]
    async with contextlib.AsyncExitStack() as stack:
        log = await stack.enter_async_context(chosen.log(folder or Path()))
        registry = stack.enter_context(chosen.open_registry(folder or Path()))
        served = [await stack.enter_async_context(open_broker(log, registry, token)) for _ in range(brokers)]
        session = await stack.enter_async_context(aiohttp.ClientSession())
        yield Cluster(log, registry, served, session)


def run(
    scenario: Scenario,
    folder: Path | None = None,
    *,
    engine: str | None = None,
    brokers: int = 1,
    token: str | None = None,
) -> None:
    """Run a scenario on brokers that share a log and a registry: on the named engine, or on SQLite if a folder is
    given, or in memory."""

    async def with_cluster() -> None:
        async with (
            open_cluster(folder, engine=engine, brokers=brokers, token=token) as cluster,
            asyncio.timeout(3 * TIMEOUT_SECONDS),
        ):
            await scenario(cluster)

    asyncio.run(with_cluster())
