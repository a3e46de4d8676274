"""Delayed records: they wait in the log itself, on a ladder of topics, each with one waiting time.

All records of a rung wait equally long, so each rung is first in, first out, and nobody keeps a list of what is due
when. A record goes to the longest rung that is not longer than what it has left to wait. When its time there is over
it goes on to the next one, and when it is due, to where it is meant for.
"""

import asyncio
import contextlib
import logging
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import pyarrow as pa

from shardyard.groups import Node, OwnedBatch, Reader
from shardyard.log import Log, Sender
from shardyard.model import (
    Conflict,
    Fence,
    Fenced,
    Headers,
    InvalidCall,
    InvalidValue,
    Partition,
    PartitionOutOfRange,
    Record,
    RetryLater,
    TooLarge,
    TopicExists,
    UnknownTopic,
    whole_number,
)
from shardyard.model.checks import check_int64, check_text
from shardyard.model.limits import ANY_SIZE, check_records
from shardyard.placement import DEFAULT_HASH, partitioner_named
from shardyard.runtime.clock import Clock, SystemClock
from shardyard.wire.headers import DUE, PARTITION, REASON, RESERVED, TARGET

_log = logging.getLogger(__name__)
T = TypeVar("T")

LADDER_MS = (100, 1_000, 10_000, 60_000, 600_000, 3_600_000, 6 * 3_600_000)
"""The waiting time of each rung."""
RUNG = "shardyard.delay."
"""How the names of rungs begin."""
RUNG_PARTITIONS = 2
MAX_DELAY_MS = 90 * 24 * 3_600_000
GROUP = "shardyard.delays"
UNDELIVERABLE = "shardyard.undeliverable"
"""The topic of records that could not be delivered, as they waited, and with the reason."""

RETRY_MS = 1_000
"""How long a record waits again whose target takes none for now."""
AGAIN_SECONDS = 0.2
LOOK_SECONDS = 1.0
"""How long to wait before looking at the clock again: it may have been set."""
TRIM_SECONDS = 5.0
"""How often, at most, what has left a rung's partition is trimmed away."""
REASON_BYTES = 500


class _Ladder:
    """The rungs, and the names of their topics."""

    def __init__(self, waits_ms: Iterable[int]) -> None:
        self._waits = sorted({whole_number("waiting time of a rung", wait, at_least=1) for wait in waits_ms})
        if not self._waits:
            raise InvalidValue("ladder", waits_ms, "at least one rung")
        self.topics = [f"{RUNG}{_duration(wait)}" for wait in self._waits]
        self.wait_ms = dict(zip(self.topics, self._waits, strict=True))

    def rung(self, left_ms: int) -> str:
        """The topic of the longest rung that is not longer; of the shortest one, if all are."""
        return self.topics[max(bisect_right(self._waits, left_ms) - 1, 0)]


def _duration(ms: int) -> str:
    for unit, size in (("h", 3_600_000), ("m", 60_000), ("s", 1_000)):
        if ms % size == 0:
            return f"{ms // size}{unit}"
    return f"{ms}ms"


@dataclass(frozen=True, slots=True)
class _Ticket:
    """Where a record is meant for, and when: what its reserved headers say while it waits."""

    due: int
    target: str
    partition: int | None

    @classmethod
    def of(cls, record: Record) -> "_Ticket":
        """`ValueError` for a record that nobody delayed."""
        due, target, partition = (record.header(name) for name in (DUE, TARGET, PARTITION))
        if due is None or target is None:
            raise InvalidValue("delayed record", record.id, f"the headers {DUE!r} and {TARGET!r}")
        return cls(int(due), target.decode(), None if partition is None else int(partition))

    def on(self, record: Record, now: int) -> Record:
        """The record as it waits from now on."""
        marks: Headers = ((DUE, b"%d" % self.due), (TARGET, self.target.encode()))
        if self.partition is not None:
            marks += ((PARTITION, b"%d" % self.partition),)
        return replace(record, headers=_own_headers(record) + marks, timestamp=now)


def _own_headers(record: Record) -> Headers:
    return tuple(header for header in record.headers if header[0] not in RESERVED)


