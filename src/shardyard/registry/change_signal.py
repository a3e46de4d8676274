"""`ChangeSignal`: a registry watch for code in an event loop."""

import asyncio
from types import TracebackType
from typing import Self

from shardyard.registry.port import Registry
from shardyard.runtime.clock import Clock, wait_until_set


class ChangeSignal:
    """Wakes a waiting coroutine when `name`, or a name below one that ends with "/", is touched. A touch between two
    waits is not missed."""

    def __init__(self, registry: Registry, name: str, clock: Clock) -> None:
        self._registry = registry
        self._clock = clock
        self._name = name
        self._event = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._end_watch = _no_watch

    def __enter__(self) -> Self:
        self._end_watch = self._registry.watch(self._name, self._notify)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_watch()

    def _notify(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._event.set)

    async def wait(self, seconds: float) -> bool:
        """Return at a touch, or after `seconds`. Returns whether there was a touch since the last wait."""
        touched = await wait_until_set(self._event, seconds, self._clock)
        self._event.clear()
        return touched


def _no_watch() -> None:
    """For a signal whose watch has not started."""
