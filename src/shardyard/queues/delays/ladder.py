"""The ladder: the internal topics on which delayed records wait, one for each waiting time."""

import contextlib
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from shardyard.log import Log
from shardyard.model import InvalidValue, TopicExists, UnknownTopic, whole_number
from shardyard.wire.media import MAX_DELAY_MS

T = TypeVar("T")

LADDER_MS = (100, 1_000, 10_000, 60_000, 600_000, 3_600_000, 6 * 3_600_000)
"""The default waiting time of each rung."""
RUNG = "shardyard.delay."
"""The prefix of the rungs' topic names."""
RUNG_PARTITIONS = 2


class Ladder:
    """The rungs and the names of their topics."""

    def __init__(self, waits_ms: Iterable[int]) -> None:
        self._waits = sorted({whole_number("waiting time of a rung", wait, at_least=1) for wait in waits_ms})
        if not self._waits:
            raise InvalidValue("ladder", waits_ms, "at least one rung")
        self.topics = [f"{RUNG}{_format_duration(wait)}" for wait in self._waits]
        self.wait_ms = dict(zip(self.topics, self._waits, strict=True))

    def rung(self, delay_ms: int) -> str:
        """The topic of the longest rung that is not longer than the delay; the shortest rung if all are longer."""
        return self.topics[max(bisect_right(self._waits, delay_ms) - 1, 0)]


def check_delay(delay_ms: int) -> int:
    if delay_ms > MAX_DELAY_MS:
        raise InvalidValue("delay", delay_ms / 1000, f"at most {MAX_DELAY_MS // 1000} seconds (90 days)")
    return delay_ms


async def create_internal_topic(log: Log, topic: str) -> None:
    """Create a topic of the ladder, unless it exists."""
    with contextlib.suppress(TopicExists):  # another process created it
        await log.create_topic(topic, RUNG_PARTITIONS)


async def creating_topic(log: Log, topic: str, call: Callable[[], Awaitable[T]]) -> T:
    """The result of `call`. If it fails because `topic` does not exist, the topic is created and `call` repeated."""
    try:
        return await call()
    except UnknownTopic as error:
        if error.topic != topic:
            raise
    await create_internal_topic(log, topic)
    return await call()


def _format_duration(ms: int) -> str:
    for unit, size in (("h", 3_600_000), ("m", 60_000), ("s", 1_000)):
        if ms % size == 0:
            return f"{ms // size}{unit}"
    return f"{ms}ms"
