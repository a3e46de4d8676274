"""`Sender`: appends records to the partitions where the topic's own partitioner places them."""

from collections.abc import Sequence

import pyarrow as pa

from shardyard.log.port import Log
from shardyard.log.router import Router
from shardyard.log.rules import milliseconds
from shardyard.model import Appended, Fence, Record, Topic
from shardyard.model.limits import ANY_SIZE, validate
from shardyard.runtime.clock import Clock, SystemClock


class Sender:
    """Sends records to a topic, and continues with its successor when it moves.

    **Placement.** A record goes to the partition of its key. Records without a key, and all records of a topic whose
    partitioner ignores keys, are distributed round-robin.

    **Order.** Sends that are awaited one after another keep the order of each key, also over a move: the records of the
    old topic come first. Sends that are in flight at the same time have no order between them. When the topic is
    expanded or contracted, all senders place by the new number of partitions from the same moment on; a key that gets
    another partition continues there, although its earlier records may not have been consumed yet. Where that order
    matters, move the topic instead.

    **Exactly once.** Each part of a send that goes to a partition has a stamp, so a part that is retried is stored
    once. There is one exception: if the partition is dropped before the retry, the part goes to another one in any
    case.
    """

    def __init__(self, log: Log, topic: str, *, timeout: float = 30.0, clock: Clock | None = None) -> None:
        """`timeout`: seconds for which a send retries what the log refuses for now."""
        self._timeout = timeout
        self._clock = clock or SystemClock()
        self._router = Router(log, topic, clock=self._clock)

    @property
    def topic(self) -> Topic | None:
        """Where records go, as last known; None before the first send, and when it is to be looked up again."""
        return self._router.topic

    async def send(self, records: Sequence[Record] | pa.RecordBatch, *, fence: Fence | None = None) -> list[Appended]:
        """Append the records (an Arrow batch has the columns of `SCHEMA`) to all their partitions at the same time.
        Without records nothing happens. `fence`: of the ownership that the sender relies on.

        While the topic is sealed it waits, as for anything that may pass, and raises the log's error when the timeout
        is over. An invalid record is refused before anything is stored. A part that exceeds the log's limits is refused
        on its own: when this raises, or is cancelled, other parts may be stored.
        """
        if isinstance(records, pa.RecordBatch | Sequence) and not len(records):
            return []
        batch = validate(records, ANY_SIZE, milliseconds(self._clock))
        return await self._router.send(batch, deadline=self._clock.monotonic() + self._timeout, fence=fence)
