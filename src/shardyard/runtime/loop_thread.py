"""An event loop in a thread, for programs that have none of their own."""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

CLEANUP_SECONDS = 5.0
"""For what was cancelled, to end before the loop is closed."""


class LoopThread:
    """Runs coroutines for code that blocks. It also works where the calling thread runs an event loop already."""

    def __init__(self, name: str) -> None:
        """`name`: of the thread."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, or the error it raised. Interrupting the caller cancels it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Cancel what still runs, so that it can clean up, stop the loop and wait for its thread."""
        try:
            self.run(_end_all())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


async def _end_all() -> None:
    """Wait for the tasks of this loop that were cancelled before, then cancel the others and wait for them. Not for
    ever: those of a program may ignore it."""
    if cancelled := {task for task in _others() if task.cancelling()}:
        await asyncio.wait(cancelled, timeout=CLEANUP_SECONDS)  # a second cancellation would interrupt their cleanup
    if left := _others():
        for task in left:
            task.cancel()
        await asyncio.wait(left, timeout=CLEANUP_SECONDS)
    await asyncio.get_running_loop().shutdown_asyncgens()


def _others() -> "set[asyncio.Task[Any]]":
    return {task for task in asyncio.all_tasks() if task is not asyncio.current_task()}
