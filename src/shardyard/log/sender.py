"""`Sender`: appends by key, to the partitions where the topic's own partitioner places them."""

import asyncio
import contextlib
import random
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from shardyard.log.distribution import Rows, assign_partitions, join, split
from shardyard.log.port import Log
from shardyard.model import (
    SEQUENCE_WINDOW,
    Appended,
    Closing,
    Fence,
    Moved,
    Outdated,
    Partition,
    PartitionOutOfRange,
    RetryLater,
    Stamp,
    Topic,
)
from shardyard.model.batch import now_ms
from shardyard.model.limits import ANY_SIZE, check_batch, check_records
from shardyard.runtime.clock import Clock, SystemClock

T = TypeVar("T")

FIRST_WAIT_SECONDS = 0.01
LONGEST_WAIT_SECONDS = 0.2


class Sender:
    """Sends records to a topic, and goes on with its successor when it moves.

    **Placement.** A record goes to the partition of its key. Records without a key, and all records of a topic whose
    partitioner ignores keys, are distributed round-robin.

    **Order.** Sends that are awaited one after another keep the order of each key, also over a move: what the old topic
    took comes first. Those under way at once have none between them. When the topic is expanded or contracted, keys
    that get another partition go on there, for all senders from the same moment on, while what came before may not be
    read yet: where order matters, move it instead.

    **Once.** Each part of a send that goes to a partition has a stamp, so what is tried again is stored once. There is
    one exception: where the partition is dropped before it is tried again, it goes to another one in any case.
    """

    def __init__(self, log: Log, topic: str, *, patience: float = 30.0, clock: Clock | None = None) -> None:
        """`patience`: seconds for which a send tries again what the log refuses for now."""
        self.topic: Topic | None = None
        """Where it sends to, as last known; None before the first send, and when it is to be looked up again."""
        self._log = log
        self._name = topic
        self._patience = patience
        self._clock = clock or SystemClock()
        self._producer = uuid.uuid4().hex
        self._looking = asyncio.Lock()
        self._turn = random.randrange(2**16)  # many senders of a few records each shall not all begin with partition 0
        self._sequences: defaultdict[Partition, int] = defaultdict(int)
        self._under_way: defaultdict[Partition, dict[int, asyncio.Event]] = defaultdict(dict)

    async def send(self, records: Rows, *, fence: Fence | None = None) -> list[Appended]:
        """Append the records (an Arrow batch has the columns of `SCHEMA`), all partitions at once. No records are fine.
        `fence`: of the ownership on which the sender relies.

        While the topic is sealed it waits, like for anything else that may pass, and when its patience is over, raises
        what the log said. A part that is beyond the log's limits is refused as it is. When it raises, or is cancelled,
        other parts may be stored; a record that is wrong in itself is refused before anything is.
        """
        if isinstance(records, pa.RecordBatch):
            rows: Rows = check_batch(records, ANY_SIZE, now_ms()) if len(records) else ()
        else:
            rows = check_records(records, ANY_SIZE)[0] if not isinstance(records, Sequence) or records else ()
        until = self._clock.monotonic() + self._patience
        stored: list[Appended] = []
        while len(rows):
            topic = await self._current(until)
            parts = split(rows, assign_partitions(topic, rows, self._turns))
            outcomes = await asyncio.gather(
                *(self._append(topic, index, part, until, fence) for index, part in parts),
                return_exceptions=True,  # the others are finished first: a later send must not overtake them
            )
            for outcome in outcomes:
                if isinstance(outcome, BaseException):
                    raise outcome
                if outcome is not None:
                    stored.append(outcome)
            rows = join([part for (_, part), outcome in zip(parts, outcomes, strict=True) if outcome is None])
        return stored

    async def _current(self, until: float) -> Topic:
        """The topic to send to, looked up when it turned out to be another one than was thought."""
        async with self._looking:  # one at a time, so that old news never replace new ones
            if self.topic is None:
                topic = await self._patiently(lambda: self._log.topic(self._name), until)
                while (successor := topic.successor) is not None:
                    self._name = successor
                    topic = await self._patiently(lambda: self._log.topic(self._name), until)
                self.topic = topic
            return self.topic

    def _turns(self, count: int) -> npt.NDArray[np.int64]:
        self._turn += count
        return np.arange(self._turn - count, self._turn)

    async def _append(self, topic: Topic, index: int, part: Rows, until: float, fence: Fence | None) -> Appended | None:
        """None if it has to be placed anew: the topic has moved, or has other partitions than was thought."""
        partition = Partition(topic.name, index)
        async with self._stamp(partition) as stamp:
            append = partial(self._log.append, partition, part, stamp=stamp, fence=fence, placed_on=topic)
            try:
                return await self._patiently(append, until)
            except (Moved, Closing, PartitionOutOfRange, Outdated) as error:
                if isinstance(error, Moved) and self._name == topic.name:
                    self._name = error.successor
                if self.topic is topic:  # else it was looked up since
                    self.topic = None
                return None

    @contextlib.asynccontextmanager
    async def _stamp(self, partition: Partition) -> AsyncIterator[Stamp]:
        """The next stamp, once it is not too far ahead of the oldest that is under way: that may be tried again yet."""
        under_way = self._under_way[partition]
        while under_way and self._sequences[partition] - next(iter(under_way)) >= SEQUENCE_WINDOW:
            await next(iter(under_way.values())).wait()
        sequence = self._sequences[partition]
        self._sequences[partition] += 1
        done = under_way[sequence] = asyncio.Event()
        try:
            yield Stamp(self._producer, sequence)
        finally:
            del under_way[sequence]
            done.set()

    async def _patiently(self, call: Callable[[], Awaitable[T]], until: float) -> T:
        """Call until it is not refused for now, or the time is over."""
        wait = FIRST_WAIT_SECONDS
        while True:
            try:
                return await call()
            except RetryLater:
                if (left := until - self._clock.monotonic()) <= 0:
                    raise
            await self._clock.sleep(min(wait, left))
            wait = min(2 * wait, LONGEST_WAIT_SECONDS)
