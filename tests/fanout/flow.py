"""The fan-out within one process: topics, members who join and come online, events, and what arrives in `inbox`."""

import asyncio
import contextlib
import itertools
import tempfile
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path

from shardyard.fanout.config import FanoutConfig
from shardyard.fanout.coordinator import Coordinator
from shardyard.fanout.member import ForwardingMember
from shardyard.fanout.topics import open_all
from shardyard.fanout.worker import Worker
from shardyard.groups import Node
from shardyard.log import Log
from shardyard.log.memory import MemoryLog
from shardyard.log.sqlite import SqliteLog
from shardyard.model import Partition, Record
from shardyard.placement import Jump, Modulus
from shardyard.registry import open_registry
from shardyard.wire.channels import (
    EVENTS,
    FANOUT_PARTITIONS,
    MEMBERS,
    PRESENCE,
    ChannelEvent,
    Source,
    change,
    decode_event,
    encode_event,
    parse_source,
)
from shardyard.wire.inbox import POST_KEY, TOPIC

INBOX_PARTITIONS = 4
EVENT_PARTITIONS = 4
CONFIG = FanoutConfig(session_timeout=2.0, prepare_seconds=10.0, commit_seconds=0.005, buffer_look_seconds=0.05)
WAIT_SECONDS = 60.0


class Flow:
    """A log with the topics of the fan-out, and one node."""

    def __init__(self, log: Log, node: Node) -> None:
        self.log = log
        self.node = node
        self.posted: defaultdict[str, list[int]] = defaultdict(list)
        """By channel, the ids of its events in the order in which they were acknowledged."""
        self._last_id = 0

    def worker(self, name: str, config: FanoutConfig = CONFIG, **options: object) -> Worker:
        return Worker(self.node, name=name, config=config, **options)  # type: ignore[arg-type]

    def coordinator(self, name: str, config: FanoutConfig = CONFIG) -> Coordinator:
        return Coordinator(self.node, name=name, config=config)

    async def join(self, channel: str, *users: str) -> None:
        await self._append(MEMBERS, fanout_partition(channel), [(channel, change(user, added=True)) for user in users])

    async def leave(self, channel: str, *users: str) -> None:
        await self._append(MEMBERS, fanout_partition(channel), [(channel, change(user, added=False)) for user in users])

    async def online(self, *users: str, device: str = "phone", added: bool = True) -> None:
        count = (await self.log.topic(PRESENCE)).receiving
        for user in users:
            await self._append(PRESENCE, inbox_partition(user, count), [(user, change(device, added=added))])

    async def post(self, channel: str, count: int = 1) -> None:
        """Post events, one after the other or as one batch."""
        ids = range(self._last_id + 1, self._last_id + count + 1)
        self._last_id += count
        values = [encode_event(ChannelEvent(id_, "sender", "", 0, 0, f"event {id_}")) for id_ in ids]
        events = (await self.log.topic(EVENTS)).receiving
        await self._append(EVENTS, inbox_partition(channel, events), [(channel, value) for value in values])
        self.posted[channel] += ids

    async def _append(self, topic: str, index: int, records: Iterable[tuple[str, bytes]]) -> None:
        made = [Record(uuid.uuid4().hex, key.encode(), value) for key, value in records]
        await self.log.append(Partition(topic, index), made)

    async def posts(self) -> dict[int, list[tuple[str, int, Source]]]:
        """By partition of `inbox`, the posts in it: channel, id of the event, source."""
        found: dict[int, list[tuple[str, int, Source]]] = {}
        for index, span in (await self.log.ends(TOPIC)).items():
            posts = found[index] = []
            offset = span.first
            while offset < span.end:
                batch = await self.log.read(Partition(TOPIC, index), offset)
                offset = batch.end
                for record in batch.records():
                    assert record.key is not None
                    assert record.key.startswith(POST_KEY)
                    event = decode_event(record.value)
                    posts.append((record.key[1:].decode(), event.id, parse_source(record.id)))
        return found

    async def received(self) -> dict[int, dict[str, list[int]]]:
        """By partition of `inbox` and channel, the ids of the events that were stored, in order."""
        found: dict[int, dict[str, list[int]]] = {}
        for index, posts in (await self.posts()).items():
            by_channel = found.setdefault(index, {})
            for channel, id_, _ in posts:
                by_channel.setdefault(channel, []).append(id_)
        return found


def fanout_partition(channel: str) -> int:
    return Jump("xxh64", FANOUT_PARTITIONS).place(channel.encode())


def inbox_partition(user: str, partitions: int = INBOX_PARTITIONS) -> int:
    return Modulus("fnv1a32", partitions).place(user.encode())


def user_in(inbox: int, number: int = 0, partitions: int = INBOX_PARTITIONS) -> str:
    """The name of a user whose partition of `inbox` this is."""
    names = (f"user-{i}" for i in range(100_000))
    mine = (name for name in names if inbox_partition(name, partitions) == inbox)
    return next(itertools.islice(mine, number, None))


@contextlib.asynccontextmanager
async def flow(engine: str, url: str = "") -> AsyncIterator[Flow]:
    """`engine`: memory, sqlite or postgresql; `url`: of the last."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        if engine == "postgresql":
            from shardyard.log.postgresql import PostgresqlLog  # noqa: PLC0415 only the engine that is used is loaded

            log: Log = PostgresqlLog(url, maintain_every=None)
            registry = stack.enter_context(open_registry(url))
        elif engine == "sqlite":
            log = SqliteLog(Path(folder) / "log", durability="process", maintain_every=None)
            registry = stack.enter_context(open_registry(f"sqlite:///{folder}/registry.db"))
        else:
            log = MemoryLog()
            registry = stack.enter_context(open_registry("memory://"))
        async with log:
            await log.create_topic(TOPIC, INBOX_PARTITIONS)
            await log.create_topic(EVENTS, EVENT_PARTITIONS)
            await open_all(log)
            async with Node(log, registry) as node:
                yield Flow(log, node)


async def until(condition: Callable[[], Awaitable[bool] | bool], what: str) -> None:
    """Wait for a condition."""
    try:
        async with asyncio.timeout(WAIT_SECONDS):
            while True:
                holds = condition()
                if await holds if isinstance(holds, Awaitable) else holds:
                    return
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"in vain: {what}") from None


async def kill(member: ForwardingMember) -> None:
    """End a member as if its process was killed: nothing is finished, and its group is not left. What the others see
    then is that its session ends, and that comes at once here."""
    await member._membership.stop()
    await member._stop()
    await member._membership._host.coordinator.leave(member._membership.identity)