def _due(record: Record) -> int:
    """When a record is due; one that nobody delayed always is, so that it is out of the way."""
    try:
        return int(record.header(DUE) or 0)
    except ValueError:
        return 0


async def _make(log: Log, topic: str) -> None:
    with contextlib.suppress(TopicExists):  # others need it too
        await log.create_topic(topic, RUNG_PARTITIONS)


async def _made(log: Log, topic: str, call: Callable[[], Awaitable[T]]) -> T:
    """What `call` returns; if it finds that the topic does not exist, it is made first."""
    try:
        return await call()
    except UnknownTopic as error:
        if error.topic != topic:
            raise
    await _make(log, topic)
    return await call()


async def _all(works: Iterable[Awaitable[Any]]) -> None:
    """Await all to their ends, then raise what the first that failed did."""
    for outcome in await asyncio.gather(*works, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome


def _load_placement() -> None:
    """What places keys is loaded on its first use, and nothing else runs meanwhile: better before anything is due."""
    for partitioner, hash_ in DEFAULT_HASH.items():
        partitioner_named(partitioner, 1, hash_).place_array(pa.array([b""]))


def _now_ms(clock: Clock) -> int:
    return int(clock.now() * 1000)


class Delays:
    """Takes records that are to be delivered later. They are, while a `Scheduler` runs anywhere on the same log.

    **When.** Never before a record is due, and soon after: a tenth of a second or two, unless there is much to do.

    **How.** By key, as a `Sender` would then, or to the partition named; if that one takes no more records, by key. Id,
    key, value and headers are as they were; the timestamp is that of the delivery.

    **Order.** By due time. Records that are due within a fraction of a second of each other have none between them.

    **At least once.** A record may come twice, with the same id, when a scheduler dies, stalls or loses its share.
    """

    def __init__(self, log: Log, *, ladder: Iterable[int] = LADDER_MS, clock: Clock | None = None) -> None:
        """`ladder`: the waiting times of the rungs in ms, the same for everyone on a log."""
        self._log = log
        self._clock = clock or SystemClock()
        self._ladder = _Ladder(ladder)
        self._senders = {topic: Sender(log, topic, clock=clock) for topic in self._ladder.topics}

    def due_in(self, delay_ms: int) -> int:
        """The time, in ms since 1970, that lies so far ahead; `InvalidValue` if it lies back or too far ahead."""
        return _now_ms(self._clock) + _check_delay(whole_number("delay", delay_ms, at_least=0))

    async def put(
        self,
        target: str,
        records: Sequence[Record],
        due: int | Sequence[int],
        *,
        partition: int | None = None,
        fence: Fence | None = None,
    ) -> None:
        """Deliver the records to the topic `target` when they are due (in ms since 1970; one time for all, or one for
        each). Those that are due already are delivered before it returns, the others are durable when it does.
        `fence`: of the ownership on which the caller relies; `Fenced` if it is over.

        `InvalidValue` for what is due more than `MAX_DELAY_MS` ahead, and `UnknownTopic` or `PartitionOutOfRange` if
        there is no such target; nothing is stored then. When the log refuses a part, or it is cancelled, others may be
        stored. Put again, they come twice.
        """
        rows, _ = check_records(records, ANY_SIZE)
        for record in rows:
            if taken := [name for name, _ in record.headers if name in RESERVED]:
                raise InvalidValue("header", taken[0], "another name: this one is reserved")
        now = _now_ms(self._clock)
        dues = _check_dues(due, len(rows), now)
        await self._check_target(target, partition)

        at_once: list[Record] = []
        waiting: defaultdict[str, list[Record]] = defaultdict(list)
        for record, when in zip(rows, dues, strict=True):
            if when <= now:
                at_once.append(replace(record, timestamp=0))
            else:
                waiting[self._ladder.rung(when - now)].append(_Ticket(when, target, partition).on(record, now))
        works: list[Awaitable[Any]] = [self._wait_on(rung, delayed, fence) for rung, delayed in waiting.items()]
        if at_once and partition is not None:
            works.append(self._log.append(Partition(target, partition), at_once, fence=fence))
        elif at_once:
            works.append(Sender(self._log, target, clock=self._clock).send(at_once, fence=fence))
        await _all(works)

    async def _wait_on(self, rung: str, records: list[Record], fence: Fence | None) -> None:
        await _made(self._log, rung, lambda: self._senders[rung].send(records, fence=fence))

    async def _check_target(self, target: str, partition: int | None) -> None:
        check_text("target", target)
        topic = await self._log.topic(target)
        if partition is not None and whole_number("partition", partition, at_least=0) >= topic.partitions:
            raise PartitionOutOfRange(Partition(target, partition), topic.partitions)


def _check_delay(delay_ms: int) -> int:
    if delay_ms > MAX_DELAY_MS:
        raise InvalidValue("delay", delay_ms, f"at most {MAX_DELAY_MS} ms (90 days)")
    return delay_ms


def _check_dues(due: int | Sequence[int], count: int, now: int) -> list[int]:
    dues = list(due) if isinstance(due, Sequence) else [due] * count
    if len(dues) != count:
        raise InvalidValue("due", due, f"a time for each of the {count} records, or one for all")
    dues = [check_int64("due", when, at_least=0) for when in dues]
    for when in set(dues):
        _check_delay(when - now)
    return dues


class Scheduler:
    """Moves delayed records on, and delivers them. Any number may run on a log and registry: they share the work, and
    what one leaves undone when it dies others take over.

    What a scheduler moves it moves as the owner of the rung's partition, so that one that lost it can't.

    A target that takes no records for now is tried again every second or so. A record that can't be delivered, because
    its target is gone for instance, goes to the topic `UNDELIVERABLE`. Neither holds up the others.
    """

    def __init__(
        self,
        node: Node,
        *,
        ladder: Iterable[int] = LADDER_MS,
        session_timeout: float = 10.0,
        clock: Clock | None = None,
    ) -> None:
        """`ladder`: as for `Delays`. `session_timeout`: seconds after which the others take over from one that died."""
        self._node = node
        self._log = node.log
        self._ladder = _Ladder(ladder)
        self._session = session_timeout
        self._clock = clock or SystemClock()
        self._trim_at: dict[Partition, float] = {}

    async def run(self) -> None:
        """Until cancelled. What it can't go on after, such as a closed log, it raises in an `ExceptionGroup`."""
        await asyncio.to_thread(_load_placement)
        for topic in self._ladder.topics:
            await self._insist(partial(_make, self._log, topic))
        member = Reader(GROUP, self._ladder.topics, node=self._node, session_timeout=self._session, clock=self._clock)
        async with member, asyncio.TaskGroup() as tasks:
            async for batch in member:
                tasks.create_task(self._work_off(batch), name=f"delays of {batch.partition}")

    async def _work_off(self, batch: OwnedBatch) -> None:
        """Move the records on, each when its time here is over, until all have gone or the partition is to go."""
        records = batch.records()
        wait_ms = self._ladder.wait_ms.get(batch.partition.topic, 0)
        over = [min(_due(record), record.timestamp + wait_ms) for record in records]
        done = 0
        try:
            while done < len(records) and not batch.stale:
                now = _now_ms(self._clock)
                upto = next((i for i in range(done, len(records)) if over[i] > now), len(records))
                if upto == done:
                    await self._wait(batch, (over[done] - now) / 1000)
                    continue
                batch.delivered_at = self._clock.monotonic()
                await self._move(batch, records[done:upto], now)
                await self._insist(partial(batch.commit, batch.first + upto))
                done = upto
        except Fenced as error:
            _log.info("left to its next owner: %s", error)
        finally:
            if batch.stale:
                batch.finished.set()  # nothing to wait for: the next owner goes on from what is committed
        if done:
            await self._trim(batch.partition, batch.first + done)

    async def _wait(self, batch: OwnedBatch, seconds: float) -> None:
        """Until the time is over, or it is worth a look at the clock, or the partition is gone.

        Meanwhile the batch is as one that was not handed out: its partition can go at once, and it is not old work.
        """
        batch.delivered_at = None
        ends = [
            asyncio.ensure_future(self._clock.sleep(min(seconds, LOOK_SECONDS))),
            asyncio.ensure_future(batch.finished.wait()),
        ]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()

    async def _move(self, batch: OwnedBatch, records: Sequence[Record], now: int) -> None:
        """Have all of them stored where they go next."""
        waiting: defaultdict[str, list[Record]] = defaultdict(list)
        ready: defaultdict[tuple[str, int | None], list[Record]] = defaultdict(list)
        works: list[Awaitable[None]] = []
        for record in records:
            try:
                ticket = _Ticket.of(record)
                _check_delay(ticket.due - now)
            except ValueError as error:
                works.append(self._give_up(batch, [record], str(error)))
                continue
            if ticket.due > now:
                waiting[self._ladder.rung(ticket.due - now)].append(replace(record, timestamp=now))
            else:
                ready[ticket.target, ticket.partition].append(record)
        works += [self._wait_on(batch, rung, delayed) for rung, delayed in waiting.items()]
        works += [self._deliver(batch, *to, delayed) for to, delayed in ready.items()]
        await _all(works)

    async def _wait_on(self, batch: OwnedBatch, rung: str, records: list[Record]) -> None:
        try:
            await self._append(batch, rung, records)
        except (InvalidCall, Conflict) as error:
            await self._give_up(batch, records, str(error))

    async def _deliver(self, batch: OwnedBatch, target: str, partition: int | None, records: list[Record]) -> None:
        """To one target; what it does not take for now waits again."""
        bare = [replace(record, headers=_own_headers(record), timestamp=0) for record in records]
        try:
            if partition is None or not await self._pinned(batch, Partition(target, partition), bare):
                await Sender(self._log, target, timeout=0.0, clock=self._clock).send(bare, fence=batch.fence)
        except RetryLater as error:
            _log.warning("%d records for %r wait again: %s", len(records), target, error)
            now = _now_ms(self._clock)
            again = _Ticket(now + RETRY_MS, target, partition)
            await self._wait_on(batch, self._ladder.rung(RETRY_MS), [again.on(record, now) for record in records])
        except (InvalidCall, Conflict) as error:
            await self._give_up(batch, records, str(error))

    async def _pinned(self, batch: OwnedBatch, partition: Partition, records: list[Record]) -> bool:
        """False if the partition takes no more records: it is gone, or its topic goes on elsewhere."""
        try:
            await batch.append(partition, records)
        except (InvalidCall, Conflict):
            return False
        return True

    async def _give_up(self, batch: OwnedBatch, records: list[Record], reason: str) -> None:
        _log.warning("%d records of %s go to %r: %s", len(records), batch.partition, UNDELIVERABLE, reason)
        header = (REASON, reason.encode(errors="replace")[:REASON_BYTES])
        told = [replace(record, headers=(*record.headers, header), timestamp=0) for record in records]
        try:
            await self._append(batch, UNDELIVERABLE, told)
        except TooLarge:  # they were as large as can be already
            await self._append(batch, UNDELIVERABLE, records)

    async def _append(self, batch: OwnedBatch, topic: str, records: list[Record]) -> None:
        """To one of our own topics: a key stays on partitions of the same index."""
        to = Partition(topic, batch.partition.index % RUNG_PARTITIONS)
        await self._insist(lambda: _made(self._log, topic, lambda: batch.append(to, records)))

    async def _insist(self, call: Callable[[], Awaitable[Any]]) -> None:
        """Call until it is not refused for now."""
        while True:
            try:
                await call()
            except RetryLater as error:
                _log.warning("put off: %s", error)
                await self._clock.sleep(AGAIN_SECONDS)
            else:
                return

    async def _trim(self, partition: Partition, before: int) -> None:
        """Now and then: what is left lying costs room, not correctness."""
        now = self._clock.monotonic()
        if now >= self._trim_at.get(partition, now):
            self._trim_at[partition] = now + TRIM_SECONDS
            with contextlib.suppress(InvalidCall, Conflict, RetryLater):
                await self._log.trim(partition, before)
