"""A queue and its owner, without a node: for tests of what happens on one queue."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from shardyard.groups.fence import ownership_fence
from shardyard.log import Log
from shardyard.model import Record
from shardyard.model.sharding import (
    NO_LIMITS,
    NODES_GROUP,
    SHARDS_TOPIC,
    STATES_TOPIC,
    OutgoingMessage,
    Queue,
    QueueLimits,
)
from shardyard.runtime.clock import Clock, SystemClock
from shardyard.sharding.config import ShardingConfig
from shardyard.sharding.dead_letters import DeadLetter
from shardyard.sharding.delivery import Deliveries, Subscription
from shardyard.sharding.messages import to_record, version_header
from shardyard.sharding.queue import IsCurrent, ShardQueue
from shardyard.sharding.state_store import StateStore
from tests.queues.engines import ENGINES


@dataclass(eq=False)
class Letters:
    """Keeps dead letters in memory. It can fail."""

    stored: list[tuple[str, DeadLetter]] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)

    async def store(self, queue: Queue, letters: Sequence[DeadLetter]) -> None:
        if self.errors:
            raise self.errors.pop(0)
        self.stored += ((queue.name, letter) for letter in letters)

    def bodies(self) -> list[bytes]:
        return [letter.record.value for _, letter in self.stored]


@dataclass(eq=False)
class Consumer:
    """Keeps what was delivered to it."""

    got: list[tuple[int, bytes, bool, int]] = field(default_factory=list)
    """Tag, body, redelivered, delivery count."""
    batches: list[Deliveries] = field(default_factory=list)
    ends: list[BaseException] = field(default_factory=list)
    subscription: Subscription | None = None
    journal: "list[tuple[Consumer, Deliveries]] | None" = None

    def receive(self, deliveries: Deliveries) -> None:
        if self.journal is not None:
            self.journal.append((self, deliveries))
        self.batches.append(deliveries)
        tags = range(deliveries.first_tag, deliveries.first_tag + len(deliveries))
        rows = zip(tags, deliveries.records, deliveries.redelivered, deliveries.counts, strict=True)
        self.got += ((tag, record.value, again, count) for tag, record, again, count in rows)

    @property
    def bodies(self) -> list[bytes]:
        return [body for _, body, _, _ in self.got]

    @property
    def settling(self) -> Subscription:
        assert self.subscription is not None
        return self.subscription


@dataclass(eq=False)
class Owner:
    """The log of one queue, and owners one after another."""

    log: Log
    clock: Clock
    config: ShardingConfig
    limits: QueueLimits
    letters: Letters = field(default_factory=Letters)
    is_in_touch: Callable[[], bool] = lambda: True
    is_current: IsCurrent | None = None
    epoch: int = 0
    lost: list[BaseException] = field(default_factory=list)
    stores: list[StateStore] = field(default_factory=list)
    opened: list[ShardQueue] = field(default_factory=list)

    async def open(self, first: int = 0) -> ShardQueue:
        """Take the queue over."""
        self.epoch += 1
        queue = Queue("jobs", 0, 1, first=first, limits=self.limits)
        states = StateStore(self.log, self.clock, seconds=self.config.store_seconds)
        self.stores.append(states)
        fence = ownership_fence(NODES_GROUP, queue.partition, self.epoch)
        served = ShardQueue(
            *(queue, fence, self.log, states, self.letters),
            clock=self.clock,
            config=self.config,
            is_in_touch=lambda: self.is_in_touch(),  # noqa: PLW0108 tests replace it
            is_current=self.is_current,
            lost=lambda _, error: self.lost.append(error),
        )
        self.opened.append(served)
        await served.open()
        return served

    async def publish(self, *bodies: str, expiration_ms: int | None = None, version: int = 1) -> None:
        queue = Queue("jobs", 0, 1)
        messages = [OutgoingMessage(body.encode(), "key", expiration_ms=expiration_ms) for body in bodies]
        records = [to_record(message, message.body.decode(), version_header(version)) for message in messages]
        await self.log.append(queue.partition, records, fence=queue.routing_fence)


@asynccontextmanager
async def owner(
    engine: str,
    folder: Path,
    *,
    limits: QueueLimits = NO_LIMITS,
    clock: Clock | None = None,
    config: ShardingConfig | None = None,
) -> AsyncIterator[Owner]:
    """An owner on an engine. What it opened is closed at the end, as if its process had died."""
    async with ENGINES[engine].log(folder) as log:
        for topic in (SHARDS_TOPIC, STATES_TOPIC):
            await log.create_topic(topic, 1)
        yard = Owner(log, clock or SystemClock(), config or ShardingConfig(store_seconds=0.001), limits)
        try:
            yield yard
        finally:
            for served in yard.opened:
                await served.close(clean=False)
            for states in yard.stores:
                await states.close()


def consume(
    queue: ShardQueue,
    *,
    prefetch: int = 0,
    no_ack: bool = False,
    journal: list[tuple[Consumer, Deliveries]] | None = None,
) -> Consumer:
    """`journal`: gets what all consumers get, in order."""
    consumer = Consumer(journal=journal)
    consumer.subscription = queue.subscribe(
        consumer.receive, prefetch=prefetch, no_ack=no_ack, ended=consumer.ends.append
    )
    return consumer


async def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait until the condition is true."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 there is no event for every condition
            await asyncio.sleep(0.001)


async def got(consumer: Consumer, *bodies: str) -> None:
    """Wait until the consumer has got exactly these, in this order."""
    expected = [body.encode() for body in bodies]
    await until(lambda: len(consumer.got) >= len(expected))
    assert consumer.bodies == expected


def names(count: int, start: int = 0) -> list[str]:
    return [f"m{number:04}" for number in range(start, start + count)]


def records(bodies: Iterable[str]) -> list[Record]:
    return [Record(body, b"key", body.encode()) for body in bodies]
