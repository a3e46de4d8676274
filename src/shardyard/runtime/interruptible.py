"""Waits that an event can end early."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


class Interruptible:
    """Runs awaitables, any number at a time, and interrupts them together."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Timeout] = set()

    def interrupt(self) -> None:
        """End what is running now."""
        interrupted, self._waiting = self._waiting, set()  # each of them once: they end in a moment
        for waiting in interrupted:
            waiting.reschedule(0.0)

    async def run(self, work: Awaitable[T], *, at_once: bool = False) -> T | None:
        """The result of `work`; None if it was interrupted, and then it is cancelled. `at_once`: interrupt it as soon
        as it waits."""
        try:
            async with asyncio.timeout(0.0 if at_once else None) as waiting:
                self._waiting.add(waiting)
                try:
                    return await work
                finally:
                    self._waiting.discard(waiting)
        except TimeoutError:
            if waiting.expired():
                return None
            raise
