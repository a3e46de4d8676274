"""Waiting for an event of the log, up to a time of an injected clock."""

import asyncio
import contextlib

from shardyard.runtime.clock import Clock, SystemClock


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
