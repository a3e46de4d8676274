"""Coordinators and workers that follow the mode, within this process, for the length of a test."""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path

from shardyard.fanout.channels import Channels
from shardyard.fanout.config import FanoutConfig
from shardyard.fanout.migration import Migration
from shardyard.fanout.modes import ModeState, Role
from shardyard.fanout.parts import make_part
from shardyard.fanout.process import FanoutProcess
from shardyard.fanout.topics import open_all
from shardyard.groups import Node
from shardyard.log import Log
from shardyard.model import Partition
from shardyard.registry import Registry
from shardyard.wire.channels import decode_event
from shardyard.wire.inbox import POST_KEY, TOPIC
from tests.queues.engines import ENGINES

INBOX_PARTITIONS = 4
EVENT_PARTITIONS = 4
WAIT_SECONDS = 60.0
CONFIG = FanoutConfig(session_timeout=2.0, prepare_seconds=10.0)


class FanoutYard:
    """What the processes share, and those that run."""

    def __init__(self, log: Log, registry: Registry, node: Node, stack: contextlib.AsyncExitStack) -> None:
        self.log = log
        self.registry = registry
        self.node = node
        self.channels = Channels(log)
        self.migration = Migration(log, registry, node.transactions, node.clock, "test")
        self.published: defaultdict[str, list[int]] = defaultdict(list)
        """By channel, the ids of its events in the order in which they were acknowledged."""
        self._stack = stack

    async def start(self, role: Role, name: str, config: FanoutConfig = CONFIG) -> FanoutProcess:
        """One more process. It is ready, once this returns."""
        node = await self._stack.enter_async_context(Node(self.log, self.registry, name=name))
        make = partial(make_part, config=config, address=f"http://{name}")
        process = FanoutProcess(node, role, make, address=f"http://{name}", config=config)
        await self._stack.enter_async_context(process)
        return process

    async def publish(self, channel: str, text: str = "hello") -> None:
        published = await self.channels.publish(channel, text, sender="publisher")
        self.published[channel].append(published.id)

    async def publish_until(self, stop: asyncio.Event, channels: int = 10) -> None:
        """Publish to `channel-0` and so on, again and again."""
        number = 0
        while not stop.is_set():
            await asyncio.gather(*(self.publish(f"channel-{n}", f"{number}") for n in range(channels)))
            number += 1
            await asyncio.sleep(0.02)

    async def publish_more(self, count: int) -> None:
        """Wait until `publish_until` has published so many more."""
        before = sum(map(len, self.published.values()))
        await until(lambda: sum(map(len, self.published.values())) >= before + count, "events to be published")

    async def state(self) -> ModeState:
        return await self.migration.state()

    async def received(self) -> dict[int, dict[str, list[int]]]:
        """By partition of `inbox` and channel, the ids of the events that were stored, in order."""
        found: dict[int, dict[str, list[int]]] = {}
        for index, span in (await self.log.ends(TOPIC)).items():
            by_channel: defaultdict[str, list[int]] = defaultdict(list)
            offset = span.first
            while offset < span.end:
                batch = await self.log.read(Partition(TOPIC, index), offset)
                for record in batch.records():
                    key = record.key or b""
                    assert key.startswith(POST_KEY)
                    by_channel[key[1:].decode()].append(decode_event(record.value).id)
                offset = batch.end
            found[index] = dict(by_channel)
        return found

    async def all_delivered(self, inboxes: dict[str, set[int]]) -> None:
        """Wait until each event is in the inbox partitions of its channel. Then it must be there once, and in order."""
        wanted = {
            index: {c: ids for c, ids in self.published.items() if index in inboxes[c]}
            for index in range(INBOX_PARTITIONS)
        }

        def count(parts: dict[int, dict[str, list[int]]]) -> int:
            return sum(len(ids) for by_channel in parts.values() for ids in by_channel.values())

        async def arrived() -> bool:
            return count(await self.received()) >= count(wanted)

        await until(arrived, "all events to arrive")
        assert await self.received() == wanted


@contextlib.asynccontextmanager
async def fanout_yard(folder: Path, engine: str = "memory") -> AsyncIterator[FanoutYard]:
    opened = ENGINES[engine]
    with opened.open_registry(folder) as registry:
        async with opened.log(folder) as log, contextlib.AsyncExitStack() as stack:
            await log.create_topic(TOPIC, INBOX_PARTITIONS)
            await log.create_topic("events", EVENT_PARTITIONS)
            await open_all(log)
            node = await stack.enter_async_context(Node(log, registry, name="test"))
            yield FanoutYard(log, registry, node, stack)


async def until(condition: Callable[[], Awaitable[bool] | bool], what: str) -> None:
    """Wait for a condition that has no event."""
    try:
        async with asyncio.timeout(WAIT_SECONDS):
            while True:
                holds = condition()
                if await holds if isinstance(holds, Awaitable) else holds:
                    return
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"waited in vain for {what}") from None
