"""Long polls, and the drain of a server that stops: they are answered at once instead of holding it up."""

from collections.abc import Awaitable
from typing import TypeVar

from starlette.requests import Request

from shardyard.runtime.clock import Clock
from shardyard.runtime.interruptible import Interruptible
from shardyard.runtime.metrics import LONG_POLLS_WAITING

T = TypeVar("T")


class Drain:
    """Whether the server is about to stop. From then on, long polls no longer wait."""

    def __init__(self) -> None:
        self.started = False
        self._waits = Interruptible()

    def start(self) -> None:
        """Interrupt all long polls that wait."""
        self.started = True
        self._waits.interrupt()

    async def interrupt(self, work: Awaitable[T]) -> T | None:
        """The result of `work`; None if the server drains first, and then `work` is cancelled."""
        return await self._waits.run(work, at_once=self.started)


def drain_of(request: Request) -> Drain:
    """The drain of the server that got the request."""
    drain: Drain = request.app.state.drain
    return drain


class LongPoll:
    """A request that waits for a condition, for a deadline, or for the drain of the server, whichever is first.

    poll = LongPoll(drain, clock, seconds)
    while not condition() and not poll.over:
        await poll.wait(signal.wait(poll.left))
    """

    def __init__(self, drain: Drain, clock: Clock, seconds: float) -> None:
        self._drain = drain
        self._clock = clock
        self._deadline = clock.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds that it may still wait, at least 0."""
        return 0.0 if self._drain.started else max(self._deadline - self._clock.monotonic(), 0.0)

    @property
    def over(self) -> bool:
        """The caller gets its response now, with what there is."""
        return self.left <= 0

    async def wait(self, work: Awaitable[T]) -> T | None:
        """The result of `work`; None if the server drains first, and then `work` is cancelled."""
        LONG_POLLS_WAITING.add(1)
        try:
            return await self._drain.interrupt(work)
        finally:
            LONG_POLLS_WAITING.add(-1)
