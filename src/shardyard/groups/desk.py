"""One thread does a process's registry work: what waits together is one transaction, with one sync to disk."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from shardyard.model import Closed, ShardyardError
from shardyard.registry import Registry, Transaction

T = TypeVar("T")
Work = Callable[[Transaction], Any]

MOST_TOGETHER = 256
"""Pieces of work in one transaction, so that other processes get their turn."""


class Desk:
    """Takes work from an event loop and answers there. A piece of work must check before it changes anything:
    when it raises a `ShardyardError`, the others in its transaction go on."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._waiting: deque[tuple[Work, asyncio.Future[Any]]] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="shardyard-desk", daemon=True)
        self._thread.start()

    async def do(self, work: Callable[[Transaction], T]) -> T:
        """Do this in a transaction; when it returns, what it did is durable."""
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        with self._wake:
            if self._closing:
                raise Closed("the node")
            self._waiting.append((work, answer))
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
            try:
                outcomes = self._transact([work for work, _ in group])
            except BaseException as error:  # noqa: BLE001 whatever it is, who asked must hear of it and the thread go on
                outcomes = [error] * len(group)
            _settle([answer for _, answer in group], outcomes)

    def _next_group(self) -> list[tuple[Work, "asyncio.Future[Any]"]]:
        with self._wake:
            while not self._waiting and not self._closing:
                self._wake.wait()
            return [self._waiting.popleft() for _ in range(min(len(self._waiting), MOST_TOGETHER))]

    def _transact(self, group: list[Work]) -> list[Any]:
        outcomes: list[Any] = []
        with self._registry.transaction() as tx:
            for work in group:
                try:
                    outcomes.append(work(tx))
                except ShardyardError as error:
                    outcomes.append(error)
        return outcomes


def _settle(answers: list["asyncio.Future[Any]"], outcomes: list[Any]) -> None:
    loop = answers[0].get_loop()

    def settle() -> None:
        for answer, outcome in zip(answers, outcomes, strict=True):
            if answer.done():  # who asked was cancelled
                continue
            if isinstance(outcome, BaseException):
                answer.set_exception(outcome)
            else:
                answer.set_result(outcome)

    if not loop.is_closed():
        loop.call_soon_threadsafe(settle)
