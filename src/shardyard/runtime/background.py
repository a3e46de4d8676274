"""Work that a process does in the background for as long as it runs."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from shardyard.model import RetryLater
from shardyard.runtime.clock import Clock

_log = logging.getLogger(__name__)

RESTART_SECONDS = 1.0
"""Before work that failed is started again."""


async def keep_running(name: str, work: Callable[[], Awaitable[None]], clock: Clock) -> None:
    """Run `work` until cancelled. If it fails, that is logged, and it is started again."""
    while True:
        try:
            await work()
        except RetryLater as error:
            _end_if_cancelled(name, error)
            _log.warning("background task %r will be started again: %s", name, error)
        except Exception as error:  # noqa: BLE001 whatever it is, nobody must wait for a task that is gone
            _end_if_cancelled(name, error)
            _log.exception("background task %r failed and will be started again", name)
        await clock.sleep(RESTART_SECONDS)


def _end_if_cancelled(name: str, error: Exception) -> None:
    """An error of the cleanup that a cancellation has caused takes its place. The task must end all the same."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        _log.warning("background task %r failed while it was stopped: %s", name, error)
        raise asyncio.CancelledError from error
