"""Publishing to a topic: placing records, splitting them by partition, stamping, retrying and following moves.

Everything that publishes goes through here: `Sender` within a process, brokers for their clients, and Spark's writer,
which places its records itself and uses only the functions.
"""

import asyncio
import contextlib
import random
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

import pyarrow as pa

from shardyard.log.distribution import RoundRobin, Turns, assign_partition, distribute, join
from shardyard.log.port import Log
from shardyard.log.sequences import SequenceWindow
from shardyard.model import (
    Appended,
    Fence,
    Moved,
    OutcomeUnknown,
    Outdated,
    Partition,
    PartitionDraining,
    PartitionOutOfRange,
    RetryLater,
    ShardyardError,
    Stamp,
    Topic,
)
from shardyard.model.batch import to_records
from shardyard.model.limits import Records, Validated
from shardyard.runtime.clock import Clock, SystemClock
from shardyard.runtime.retry import retry

T = TypeVar("T")

PLACE_AGAIN = (Moved, PartitionDraining, Outdated, PartitionOutOfRange)
"""What an append raises when its partition was chosen by a state of the topic that is over. Nothing was stored."""


async def current_topic(log: Log, name: str) -> Topic:
    """The topic of that name or, if it has moved, the topic that continues it now."""
    topic = await log.topic(name)
    while topic.successor is not None:
        topic = await log.topic(topic.successor)
    return topic


async def append_with_retry(
    log: Log,
    partition: Partition,
    records: Records,
    *,
    clock: Clock,
    deadline: float,
    stamp: Stamp | None = None,
    fence: Fence | Sequence[Fence] | None = None,
    generation: int | None = None,
) -> Appended:
    """Append, and try again while the log raises `RetryLater`, up to a moment of `clock.monotonic()`. Without a stamp,
    `OutcomeUnknown` is raised at once, because a retry could store the records twice."""
    append = partial(log.append, partition, records, stamp=stamp, fence=fence, generation=generation)
    return await retry(append, clock=clock, deadline=deadline, on_retry=_raise_unknown if stamp is None else None)


def _raise_unknown(error: RetryLater) -> None:
    if isinstance(error, OutcomeUnknown):
        raise error


