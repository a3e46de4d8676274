"""Doing together what comes shortly after each other, because each commit of the log has its price."""

import asyncio


class Pacer:
    """Lets callers pass at most once in a while: one that comes long after the last passes at once, those that come
    sooner pass together."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._next = 0.0
        """When callers pass again, by the event loop's time."""
        self._waiting: asyncio.Future[None] | None = None

    async def turn(self) -> None:
        """Return when the caller may go on."""
        if self._waiting is None:
            loop = asyncio.get_running_loop()
            now = loop.time()
            if now >= self._next:
                self._next = now + self._seconds
                return
            self._waiting = loop.create_future()
            loop.call_at(self._next, self._pass, self._waiting)
        await asyncio.shield(self._waiting)

    def _pass(self, waiting: "asyncio.Future[None]") -> None:
        self._waiting = None
        self._next = asyncio.get_running_loop().time() + self._seconds
        waiting.set_result(None)
