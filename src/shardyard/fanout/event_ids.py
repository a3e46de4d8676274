"""Ids of events for programs that publish without a messaging server."""

import random
from collections.abc import Callable

START_MS = 1_735_689_600_000
"""2025-01-01 UTC, as in the ids of messaging servers, so that ids of both sort by time."""
_BITS = 22
"""Below the milliseconds."""
MAX_ID = 2**63 - 1


class EventIds:
    """Makes ids that ascend, and that are unique in a process. Those of different processes differ with overwhelming
    probability: in the same millisecond, two of them are equal with a probability of 1 in 2 million."""

    def __init__(self, now_ms: Callable[[], int]) -> None:
        self._now_ms = now_ms
        self._last = 0

    def next(self) -> int:
        """The next id. If the clock goes back, or more are made than a millisecond has, ids run ahead of the clock."""
        first = max(self._now_ms() - START_MS, 0) << _BITS
        if first > self._last:
            self._last = first + random.getrandbits(_BITS - 1)  # room for those that follow in the same millisecond
        else:
            self._last += 1
        return min(self._last, MAX_ID)


def ms_of(id_: int) -> int:
    """When an id was made, in milliseconds since 1970."""
    return (id_ >> _BITS) + START_MS
