"""Time comes in through a `Clock`, so that tests and simulations can make it pass."""

import asyncio
import heapq
import itertools
import time
from typing import Protocol


class Clock(Protocol):
    """Where a component gets its time from."""

    def now(self) -> float:
        """Seconds since 1970 (UTC). It may jump: for timestamps that people and other machines read."""
        ...

    def monotonic(self) -> float:
        """Seconds since some fixed moment. It never goes back: for durations and deadlines."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Return when `seconds` have passed on this clock."""
        ...


class SystemClock:
    """The machine's clock."""

    def now(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class ManualClock:
    """A clock that stands still until `advance` moves it. Sleepers wake in the order of their deadlines."""

    def __init__(self, now: float = 1_700_000_000.0) -> None:
        self._now = now
        self._monotonic = 0.0
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._tickets = itertools.count()

    def now(self) -> float:
        return self._now

    def monotonic(self) -> float:
        return self._monotonic

    async def sleep(self, seconds: float) -> None:
        wake = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._monotonic + seconds, next(self._tickets), wake))
        await wake

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass, waking every sleeper whose time has come."""
        self._now += seconds
        self._monotonic += seconds
        while self._sleepers and self._sleepers[0][0] <= self._monotonic:
            _, _, wake = heapq.heappop(self._sleepers)
            if not wake.done():
                wake.set_result(None)

    def jump(self, seconds: float) -> None:
        """Set the wall clock by `seconds`, forwards or back, as an administrator or NTP might."""
        self._now += seconds
