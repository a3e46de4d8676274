"""Waiting for an event of the log, up to a time of an injected clock."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol, TypeAlias

from shardyard.log.requests import Outcomes
from shardyard.runtime.clock import Clock, SystemClock

Looked: TypeAlias = tuple[Outcomes, Mapping[int, int]]
"""The news, and if there are none, what to wait for: partition ids, and offsets. They belong together, so a look finds
both in one transaction."""


class Tail(Protocol):
    """Wakes readers when partitions grow."""

    @property
    def news(self) -> int: ...
    def wait_for(self, places: Mapping[int, int], since: int) -> "asyncio.Future[None]": ...


async def look_until_news(look: Callable[[], Awaitable[Looked]], tail: Tail, seconds: float, clock: Clock) -> Outcomes:
    """The news of `look`; if there are none, those of a second look, after something has arrived or `seconds` have
    passed."""
    since = tail.news
    outcomes, places = await look()
    if not places or seconds <= 0:
        return outcomes
    arrived = tail.wait_for(places, since)
    try:
        await wait_at_most(arrived, seconds, clock)
    finally:
        arrived.cancel()
    return (await look())[0]


async def wait_at_most(arrived: "asyncio.Future[None]", seconds: float, clock: Clock) -> bool:
    """Wait until `arrived` is done or `seconds` have passed. Returns whether it is done; if not, it is cancelled."""
    if isinstance(clock, SystemClock):  # the event loop's own timer costs less than a task that sleeps
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):  # wait_for() may swallow a cancellation in Python 3.11
                await arrived
        return arrived.done() and not arrived.cancelled()
    timer = asyncio.ensure_future(clock.sleep(seconds))
    try:
        await asyncio.wait({arrived, timer}, return_when=asyncio.FIRST_COMPLETED)
        return arrived.done()
    finally:
        timer.cancel()
        arrived.cancel()
