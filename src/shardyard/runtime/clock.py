"""The clock is injected everywhere, so that tests and simulations control time."""

import asyncio
import contextlib
import heapq
import itertools
import time
from collections.abc import AsyncIterator
from typing import Protocol

from shardyard.model import InvalidValue

_ITERATIONS = 20
"""Enough iterations of the event loop for a woken task to reach its next wait."""


class Clock(Protocol):
    """Where a component gets its time from."""

    def now(self) -> float:
        """Seconds since 1970 (UTC). It may jump: for timestamps that people and other machines read."""
        ...

    def monotonic(self) -> float:
        """Seconds since an arbitrary moment. It never goes back: for durations and deadlines."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Return when `seconds` have passed on this clock."""
        ...


def now_ms() -> int:
    """The machine's time in milliseconds since 1970."""
    return time.time_ns() // 1_000_000


class SystemClock:
    """The machine's clock."""

    def now(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class ManualClock:
    """A virtual clock: time passes only when `advance` is called. Sleepers wake in the order of their deadlines."""

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
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        wake = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._monotonic + seconds, next(self._tickets), wake))
        await wake

    async def advance(self, seconds: float) -> None:
        """Let `seconds` pass. Each sleeper wakes at its own deadline, and may sleep again within that time."""
        if seconds < 0:
            raise InvalidValue("seconds", seconds, "a number of seconds of at least 0")
        until = self._monotonic + seconds
        while self._sleepers and self._sleepers[0][0] <= until:
            deadline, _, wake = heapq.heappop(self._sleepers)
            self._pass(max(deadline - self._monotonic, 0.0))
            if not wake.done():
                wake.set_result(None)
                await _let_tasks_run()
        self._pass(until - self._monotonic)

    def _pass(self, seconds: float) -> None:
        self._now += seconds
        self._monotonic += seconds

    def jump(self, seconds: float) -> None:
        """Step the wall clock by `seconds`, forwards or back, as an administrator or NTP might."""
        self._now += seconds


@contextlib.asynccontextmanager
async def timeout(clock: Clock, seconds: float | None) -> AsyncIterator[asyncio.Timeout]:
    """`asyncio.timeout` on a clock: raises `TimeoutError` when `seconds` have passed on it. None sets no limit."""
    async with asyncio.timeout(None) as limit:
        if seconds is None:
            yield limit
            return
        timer = asyncio.ensure_future(clock.sleep(seconds))
        is_over = False  # a callback that is due already can't be removed any more

        def expire(done: "asyncio.Future[None]") -> None:
            if not done.cancelled() and not is_over:
                limit.reschedule(0.0)

        timer.add_done_callback(expire)
        try:
            yield limit
        finally:
            is_over = True
            timer.cancel()


async def _let_tasks_run() -> None:
    for _ in range(_ITERATIONS):
        await asyncio.sleep(0)


async def wait_until_set(event: asyncio.Event, seconds: float, clock: Clock) -> bool:
    """Wait for the event, up to `seconds` on this clock. Returns whether it is set."""
    if event.is_set():
        return True
    if isinstance(clock, SystemClock):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):  # wait_for() may swallow a cancellation in Python 3.11
                await event.wait()
        return event.is_set()
    waits = [asyncio.ensure_future(event.wait()), asyncio.ensure_future(clock.sleep(seconds))]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
    return event.is_set()
