"""Starting a continuous query again after it has failed."""

from collections.abc import Callable
from dataclasses import dataclass

from shardyard.model import whole_number
from shardyard.pipeline.spark_errors import SparkFailed
from shardyard.runtime.metrics import INGEST_RESTARTS
from shardyard.runtime.retry import Backoff

MAX_RESTARTS = 10
"""Restarts in a row, without a batch in between, after which an ingest gives up: after about three minutes."""
BACKOFF = Backoff(first=0.5, longest=60.0)


@dataclass(frozen=True, slots=True)
class Restart:
    """A query failed and will be started again."""

    number: int
    """Of the restarts in a row, without a batch in between."""
    limit: int
    after: float
    """Seconds until it is started."""
    reason: str


class GaveUp(SparkFailed):
    """Raised when a query has failed again and again."""

    def __init__(self, restarts: int, reason: str) -> None:
        super().__init__(f"gave up after {restarts} restarts without a batch in between; the last failure: {reason}")
        self.restarts = restarts


class Restarts:
    """Decides whether and when a query that has failed is started again."""

    def __init__(self, limit: int, on_restart: Callable[[Restart], None]) -> None:
        """`limit`: how many restarts in a row are allowed without a batch in between."""
        self._limit = whole_number("max_restarts", limit, at_least=0)
        self._on_restart = on_restart
        self._in_a_row = self._batches = 0
        self.total = 0

    def after(self, failure: SparkFailed, batches: int) -> float:
        """Seconds to wait before the query is started again. `batches`: how many were written so far.

        Raises `GaveUp` if the limit is reached, or the failure itself if a restart would not help.
        """
        if not failure.may_pass:
            raise failure
        if batches > self._batches:
            self._in_a_row = 0
        self._batches = batches
        if self._in_a_row == self._limit:
            raise GaveUp(self._limit, str(failure)) from failure
        self._in_a_row += 1
        self.total += 1
        INGEST_RESTARTS.add()
        restart = Restart(self._in_a_row, self._limit, BACKOFF.delay(self._in_a_row), str(failure))
        self._on_restart(restart)
        return restart.after
