"""Dead letters: messages that were rejected, failed too often, expired, or had to make room."""

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from shardyard.model import Headers, Record, ShardyardError
from shardyard.model.sharding import Queue
from shardyard.runtime.clock import Clock
from shardyard.runtime.metrics import SHARDING_DEAD_LETTERS
from shardyard.runtime.retry import Backoff, first_only, retry
from shardyard.sharding.messages import DEATHS, EXPIRATION, VERSION, deaths_of

_log = logging.getLogger(__name__)

BACKOFF = Backoff(first=0.02, longest=0.5)
MOST_DEATHS = 20
"""Places that are kept in the history of a message."""


class Reason(StrEnum):
    """Why a message is a dead letter, as RabbitMQ calls it."""

    REJECTED = "rejected"
    DELIVERY_LIMIT = "delivery_limit"
    EXPIRED = "expired"
    MAX_LENGTH = "maxlen"


class DeadLetter(NamedTuple):
    """A message that is not delivered from its queue any more."""

    record: Record
    reason: Reason
    deliveries: int
    """How many deliveries failed."""


class DeadLetterSink(Protocol):
    """Where dead letters go."""

    async def store(self, queue: Queue, letters: Sequence[DeadLetter]) -> None:
        """Store dead letters of a queue; durable on return. If this raises, some of them may be stored."""


def is_cycle(queue: Queue, letter: DeadLetter) -> bool:
    """Whether the message came back here by itself, without a consumer having rejected it: it would do so forever, so
    it is dropped, as RabbitMQ does."""
    if letter.reason in (Reason.REJECTED, Reason.DELIVERY_LIMIT):
        return False
    deaths = deaths_of(letter.record)
    if any(death["reason"] in (Reason.REJECTED, Reason.DELIVERY_LIMIT) for death in deaths):
        return False
    return any((death["queue"], death["reason"]) == (queue.name, letter.reason) for death in deaths)


def dead_letter_headers(queue: Queue, letter: DeadLetter) -> Headers:
    """The headers of the message as a dead letter: with its history, and without its expiration."""
    deaths = deaths_of(letter.record)
    same = next((d for d in deaths if (d["queue"], d["reason"]) == (queue.name, letter.reason)), None)
    death: dict[str, Any] = {
        "queue": queue.name,
        "reason": letter.reason,
        "count": 1 if same is None else same["count"] + 1,
        "deliveries": letter.deliveries,
        "time": int(time.time() * 1000),
    }
    history = [death, *(d for d in deaths if d is not same)][:MOST_DEATHS]
    kept = tuple(h for h in letter.record.headers if h[0] not in (DEATHS, EXPIRATION, VERSION))
    return ((DEATHS, json.dumps(history, ensure_ascii=False).encode()), *kept)


class Burial:
    """Stores the dead letters of one queue, in batches, and reports which are stored."""

    def __init__(
        self,
        name: str,
        store: Callable[[Sequence[DeadLetter]], Awaitable[None]],
        clock: Clock,
        buried: Callable[[Sequence[int]], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        """`buried` gets the offsets of messages that are stored, `failed` an error that retrying does not mend."""
        self._name = name
        self._store = store
        self._clock = clock
        self._buried = buried
        self._failed = failed
        self._waiting: dict[int, DeadLetter] = {}
        self._in_progress = 0
        self._task: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        """How many are not stored yet."""
        return len(self._waiting) + self._in_progress

    def add(self, offset: int, letter: DeadLetter) -> None:
        self._waiting[offset] = letter
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name=f"dead letters of {self._name}")

    async def close(self, seconds: float) -> None:
        """Wait for up to `seconds` until all are stored; then give up. They stay in their queue."""
        if self._task is not None:
            await asyncio.wait([self._task], timeout=seconds)
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while self._waiting:
            offsets, letters = list(self._waiting), list(self._waiting.values())
            self._waiting.clear()
            self._in_progress = len(letters)
            try:
                await self._store_retrying(letters)
            except Exception as error:  # noqa: BLE001 nobody awaits this
                _log.exception("the dead letters of %s can't be stored", self._name)
                self._failed(error)
                return
            self._in_progress = 0
            for letter in letters:
                SHARDING_DEAD_LETTERS.series(letter.reason).add()
            self._buried(offsets)

    async def _store_retrying(self, letters: Sequence[DeadLetter]) -> None:
        warn = first_only(
            lambda error: _log.warning("the dead letters of %s will be stored later: %s", self._name, error)
        )
        await retry(
            lambda: self._store(letters), clock=self._clock, backoff=BACKOFF, retry_on=ShardyardError, on_retry=warn
        )
