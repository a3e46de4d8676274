"""Retrying a call that may succeed later, with exponential back-off, jitter and a deadline."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar, overload

from shardyard.model import RetryLater, ShardyardError
from shardyard.runtime.clock import Clock

T = TypeVar("T")
E = TypeVar("E", bound=ShardyardError)


@dataclass(frozen=True, slots=True)
class Backoff:
    """How long to wait before each retry: `first` seconds, doubling up to `longest`, less up to half by chance so that
    many callers do not retry at the same moment."""

    first: float = 0.01
    longest: float = 0.2

    def delay(self, attempt: int) -> float:
        """Seconds to wait after attempt number `attempt`, counted from 1."""
        return min(self.first * 2.0 ** min(attempt - 1, 30), self.longest) * random.uniform(0.5, 1.0)


DEFAULT_BACKOFF = Backoff()


def first_only(report: Callable[[E], None]) -> Callable[[E], None]:
    """`report` for the first error; nothing for those after it. For `on_retry`, to log a retried call once."""
    is_reported = False

    def report_first(error: E) -> None:
        nonlocal is_reported
        if not is_reported:
            is_reported = True
            report(error)

    return report_first


@overload
async def retry(
    call: Callable[[], Awaitable[T]],
    *,
    clock: Clock,
    deadline: float | None = None,
    backoff: Backoff = DEFAULT_BACKOFF,
    on_retry: Callable[[RetryLater], None] | None = None,
) -> T: ...


@overload
async def retry(
    call: Callable[[], Awaitable[T]],
    *,
    clock: Clock,
    deadline: float | None = None,
    backoff: Backoff = DEFAULT_BACKOFF,
    retry_on: type[E],
    on_retry: Callable[[E], None] | None = None,
) -> T: ...


async def retry(
    call: Callable[[], Awaitable[T]],
    *,
    clock: Clock,
    deadline: float | None = None,
    backoff: Backoff = DEFAULT_BACKOFF,
    retry_on: type[ShardyardError] = RetryLater,
    on_retry: Callable[[Any], None] | None = None,
) -> T:
    """The result of `call`, which is called again while it raises `retry_on`.

    `deadline` is a moment of `clock.monotonic()`; when it has passed, the last error is raised. None retries until the
    caller is cancelled. `on_retry` is called with each error that is retried, to log it or to raise instead.
    """
    attempt, cancellations = 0, _cancellations()
    while True:
        attempt += 1
        try:
            return await call()
        except retry_on as error:
            if _cancellations() > cancellations:  # the cleanup of a call that was cancelled has failed
                raise asyncio.CancelledError from error
            left = None if deadline is None else deadline - clock.monotonic()
            if left is not None and left <= 0:
                raise
            if on_retry is not None:
                on_retry(error)
        wait = backoff.delay(attempt)
        await clock.sleep(wait if left is None else min(wait, left))


def _cancellations() -> int:
    task = asyncio.current_task()
    return 0 if task is None else task.cancelling()
