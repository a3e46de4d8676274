"""Messaging servers in this process, on one log, registry and history, for the length of a test."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import uvloop

from shardyard.log import Log
from shardyard.messaging.config import MessagingConfig
from shardyard.messaging.history import History, open_history
from shardyard.messaging.history.materialiser import GROUP as HISTORY_GROUP
from shardyard.messaging.server import MessagingServer
from shardyard.messaging.snowflakes import id_at
from shardyard.model import Partition, Record
from shardyard.placement import hash_named
from shardyard.registry import Registry
from shardyard.runtime.clock import Clock
from shardyard.server.messaging import app
from shardyard.server.messaging.app import MessengerOptions, running_messenger
from shardyard.wire.inbox import TOPIC, InboxEntry, decode_entry, encode_entry
from tests.messaging.clients import WAIT_SECONDS, Client, Clients, opened_clients
from tests.queues.engines import ENGINES

PARTITIONS = 4
"""Of the topic `inbox` in most tests."""


class JumpingClock:
    """The machine's clock, which a test sets forward. Those who sleep until then wake at once."""

    def __init__(self) -> None:
        self._ahead = 0.0
        self._jumped = asyncio.Event()

    def now(self) -> float:
        return time.time() + self._ahead

    def monotonic(self) -> float:
        return time.monotonic() + self._ahead

    async def sleep(self, seconds: float) -> None:
        until = self.monotonic() + seconds
        while (rest := until - self.monotonic()) > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(rest):
                    await self._jumped.wait()

    def jump(self, seconds: float) -> None:
        self._ahead += seconds
        self._jumped.set()
        self._jumped = asyncio.Event()


@dataclass(frozen=True, slots=True)
class Running:
    """A messaging server, from outside and inside."""

    url: str
    server: MessagingServer

    @property
    def owned(self) -> set[int]:
        """The partitions that it serves."""
        return {each.partition.index for each in self.server.partitions if not each.ended and each.ready.done()}


class Yard:
    """What servers share, and the clients of a test."""

    def __init__(self, log: Log, registry: Registry, history: History | None, clients: Clients) -> None:
        self.log = log
        self.registry = registry
        self.history = history
        self.clients = clients
        self._stack = contextlib.AsyncExitStack()
        self._servers: dict[str, contextlib.AsyncExitStack] = {}

    async def start(
        self,
        config: MessagingConfig | None = None,
        *,
        clock: Clock | None = None,
        history: bool = True,
        authenticator: Any = None,
        **options: Any,
    ) -> Running:
        """One more server. It serves, once this returns."""
        options.setdefault("topic_partitions", PARTITIONS)
        made: list[MessagingServer] = []

        def observed(*arguments: Any, **named: Any) -> MessagingServer:
            made.append(MessagingServer(*arguments, **named))
            return made[-1]

        stack = contextlib.AsyncExitStack()
        with mock.patch.object(app, "MessagingServer", observed):
            url = await stack.enter_async_context(
                running_messenger(
                    self.log,
                    self.registry,
                    self.history if history else None,
                    MessengerOptions(config=config or MessagingConfig(), **options),
                    authenticator=authenticator,
                    clock=clock,
                )
            )
        self._servers[url] = stack
        return Running(url, made[0])

    async def stop(self, running: Running) -> None:
        """Stop a server as SIGTERM does."""
        await self._servers.pop(running.url).aclose()

    async def stop_all(self) -> None:
        for stack in reversed(self._servers.values()):
            await stack.aclose()

    async def join(self, running: Running, user: str, device: str = "phone", **options: Any) -> Client:
        return await self.clients.join(running.url, user, device, **options)

    async def fill(self, user: str, texts: Iterable[str], sender: str = "filler") -> list[int]:
        """Append messages to the user's partition at once. Returns their ids."""
        now = int(time.time() * 1000)
        entries = [
            InboxEntry(id_at(now) + n, sender, user, "bulk", n, now, text) for n, text in enumerate(texts, start=1)
        ]
        for first in range(0, len(entries), 1000):
            records = [
                Record(str(entry.id), user.encode(), encode_entry(entry), (), now)
                for entry in entries[first : first + 1000]
            ]
            await self.log.append(inbox_of(user), records)
        return [entry.id for entry in entries]

    # What is stored

    async def stored(self, topic: str = TOPIC) -> list[InboxEntry]:
        """All entries of the topic, partition by partition."""
        entries = []
        for partition in await self.log.topic(topic):
            span = await self.log.span(partition)
            at = span.first
            while at < span.end:
                batch = await self.log.read(partition, at)
                entries += [decode_entry(record.value) for record in batch.records()]
                at = batch.end
        return entries

    async def materialised(self) -> None:
        """Wait until the history has all that the log holds."""
        ends = {p: (await self.log.span(p)).end for p in await self.log.topic(TOPIC)}

        def done() -> bool:
            with self.registry.snapshot() as tx:
                rows = tx.ownerships(HISTORY_GROUP)
            offsets = {row.partition: row.committed.offset for row in rows if row.committed is not None}
            return all(offsets.get(p, 0) >= end for p, end in ends.items())

        await eventually(done)


async def eventually(condition: Callable[[], object]) -> None:
    """Wait until something is so that has no event."""
    async with asyncio.timeout(WAIT_SECONDS):
        while not condition():  # noqa: ASYNC110 it has no event
            await asyncio.sleep(0.005)


def partition_of(user: str, partitions: int = PARTITIONS) -> int:
    return hash_named("fnv1a32")(user) % partitions


def user_of(partition: int, name: str = "user", partitions: int = PARTITIONS) -> str:
    """A user that belongs to the partition."""
    return next(f"{name}{n}" for n in range(10_000) if partition_of(f"{name}{n}", partitions) == partition)


def inbox_of(user: str) -> Partition:
    return Partition(TOPIC, partition_of(user))


@contextlib.asynccontextmanager
async def yard(folder: Path, engine: str = "sqlite") -> AsyncIterator[Yard]:
    opened = ENGINES[engine]
    url = opened.registry_url(folder) if engine == "postgresql" else "memory://"
    async with opened.log(folder) as log, open_history(url) as history, opened_clients() as clients:
        with opened.open_registry(folder) as registry:
            made = Yard(log, registry, history, clients)
            try:
                yield made
            finally:
                await clients.close()
                await made.stop_all()


def run(folder: Path, scenario: Callable[[Yard], Awaitable[None]], engine: str = "sqlite") -> None:
    """Run a scenario in an event loop as servers have it, and fail if something logged an error meanwhile."""

    async def whole() -> None:
        async with yard(folder, engine) as made:
            await scenario(made)

    with no_errors_logged():
        uvloop.run(whole())


@contextlib.contextmanager
def no_errors_logged() -> Iterator[None]:
    """Errors are what an operator has to look at. No client can cause one."""
    records: list[logging.LogRecord] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.ERROR or record.exc_info:
                records.append(record)

    handler = Collect()
    loggers = [logging.getLogger(name) for name in ("", "shardyard", "uvicorn")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
    assert not records, [(record.getMessage(), record.exc_info) for record in records]


def config(**changes: Any) -> MessagingConfig:
    return replace(MessagingConfig(), **changes)
