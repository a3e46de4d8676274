"""Publishing: which partition a record goes to, and that it is stored once."""

import asyncio
import random
import zlib
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from shardyard.log import Log, Sender
from shardyard.log.distribution import Rows, Turns, assign_partitions, join, split
from shardyard.model import (
    Appended,
    Closing,
    Fence,
    InvalidValue,
    Moved,
    Outdated,
    OverQuota,
    Partition,
    PartitionOutOfRange,
    Record,
    RetryLater,
    Stamp,
    Topic,
)
from shardyard.model.batch import SCHEMA, from_records, now_ms, to_records
from shardyard.model.limits import Limits, check_batch, check_records
from shardyard.placement import partitioner_named
from shardyard.queues.delays import Delays
from shardyard.runtime.clock import Clock, SystemClock
from shardyard.wire.records import Posted

PATIENCE_SECONDS = 3.0
"""For which a publish tries again what the log refuses for now; then who publishes is told to, before it loses its own
patience with this broker."""
AGAIN_SECONDS = 0.05
WHOLE_FROM_RECORDS = 100
"""From this size on a stamped batch without keys is not taken apart: the turn is the batch's, not the record's."""
MOST_KNOWN = 1000
"""Topics."""
_LIMITS = Limits()


class Publisher:
    """Publishes to the topics of a log.

    A record goes to the partition of its key. Those without a key are distributed round-robin, as in `Sender`. A batch
    with a stamp is distributed by producer and sequence, so that a retry, through any broker, goes where the first
    attempt went.
    """

    def __init__(self, log: Log, delays: Delays, clock: Clock | None = None) -> None:
        self._log = log
        self._delays = delays
        self._clock = clock or SystemClock()
        self._senders: dict[str, Sender] = {}
        self._known: dict[str, Topic] = {}
        self._turn = random.randrange(2**16)  # several brokers shall not all begin with the same partition

    async def publish(
        self,
        topic: str,
        posted: pa.RecordBatch | Sequence[Posted],
        *,
        partition: int | None = None,
        stamp: Stamp | None = None,
        fence: Fence | None = None,
        turn: int | None = None,
        together: bool = False,
    ) -> list[Appended]:
        """Durable when it returns; delayed records are not in the answer: they have no place yet.

        `turn`: the partition where the distribution of stamped records without a key starts; by default their sequence.
        `together`: all of them go to that partition, as they do anyway if there are many.
        """
        together = together or len(posted) >= WHOLE_FROM_RECORDS
        turns = None if stamp is None else partial(_turns, _first(stamp, turn), 0 if together else 1)
        if isinstance(posted, pa.RecordBatch):
            one_part = partition is not None or (stamp is not None and together and _is_keyless(posted))
            rows = posted if one_part else check_batch(posted, _LIMITS, now_ms())  # else the log checks it
            return await self._append(topic, rows, partition, stamp, fence, turns)
        now = now_ms()
        check_records([p.record for p in posted], _LIMITS)
        for p in posted:
            if p.due is not None and p.due < 0:
                raise InvalidValue("deliver_at", p.due, "milliseconds since 1970, at least 0")
        later = [p for p in posted if p.due is not None and p.due > now]
        if later and stamp is not None:
            raise InvalidValue("sequence", stamp.sequence, "none with delayed records: give each an id instead")
        if later and fence is not None:
            raise InvalidValue("fence", fence.name, "none with delayed records: they outlast an ownership")
        at_once = [p.record for p in posted if p.due is None or p.due <= now]
        if later:
            await self._log.topic(topic)
            dues = [p.due or 0 for p in later]
            await self._delays.put(topic, [p.record for p in later], dues, partition=partition)
        return await self._append(topic, at_once, partition, stamp, fence, turns) if at_once else []

    async def _append(
        self,
        topic: str,
        records: pa.RecordBatch | Sequence[Record],
        partition: int | None,
        stamp: Stamp | None,
        fence: Fence | None,
        turns: Turns | None,
    ) -> list[Appended]:
        if partition is not None:
            rows = records if isinstance(records, pa.RecordBatch) else from_records(records, now_ms())
            return [await self._append_pinned(topic, rows, partition, stamp, fence)]
        if stamp is not None and turns is not None:
            rows = records if isinstance(records, pa.RecordBatch) else from_records(records, now_ms())
            return await self._append_stamped(topic, rows, stamp, fence, turns)
        if len(records) == 1 and fence is None and (one := await self._append_one(topic, records)) is not None:
            return [one]
        if (sender := self._senders.get(topic)) is None:
            await self._topic(topic)  # what does not exist is not kept
            sender = self._senders[topic] = Sender(self._log, topic, patience=PATIENCE_SECONDS)
        stored = await sender.send(records, fence=fence)
        if sender.topic is not None and sender.topic.name != topic:
            self._senders.pop(topic, None)
        return stored

    async def _append_pinned(
        self, name: str, rows: pa.RecordBatch, partition: int, stamp: Stamp | None, fence: Fence | None
    ) -> Appended:
        while True:
            where = Partition((await self._topic(name)).name, partition)
            try:
                return await self._patiently(partial(self._log.append, where, rows, stamp=stamp, fence=fence))
            except Moved:
                self._known.pop(name, None)

    async def _append_stamped(
        self, name: str, rows: pa.RecordBatch, stamp: Stamp, fence: Fence | None, turns: Turns
    ) -> list[Appended]:
        """Each part has a stamp that says over how many partitions it was distributed, and whether it is all of what
        falls to its partition: a retry that is distributed otherwise is another batch, and at worst is stored twice."""
        stored: list[Appended] = []
        rest = ""
        while len(rows):
            topic = await self._topic(name)
            mark = Stamp(f"{stamp.producer}/{topic.name}/{topic.receiving}{rest}", stamp.sequence)
            parts = split(rows, assign_partitions(topic, rows, turns))
            appends = [
                partial(self._log.append, Partition(topic.name, place), part, stamp=mark, fence=fence, placed_on=topic)
                for place, part in parts
            ]
            outcomes = await asyncio.gather(*map(self._patiently, appends), return_exceptions=True)
            elsewhere: list[Rows] = []
            for (_, part), outcome in zip(parts, outcomes, strict=True):
                if isinstance(outcome, Closing | Moved | Outdated | PartitionOutOfRange):
                    elsewhere.append(part)
                elif isinstance(outcome, BaseException):
                    raise outcome
                else:
                    stored.append(outcome)
            rows = join(elsewhere)
            if elsewhere:
                self._known.pop(name, None)
                rest += "-rest" if len(elsewhere) < len(parts) else ""
        return stored

    async def _patiently(self, append: Callable[[], Awaitable[Appended]]) -> Appended:
        """Again while the log refuses for now, up to a time."""
        until = self._clock.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                return await append()
            except RetryLater:
                if self._clock.monotonic() > until:
                    raise
            await self._clock.sleep(AGAIN_SECONDS)

    async def _append_one(self, name: str, records: pa.RecordBatch | Sequence[Record]) -> Appended | None:
        """The straight way for the commonest case; None if the topic is not as it was: nothing is stored then."""
        topic = await self._topic(name)
        record = to_records(records)[0] if isinstance(records, pa.RecordBatch) else records[0]
        if record.key is None or topic.hash is None:
            self._turn += 1
            index = self._turn % topic.receiving
        else:
            index = partitioner_named(topic.partitioner, topic.receiving, topic.hash).place(record.key)
        try:
            return await self._log.append(Partition(topic.name, index), [record], placed_on=topic)
        except (Moved, Closing, Outdated, PartitionOutOfRange, RetryLater):
            self._known.pop(name, None)
            return None

    async def _topic(self, name: str) -> Topic:
        """The topic, or where it goes on, as last known: the log refuses what was placed by another state of it."""
        topic = self._known.get(name)
        if topic is None:
            topic = await self._log.topic(name)
            while topic.successor is not None:
                topic = await self._log.topic(topic.successor)
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
                self._senders.clear()
            if topic.name == name:  # one that moved may be made anew
                self._known[name] = topic
        return topic


def _first(stamp: Stamp, turn: int | None) -> int:
    """Producers begin with different partitions."""
    return zlib.crc32(stamp.producer.encode()) + (stamp.sequence if turn is None else turn)


def _turns(first: int, step: int, count: int) -> npt.NDArray[np.int64]:
    return first + np.arange(count) * step


def _is_keyless(rows: pa.RecordBatch) -> bool:
    return rows.schema.names == SCHEMA.names and bool(rows.column("key").null_count == len(rows))


class Quota:
    """Records a second of one topic, through one broker: a bucket that holds one second's worth."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._left = 0.0
        self._at = -np.inf

    def take(self, topic: str, count: int, per_second: int) -> None:
        """`OverQuota` if there is no room for them now; a batch of more than a second's worth needs a full bucket."""
        now = self._clock.monotonic()
        self._left = min(float(per_second), self._left + (now - self._at) * per_second)
        self._at = now
        need = min(count, per_second)
        if self._left < need:
            raise OverQuota(topic, per_second, (need - self._left) / per_second)
        self._left -= count
