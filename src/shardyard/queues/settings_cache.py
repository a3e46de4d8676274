"""The settings of topics and groups as a broker knows them: read once, and again after a change."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from shardyard.queues.settings import WATCH_NAME, TopicSettings, group_settings, topic_settings
from shardyard.registry import ChangeSignal, Registry, Snapshot, TransactionBatcher
from shardyard.runtime.clock import Clock
from shardyard.runtime.interruptible import Interruptible
from shardyard.wire.settings import GroupSettings

S = TypeVar("S", TopicSettings, GroupSettings)
T = TypeVar("T")

MAX_AGE_SECONDS = 30.0
"""Settings are read again after this time, should a signal get lost."""
MAX_CACHED = 10_000


class SettingsCache:
    """Settings in memory. A change through any broker is signalled while `run` runs."""

    def __init__(self, registry: Registry, transactions: TransactionBatcher, clock: Clock) -> None:
        self._registry = registry
        self._transactions = transactions
        self._clock = clock
        self._topics: dict[str, tuple[float, TopicSettings]] = {}
        self._groups: dict[str, tuple[float, GroupSettings]] = {}
        self._version = 0
        """Of the cache: what was being read while it was emptied may be outdated."""
        self._waits = Interruptible()
        self._reading = asyncio.Lock()

    async def run(self) -> None:
        """Follow changes until cancelled."""
        with ChangeSignal(self._registry, WATCH_NAME, self._clock) as changed:
            self.forget()  # settings may have changed before the watch began
            while True:
                if await changed.wait(MAX_AGE_SECONDS):
                    self.forget()

    def forget(self) -> None:
        """Read all settings again when they are next needed, and end what waits for a change of them."""
        self._version += 1
        self._topics.clear()
        self._groups.clear()
        self._waits.interrupt()

    async def until_changed(self, work: Awaitable[T]) -> T | None:
        """The result of `work`; None if settings change first, and then `work` is cancelled."""
        return await self._waits.run(work)

    async def topic(self, name: str) -> TopicSettings:
        """The settings of a topic."""
        return await self._get(self._topics, name, lambda tx: topic_settings(tx, name))

    async def group(self, name: str) -> GroupSettings:
        """The settings of a group."""
        return await self._get(self._groups, name, lambda tx: group_settings(tx, name))

    async def _get(self, cache: dict[str, tuple[float, S]], name: str, read: Callable[[Snapshot], S]) -> S:
        cached = cache.get(name)
        if cached is None or self._clock.monotonic() - cached[0] >= MAX_AGE_SECONDS:
            async with self._reading:  # one at a time: thousands of members may need the same settings at once
                cached = cache.get(name)
                if cached is None or self._clock.monotonic() - cached[0] >= MAX_AGE_SECONDS:
                    return await self._read(cache, name, read)
        return cached[1]

    async def _read(self, cache: dict[str, tuple[float, S]], name: str, read: Callable[[Snapshot], S]) -> S:
        version, now = self._version, self._clock.monotonic()
        found = await self._transactions.read(read)
        if version == self._version:
            if len(cache) >= MAX_CACHED:  # names that do not exist are cached too
                cache.clear()
            cache[name] = (now, found)
        return found
