"""What the routes of a broker work with: a log, a registry, and the background tasks that all brokers share."""

import asyncio
import hmac
import logging
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

from shardyard.groups import Node
from shardyard.groups.heartbeats import Heartbeats
from shardyard.log import Log
from shardyard.model import Fenced, Partition, Position
from shardyard.queues.alarms import Alarms
from shardyard.queues.delays import Delays, Scheduler
from shardyard.queues.failures import Failures
from shardyard.queues.janitor import Janitor
from shardyard.queues.publishing import Publisher, Quota
from shardyard.queues.settings import TopicSettings, hashed
from shardyard.queues.settings_cache import SettingsCache
from shardyard.registry import Registry
from shardyard.runtime.background import keep_running
from shardyard.runtime.clock import Clock, SystemClock

_log = logging.getLogger(__name__)

MAX_CACHED = 10_000
"""Entries of each cache: owners, and the ends of partitions."""


class Broker:
    """Serves requests from entering the block to leaving it. It keeps no state that matters: any other broker on the
    same log and registry can serve the next request. It closes neither of them."""

    def __init__(self, log: Log, registry: Registry, *, token: str | None = None, clock: Clock | None = None) -> None:
        """`token`: required from every caller, except publishers to a topic that has a token of its own."""
        self.log = log
        self.registry = registry
        self.clock = clock or SystemClock()
        self.node = Node(log, registry, clock=self.clock)
        self.heartbeats = Heartbeats(self.node.transactions)
        self.delays = Delays(log, clock=self.clock)
        self.failures = Failures(log, self.delays, clock=self.clock)
        self.publisher = Publisher(log, self.delays, clock=self.clock)
        self.settings = SettingsCache(log, registry, self.node.transactions, self.clock)
        self._token_hash = None if token is None else hashed(token)
        self._quotas: dict[str, Quota] = {}
        self._read: dict[Partition, Position] = {}
        self._owners: dict[tuple[str, Partition], int] = {}
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self.node)
        holder = self.node.name
        for name, work in (
            ("settings", self.settings.run),
            ("delays", Scheduler(self.node, clock=self.clock).run),
            ("alarms", Alarms(self.log, self.registry, self.node.transactions, holder=holder, clock=self.clock).run),
            ("janitor", Janitor(self.log, self.node.transactions, holder=holder, clock=self.clock).run),
        ):
            task = asyncio.create_task(keep_running(name, work, self.clock), name=name)
            self._stack.push_async_callback(_cancel, task)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    def admits(self, token: str | None) -> bool:
        """Whether a caller with this token may do everything but publish to a topic with a token of its own."""
        if self._token_hash is None:
            return True
        return token is not None and hmac.compare_digest(self._token_hash, hashed(token))

    async def admits_to_a_topic(self, token: str | None) -> bool:
        """Whether this is the token of some topic."""
        return token is not None and hashed(token) in await self.settings.topic_token_hashes()

    @property
    def has_token(self) -> bool:
        """Whether it admits only callers with its token."""
        return self._token_hash is not None

    def note_read(self, partition: Partition, end: Position) -> None:
        """Remember that there are records up to this position, because an owner has read them."""
        if len(self._read) >= MAX_CACHED:
            self._read.clear()
        self._read[partition] = max(end, self._read.get(partition, end))

    def has_read(self, partition: Partition, position: Position) -> bool:
        """Whether an owner has read up to this position; if so, it need not be looked up in the log."""
        known = self._read.get(partition)
        return known is not None and known.epoch == position.epoch and position.offset <= known.offset

    async def check_owner(self, group: str, partition: Partition, epoch: int) -> None:
        """`Fenced` if no member ever owned the partition under this epoch. Earlier owners are fenced by the log."""
        if self._owners.get((group, partition)) == epoch:
            return
        row = await self.node.transactions.read(lambda tx: tx.ownership(group, partition))
        if row is None or row.owner is None or row.epoch != epoch:
            raise Fenced(f"no member of group {group!r} owns {partition} under epoch {epoch}")
        if len(self._owners) >= MAX_CACHED:
            self._owners.clear()
        self._owners[group, partition] = epoch

    def take_quota(self, topic: str, count: int, settings: TopicSettings) -> None:
        """`OverQuota` if the topic's publishers have used up their quota of records."""
        if settings.records_per_second is not None:
            quota = self._quotas.setdefault(topic, Quota(self.clock))
            quota.take(topic, count, settings.records_per_second)


async def _cancel(task: "asyncio.Task[None]") -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
