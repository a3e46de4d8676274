"""What Spark reports about the streaming query of an ingest: for its caller, and as metrics."""

import json
import threading
from dataclasses import dataclass

from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    SourceProgress,
    StreamingQueryListener,
)

from shardyard.pipeline.source.offsets import Offsets, ranges
from shardyard.runtime.metrics import (
    INGEST_BATCH_SECONDS,
    INGEST_LAG_RECORDS,
    INGEST_RECORDS,
    INGEST_RECORDS_PER_SECOND,
)

END_SECONDS = 10.0
"""How long the last report of a query that has ended is waited for."""


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of an ingest."""

    records: int
    """Records ingested by this run."""
    left: int
    """Records that are yet to be ingested: an estimate by offsets, which is too high where these have gaps."""


class ProgressListener(StreamingQueryListener):
    """Adds up what the queries of one name report. Spark calls it in a thread of its own."""

    def __init__(self, query_name: str) -> None:
        self.query_name = query_name
        self._ended: set[str] = set()
        self._changed = threading.Condition()
        self.batches = self.records = 0
        self.progress: Progress | None = None
        """After the last batch; None before the first."""

    def onQueryStarted(self, event: QueryStartedEvent) -> None:  # noqa: N802 Spark's names
        pass

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802
        report = event.progress
        if report.name != self.query_name:
            return
        left = remaining(report.sources[0])
        with self._changed:
            self.records += report.numInputRows
            self.batches += report.numInputRows > 0
            self.progress = Progress(self.records, left)
        INGEST_LAG_RECORDS.set(left)
        if report.numInputRows:
            INGEST_RECORDS.add(report.numInputRows)
            INGEST_RECORDS_PER_SECOND.set(report.processedRowsPerSecond)
            INGEST_BATCH_SECONDS.observe(report.durationMs["triggerExecution"] / 1000)

    def onQueryIdle(self, event: QueryIdleEvent) -> None:  # noqa: N802
        pass

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802
        with self._changed:
            self._ended.add(str(event.runId))
            self._changed.notify_all()

    def await_end(self, run: str) -> None:
        """Wait until everything that the query reported has arrived. `run`: its run id."""
        with self._changed:
            self._changed.wait_for(lambda: run in self._ended, END_SECONDS)
            self._ended.discard(run)


def remaining(source: SourceProgress) -> int:
    """An upper bound of the records that the query has yet to read, from the offsets in Spark's progress report.

    0 if it has none, as of a batch that is replayed: PySpark makes the text None of that, or null over Spark Connect.
    """
    texts = (source.endOffset, source.latestOffset)
    at, end = (json.loads("null" if text in {None, "", "None"} else text) for text in texts)
    if at is None or end is None:
        return 0
    return sum(r.max_records for r in ranges(Offsets.from_json(at), Offsets.from_json(end)))