class Router:
    """Routes records to the partitions of one topic, and follows the topic when it changes or moves.

    **Stamps.** Each part of a batch that goes to a partition has a stamp, so a part that is retried is stored once. The
    stamps are the router's own, or derived from one that a client gave to the whole batch: then a retry of the batch
    through another router is recognised too.

    **Changes.** Parts are appended under the generation that placed them. When the topic has changed, parts that would
    go to the same partitions are appended again under the same stamps; otherwise the refused parts are placed again.
    """

    def __init__(self, log: Log, topic: str, *, clock: Clock | None = None) -> None:
        self.topic: Topic | None = None
        """Where records go, as last known; None before the first use, and when it is to be looked up again."""
        self._log = log
        self._name = topic
        self._clock = clock or SystemClock()
        self._producer = uuid.uuid4().hex
        self._lookup = asyncio.Lock()
        self._windows: defaultdict[Partition, SequenceWindow] = defaultdict(SequenceWindow)
        self._round_robin = random.randrange(2**16)  # so that many routers do not all start with partition 0

    @property
    def name(self) -> str:
        """The name of the topic, or of the topic that it is known to have moved to."""
        return self._name

    async def current(self, deadline: float) -> Topic:
        """The topic that records go to; looked up if it is not known."""
        if (topic := self.topic) is not None:
            return topic
        async with self._lookup:  # one at a time, so that an older state never replaces a newer one
            if self.topic is None:
                topic = await self._retry(lambda: current_topic(self._log, self._name), deadline)
                self._name = topic.name
                self.topic = topic
            return self.topic

    async def send(
        self,
        records: Validated,
        *,
        deadline: float,
        stamp: Stamp | None = None,
        fence: Fence | None = None,
        round_robin: RoundRobin | None = None,
    ) -> list[Appended]:
        """Append the records to their partitions, all at the same time. Returns where the parts were stored.

        `deadline`: until when refused appends are retried. `stamp`: one that a client gave to the batch. `round_robin`:
        for records without a key, by default the router's own.

        When it raises or is cancelled, some parts may be stored. The others are finished before it raises, so that a
        later call can't overtake them.
        """
        stored: list[Appended] = []
        rest = ""
        while len(records):
            topic = await self.current(deadline)
            parts = distribute(topic, records, round_robin or self._next_turns)
            stamps = None if stamp is None else client_stamp(stamp, topic, rest)
            if len(parts) == 1:
                [(index, records)] = parts
                one = await self._send_part(topic, index, records, deadline, stamps, fence)
                if one is None:
                    continue
                return [*stored, one]
            outcomes = await asyncio.gather(
                *(self._send_part(topic, index, part, deadline, stamps, fence) for index, part in parts),
                return_exceptions=True,
            )
            refused: list[Validated] = []
            for (_, part), outcome in zip(parts, outcomes, strict=True):
                if isinstance(outcome, BaseException):
                    raise outcome
                if outcome is None:
                    refused.append(part)
                else:
                    stored.append(outcome)
            if refused and len(refused) < len(parts):
                rest += "-rest"
            records = join(records, refused)
        return stored

    async def send_one(self, records: Validated, *, deadline: float) -> Appended | None:
        """Append a single record in the fastest way: one attempt without a stamp. None if nothing was stored, because
        the topic has changed or the log refused it for now; then `send` takes care of it. Raises `OutcomeUnknown` if
        the record may have been stored: without a stamp, a retry could store it twice."""
        topic = await self.current(deadline)
        rows = records.rows
        if isinstance(rows, pa.RecordBatch):  # as a record it is stored together with others, not as a batch of its own
            rows = (to_records(rows)[0],)
            records = records.part(rows)
        index = assign_partition(topic, rows[0], self._next_turns)
        try:
            return await self._log.append(Partition(topic.name, index), records, generation=topic.generation)
        except OutcomeUnknown:
            raise
        except (*PLACE_AGAIN, RetryLater) as error:
            self._forget(topic, error)
            return None

    async def send_to(
        self,
        index: int,
        records: Records,
        *,
        deadline: float,
        stamp: Stamp | None = None,
        fence: Fence | None = None,
    ) -> Appended:
        """Append to the partition that the caller has chosen, of the topic or of the one that continues it."""
        while True:
            topic = await self.current(deadline)
            partition = Partition(topic.name, index)
            try:
                async with self._stamp(topic, index, stamp) as mark:
                    return await self._append(partition, records, deadline, mark, fence, None)
            except Moved as error:
                self._forget(topic, error)

    async def _send_part(
        self, topic: Topic, index: int, part: Validated, deadline: float, stamp: Stamp | None, fence: Fence | None
    ) -> Appended | None:
        """None if the part has to be placed again, because the topic has moved or places records differently now."""
        if stamp is not None:
            return await self._append_part(topic, index, part, deadline, stamp, fence)
        async with self._stamp(topic, index, None) as own:
            return await self._append_part(topic, index, part, deadline, own, fence)

    async def _append_part(
        self, topic: Topic, index: int, part: Validated, deadline: float, stamp: Stamp | None, fence: Fence | None
    ) -> Appended | None:
        partition = Partition(topic.name, index)
        while True:
            try:
                return await self._append(partition, part, deadline, stamp, fence, topic.generation)
            except Outdated as error:
                self._forget(topic, error)
                now = await self.current(deadline)
                if not _places_alike(topic, now):
                    return None
                topic = now
            except PLACE_AGAIN as error:
                self._forget(topic, error)
                return None

    async def _append(
        self,
        partition: Partition,
        records: Records,
        deadline: float,
        stamp: Stamp | None,
        fence: Fence | None,
        generation: int | None,
    ) -> Appended:
        return await append_with_retry(
            self._log,
            partition,
            records,
            clock=self._clock,
            deadline=deadline,
            stamp=stamp,
            fence=fence,
            generation=generation,
        )

    def _forget(self, topic: Topic, error: ShardyardError) -> None:
        """Look the topic up again after `error`, unless another task has done so since."""
        if isinstance(error, Moved) and self._name == topic.name:
            self._name = error.successor  # the old topic may be deleted before it is looked up
        if self.topic is topic:
            self.topic = None

    @contextlib.asynccontextmanager
    async def _stamp(self, topic: Topic, index: int, given: Stamp | None) -> AsyncIterator[Stamp | None]:
        """The stamp that a client gave, or one of the router's own, in flight until the block ends. None for a
        partition that the topic does not have, so that clients can't fill the memory with windows."""
        if given is not None or not 0 <= index < topic.partitions:
            yield given
            return
        async with self._windows[Partition(topic.name, index)].sequence() as number:
            yield Stamp(self._producer, number)

    def _next_turns(self, count: int) -> Turns:
        self._round_robin += count
        return Turns(self._round_robin - count)

    async def _retry(self, call: Callable[[], Awaitable[T]], deadline: float) -> T:
        return await retry(call, clock=self._clock, deadline=deadline)


def client_stamp(stamp: Stamp, topic: Topic, rest: str = "") -> Stamp:
    """The stamp for the parts of a client's batch. It says over how many partitions the batch was distributed, and
    whether the part is all that the batch has for its partition: a retry that is distributed differently has other
    parts, which must not be taken for these. At worst some records are stored twice then, but none is lost."""
    return Stamp(f"{stamp.producer}/{topic.name}/{topic.receiving}{rest}", stamp.sequence)


def _places_alike(one: Topic, other: Topic) -> bool:
    """Whether two states of a topic place records on the same partitions."""
    return (one.name, one.epoch, one.receiving, one.partitioner, one.hash) == (
        other.name,
        other.epoch,
        other.receiving,
        other.partitioner,
        other.hash,
    )
