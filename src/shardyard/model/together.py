"""One thread that does what waits together in one go, and answers in the event loop that asked."""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from shardyard.model.errors import Closed, ShardyardError

_log = logging.getLogger(__name__)
Work = TypeVar("Work")
Outcome = Any
"""What came of a piece of work: its result, or the error it ended with."""

_LINGER_FROM = 8
"""From groups of this size on it pays to wait a moment for those who were just answered to ask again."""


class Together(Generic[Work]):
    """Takes work from an event loop and carries it out in groups, each as large as what came while the last was done.

    `carry_out` gets a group and returns an outcome for each piece. A piece that cannot be done has an error as its
    outcome and leaves no trace; when `carry_out` itself raises, nothing of the group was done. If that was something
    unforeseen, the pieces are tried one by one, so that a bad one harms only itself. Work whose asker was cancelled
    before it was begun is not begun.
    """

    def __init__(
        self,
        name: str,
        carry_out: Callable[[list[Work]], list[Outcome]],
        *,
        most: int,
        most_bytes: int = 2**62,
        linger: float = 0.0,
    ) -> None:
        """`most`, `most_bytes`: the limits of a group. `linger`: seconds to wait for a group as large as the last."""
        self._name = name
        self._carry_out = carry_out
        self._most = most
        self._most_bytes = most_bytes
        self._linger = linger
        self._waiting: deque[tuple[Work, asyncio.Future[Any], int]] = deque()
        self._wake = threading.Condition()
        self._last = 0
        self._closing = False
        self.waiting_bytes = 0
        """The size of what waits to be begun."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    async def do(self, work: Work, size: int = 0) -> Any:
        """Have it done; the result comes when the whole group is done."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        with self._wake:
            if self._closing:
                raise Closed(self._name)
            self._waiting.append((work, answer, size))
            self.waiting_bytes += size
            self._wake.notify()
        return await answer

    def close(self) -> None:
        """Finish what was asked for, then stop."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()

    def _run(self) -> None:
        while group := self._next_group():
            works = [(work, answer) for work, answer in group if not answer.done()]
            self._last = len(works)
            if works:
                outcomes = self._carried_out([work for work, _ in works])
                _settle([answer for _, answer in works], outcomes)

    def _next_group(self) -> list[tuple[Work, "asyncio.Future[Any]"]]:
        group: list[tuple[Work, asyncio.Future[Any]]] = []
        size = 0
        with self._wake:
            while not self._waiting and not self._closing:
                self._wake.wait()
            if self._linger and self._last >= _LINGER_FROM:
                self._wait_for_as_many()
            while (
                self._waiting
                and len(group) < self._most
                and (not group or size + self._waiting[0][2] <= self._most_bytes)
            ):
                work, answer, bytes_ = self._waiting.popleft()
                group.append((work, answer))
                size += bytes_
            self.waiting_bytes -= size
        return group

    def _wait_for_as_many(self) -> None:
        until = time.monotonic() + self._linger
        while len(self._waiting) < self._last and not self._closing and (left := until - time.monotonic()) > 0:
            self._wake.wait(left)

    def _carried_out(self, works: list[Work]) -> list[Outcome]:
        try:
            return self._carry_out(works)
        except ShardyardError as error:
            return [error] * len(works)
        except Exception as error:  # noqa: BLE001 whatever it is, who asked must hear of it and the thread go on
            if len(works) > 1:
                return [self._carried_out([work])[0] for work in works]
            _log.exception("%s failed in an unforeseen way", self._name)
            return [error]


def _settle(answers: list["asyncio.Future[Any]"], outcomes: list[Outcome]) -> None:
    """Hand the outcomes to the event loop that waits for them, all in one go."""

    def settle() -> None:
        for answer, outcome in zip(answers, outcomes, strict=True):
            if answer.done():  # who asked was cancelled
                continue
            if isinstance(outcome, BaseException):
                answer.set_exception(outcome)
            else:
                answer.set_result(outcome)

    try:
        answers[0].get_loop().call_soon_threadsafe(settle)
    except RuntimeError:  # the loop is closed, and nobody waits any more
        _log.debug("an answer came too late")
