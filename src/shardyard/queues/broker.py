"""What a broker works with: a log, a registry, and the tasks that all brokers share among them."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

from shardyard.groups import Node
from shardyard.log import Log
from shardyard.model import Fenced, Partition, Position
from shardyard.queues.alarms import Alarms
from shardyard.queues.delays import Delays, Scheduler
from shardyard.queues.failures import Failures
from shardyard.queues.janitor import Janitor
from shardyard.queues.publishing import Publisher, Quota
from shardyard.queues.settings import TopicSettings, group_settings, hashed, topic_settings
from shardyard.registry import Registry
from shardyard.runtime.clock import Clock, SystemClock
from shardyard.wire.settings import GroupSettings

_log = logging.getLogger(__name__)

SETTINGS_SECONDS = 0.5
"""How long to go by settings that were read before."""
AGAIN_SECONDS = 1.0
MOST_KNOWN = 10_000
"""Settings, and ends of partitions, that are kept in mind."""


class Broker:
    """Everything that requests are answered with, from entering the block to leaving it. Nothing in it lasts: another
    broker can answer the next request. It closes neither log nor registry."""

    def __init__(self, log: Log, registry: Registry, *, token: str | None = None, clock: Clock | None = None) -> None:
        """`token`: what every caller must show who is not a publisher with the token of its topic."""
        self.log = log
        self.registry = registry
        self.clock = clock or SystemClock()
        self.node = Node(log, registry)
        self.delays = Delays(log)
        self.failures = Failures(log, self.delays)
        self.publisher = Publisher(log, self.delays)
        self.closing = asyncio.Event()
        """Requests that wait are to be answered with what there is."""
        self._token_hash = None if token is None else hashed(token)
        self._quotas: dict[str, Quota] = {}
        self._settings: dict[str, tuple[float, TopicSettings | GroupSettings]] = {}
        self._read: dict[Partition, Position] = {}
        self._owners: dict[tuple[str, Partition], int] = {}
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self.node)
        holder = self.node.name
        for name, work in (
            ("delays", Scheduler(self.node).run),
            ("alarms", Alarms(self.log, self.registry, self.node.transactions, holder=holder).run),
            ("janitor", Janitor(self.log, self.node.transactions, holder=holder).run),
        ):
            self._stack.push_async_callback(_ended, asyncio.create_task(_kept_up(name, work), name=name))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.closing.set()
        await self._stack.aclose()

    def admits(self, token: str | None) -> bool:
        """Whether who shows this token may do what is not publishing."""
        return TopicSettings(token_hash=self._token_hash).admits(token)

    def note_read(self, partition: Partition, end: Position) -> None:
        """An owner was given what lies before this."""
        if len(self._read) >= MOST_KNOWN:
            self._read.clear()
        self._read[partition] = max(end, self._read.get(partition, end))

    def has_read(self, partition: Partition, position: Position) -> bool:
        """Whether it is known that there are records up to this position."""
        known = self._read.get(partition)
        return known is not None and known.epoch == position.epoch and position.offset <= known.offset

    async def check_owner(self, group: str, partition: Partition, epoch: int) -> None:
        """`Fenced` if nobody owns the partition under this epoch. One who did is known to the log, and fenced there."""
        if self._owners.get((group, partition)) == epoch:
            return
        row = await self.node.transactions.read(lambda tx: tx.ownership(group, partition))
        if row is None or row.owner is None or row.epoch != epoch:
            raise Fenced(f"nobody owns {partition} in group {group!r} under epoch {epoch}")
        if len(self._owners) >= MOST_KNOWN:
            self._owners.clear()
        self._owners[group, partition] = epoch

    def take_quota(self, topic: str, count: int, settings: TopicSettings) -> None:
        if settings.records_per_second is not None:
            self._quotas.setdefault(topic, Quota()).take(topic, count, settings.records_per_second)

    async def topic_settings(self, topic: str) -> TopicSettings:
        found = self._known(f"topic/{topic}")
        if not isinstance(found, TopicSettings):
            found = await self.node.transactions.read(lambda tx: topic_settings(tx, topic))
            self._keep(f"topic/{topic}", found)
        return found

    async def group_settings(self, group: str) -> GroupSettings:
        found = self._known(f"group/{group}")
        if not isinstance(found, GroupSettings):
            found = await self.node.transactions.read(lambda tx: group_settings(tx, group))
            self._keep(f"group/{group}", found)
        return found

    def forget_settings(self) -> None:
        """They were just changed."""
        self._settings.clear()

    def _keep(self, scope: str, found: TopicSettings | GroupSettings) -> None:
        if len(self._settings) >= MOST_KNOWN:  # whoever asks for names that do not exist fills it too
            self._settings.clear()
        self._settings[scope] = (time.monotonic(), found)

    def _known(self, scope: str) -> TopicSettings | GroupSettings | None:
        at, found = self._settings.get(scope, (0.0, None))
        return found if time.monotonic() - at < SETTINGS_SECONDS else None


async def _kept_up(name: str, work: Callable[[], Awaitable[None]]) -> None:
    """Until cancelled. Nobody awaits this work: if it fails, somebody must hear of it, and it begins anew."""
    while True:
        try:
            await work()
        except Exception:  # noqa: BLE001 whatever it is, records must not be left waiting for it
            _log.exception("%s failed, and begin anew", name)
        await asyncio.sleep(AGAIN_SECONDS)


async def _ended(task: "asyncio.Task[None]") -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
