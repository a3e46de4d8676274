"""The settings of topics and groups as a broker knows them: read once, and again after a change."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, cast

from shardyard.log import Log
from shardyard.queues.lineage import lineage, moves_of
from shardyard.queues.settings import WATCH_NAME, TopicSettings, group_settings, topic_settings, topic_token_hashes
from shardyard.registry import ChangeSignal, Registry, TransactionBatcher
from shardyard.runtime.clock import Clock
from shardyard.runtime.interruptible import Interruptible
from shardyard.wire.settings import GroupSettings

T = TypeVar("T")

MAX_AGE_SECONDS = 30.0
"""Settings are read again after this time, should a signal get lost."""
MAX_CACHED = 10_000


class SettingsCache:
    """Settings in memory. A change through any broker is signalled while `run` runs."""

    def __init__(self, log: Log, registry: Registry, transactions: TransactionBatcher, clock: Clock) -> None:
        self._log = log
        self._registry = registry
        self._transactions = transactions
        self._clock = clock
        self._cached: dict[str, tuple[float, object]] = {}
        """When it was read, and what."""
        self._reading: dict[str, asyncio.Future[Any]] = {}
        self._version = 0
        """Of the cache: what was being read while it was emptied may be outdated."""
        self._waits = Interruptible()

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
        self._cached.clear()
        self._reading.clear()
        self._waits.interrupt()

    async def until_changed(self, work: Awaitable[T]) -> T | None:
        """The result of `work`; None if settings change first, and then `work` is cancelled."""
        return await self._waits.run(work)

    async def topic(self, name: str) -> TopicSettings:
        """The settings of a topic. If it was resharded, it still has the token that it had before, unless it has got
        another one since."""

        async def read() -> TopicSettings:
            names = await self.names(name)
            return await self._transactions.read(lambda tx: topic_settings(tx, name, names))

        return await self._get(f"topic/{name}", read)

    async def names(self, topic: str) -> tuple[str, ...]:
        """The names of a topic, as by `lineage`."""

        async def read() -> tuple[str, ...]:
            return lineage(topic, await self._get("moves", self._moves))

        return await self._get(f"names/{topic}", read)

    async def _moves(self) -> dict[str, str]:
        return moves_of(await self._log.topics())

    async def group(self, name: str) -> GroupSettings:
        """The settings of a group."""
        return await self._get(f"group/{name}", lambda: self._transactions.read(lambda tx: group_settings(tx, name)))

    def known_group(self, name: str) -> GroupSettings | None:
        """The settings of a group if they are in memory."""
        return cast(GroupSettings | None, self._known(f"group/{name}"))

    async def topic_token_hashes(self) -> frozenset[str]:
        """The hashes of the tokens of all topics."""
        return await self._get("tokens", lambda: self._transactions.read(topic_token_hashes))

    def _known(self, key: str) -> object | None:
        cached = self._cached.get(key)
        return cached[1] if cached is not None and self._clock.monotonic() - cached[0] < MAX_AGE_SECONDS else None

    async def _get(self, key: str, read: Callable[[], Awaitable[T]]) -> T:
        if (known := self._known(key)) is not None:
            return cast(T, known)
        reading = self._reading.get(key)
        if reading is None:
            reading = self._reading[key] = asyncio.ensure_future(self._read(key, read))
            reading.add_done_callback(lambda done: self._end_reading(key, done))
        return cast(T, await asyncio.shield(reading))  # shared by all who need it now

    async def _read(self, key: str, read: Callable[[], Awaitable[T]]) -> T:
        version, now = self._version, self._clock.monotonic()
        found = await read()
        if version == self._version:
            if len(self._cached) >= MAX_CACHED:  # names that do not exist are cached too
                self._cached.clear()
            self._cached[key] = (now, found)
        return found

    def _end_reading(self, key: str, reading: "asyncio.Future[Any]") -> None:
        if self._reading.get(key) is reading:
            del self._reading[key]
        if not reading.cancelled():
            reading.exception()  # all who waited for it may have been cancelled
