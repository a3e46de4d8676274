"""Work that is done for all who wait for it at once."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable


async def all_of(works: Iterable[Awaitable[None]]) -> None:
    """Do all of it at the same time. If some of it fails, the rest is finished, and then the first error is raised."""
    for outcome in await asyncio.gather(*works, return_exceptions=True):
        if outcome is not None:
            raise outcome


class Rounds:
    """Runs one round of work after the other, as long as somebody waits. Whoever comes while a round is running waits
    for the next one: a round that ended well began after its callers had called. An error of a round is raised to all
    of its callers."""

    def __init__(self, work: Callable[[], Awaitable[None]]) -> None:
        self._work = work
        self._waiting: list[asyncio.Future[None]] = []
        self._task: asyncio.Task[None] | None = None

    async def next(self) -> None:
        """Return when a round has ended that began after this call."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(done)
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="rounds of shared work")
        await done

    async def stop(self) -> None:
        """End the round that is running; its callers and those that wait are cancelled."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        group: list[asyncio.Future[None]] = []
        try:
            while self._waiting:
                group, self._waiting = self._waiting, []
                error: Exception | None = None
                try:
                    await self._work()
                except Exception as raised:  # noqa: BLE001 it is raised to all callers
                    error = raised
                for done in group:
                    if not done.done():
                        done.set_result(None) if error is None else done.set_exception(error)
        finally:
            self._task = None
            for done in (*group, *self._waiting):
                done.cancel()
            self._waiting = []
