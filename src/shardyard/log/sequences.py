"""The sequence numbers of a producer, of which only so many may be in flight."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from shardyard.model import SEQUENCE_WINDOW


class SequenceWindow:
    """Numbers the batches of one producer for one destination.

    A log remembers the last `SEQUENCE_WINDOW` sequences of a producer. So a new one is not given out while a batch that
    far behind it is still in flight: a retry of that batch could no longer be recognised.
    """

    def __init__(self, first: int = 0) -> None:
        self._next = first
        self._in_flight: dict[int, asyncio.Event] = {}
        """By sequence, the oldest first."""

    @property
    def next(self) -> int:
        """The sequence that is given out next."""
        return self._next

    @contextlib.asynccontextmanager
    async def sequence(self) -> AsyncIterator[int]:
        """The next sequence, in flight until the block ends. Waits while the oldest one in flight is too far behind."""
        while self._in_flight and self._next - next(iter(self._in_flight)) >= SEQUENCE_WINDOW:
            await next(iter(self._in_flight.values())).wait()
        number = self._next
        self._next += 1
        done = self._in_flight[number] = asyncio.Event()
        try:
            yield number
        finally:
            del self._in_flight[number]
            done.set()
