"""What becomes of records whose handling failed: they are tried again later, and in the end given up as dead letters.

A group has a retry topic and a dead-letter topic beside each of its topics, so that a failed record comes back to this
group alone and holds up nobody. It leaves the order of its key: later records of the key are handled meanwhile.

First `Failures.handle`, then the commit: who crashes between them has the record tried again once more. Everything here
is at least once.
"""

import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import TypeVar

import pyarrow as pa

from shardyard.groups.broadcast import parent_group
from shardyard.log import Log
from shardyard.model import Fence, Headers, OffsetBeyondEnd, OffsetTrimmed, Partition, Record, TooLarge, TopicKind
from shardyard.model.batch import Batch
from shardyard.queues.delays import MAX_DELAY_MS, Delays
from shardyard.queues.retry_topics import (
    DEAD,
    bare_record,
    between,
    dead_topic,
    home_of,
    made,
    number,
    origin_of,
    original,
    published_of,
    retry_topic,
)
from shardyard.runtime.clock import Clock, SystemClock
from shardyard.wire.headers import ATTEMPT, DIED, ERROR, ORIGIN, PUBLISHED, REASON_CHARACTERS
from shardyard.wire.settings import GroupSettings

_log = logging.getLogger(__name__)
T = TypeVar("T")

NEAR_RECORDS = 100
"""Failed records that lie no further apart are read together."""
PART_BYTES = 256 * 1024
"""Of records that are put to wait together."""


class Fate(StrEnum):
    """What became of a failed record."""

    RETRY = "retry"
    DEAD = "dead"
    GONE = "gone"
    """It was trimmed away before it could be tried again."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A record whose handling failed."""

    partition: Partition
    epoch: int
    """Of the ownership under which it was handled."""
    offset: int
    reason: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a failure."""

    failure: Failure
    fate: Fate
    attempts: int = 0
    """How often its handling failed so far."""
    due: int | None = None
    """When it is tried again, in ms since 1970."""


@dataclass(frozen=True, slots=True)
class _Case:
    """A failed record, and what is to become of it."""

    failure: Failure
    fence: Fence
    home: str
    record: Record
    attempts: int
    due: int | None
    """None: it is dead."""


class Failures:
    """Has failed records tried again after a while, and gives them up in the end."""

    def __init__(self, log: Log, delays: Delays, *, clock: Clock | None = None) -> None:
        self._log = log
        self._delays = delays
        self._clock = clock or SystemClock()

    async def handle(
        self,
        group: str,
        settings: GroupSettings,
        failures: Sequence[Failure],
        read: Collection[str] | None = None,
    ) -> list[Outcome]:
        """Have each tried again when its next wait is over, or, after the last one, make it a dead letter. All is
        durable when it returns; commit after that. `read`: the topics that members of the group read, if that is
        known; where its retry topic is not among them, as in a broadcast group, a record is dead at once.

        `Fenced` if one of the partitions has gone to another member, and `OffsetBeyondEnd` if there is no such record;
        nothing is stored then. One that fails on the dead-letter topic itself stays there as it is.
        """
        found = await self._read(group, failures)
        owner, group = group, parent_group(group)
        outcomes: dict[tuple[Partition, int], Outcome] = {}
        cases: list[_Case] = []
        homes: dict[str, str] = {}
        for failure in {(f.partition, f.offset): f for f in failures}.values():
            record = found.get((failure.partition, failure.offset))
            topic = failure.partition.topic
            if record is None:
                _log.warning("offset %d of %s is not tried again: trimmed away", failure.offset, failure.partition)
                outcome = Outcome(failure, Fate.GONE)
            elif between(group, topic, DEAD) is not None:
                outcome = Outcome(failure, Fate.DEAD, number(record.header(ATTEMPT)) or 0)
            else:
                if topic not in homes:
                    homes[topic] = await home_of(self._log, group, topic)
                waits = settings.backoff if read is None or retry_topic(group, homes[topic]) in read else ()
                case = self._judge(owner, waits, failure, record, homes[topic])
                cases.append(case)
                fate = Fate.DEAD if case.due is None else Fate.RETRY
                outcome = Outcome(failure, fate, case.attempts, case.due)
            outcomes[failure.partition, failure.offset] = outcome
        for case in await self._store(group, cases):
            dead = Outcome(case.failure, Fate.DEAD, case.attempts)
            outcomes[case.failure.partition, case.failure.offset] = dead
        return [replace(outcomes[f.partition, f.offset], failure=f) for f in failures]

    async def _read(self, group: str, failures: Sequence[Failure]) -> dict[tuple[Partition, int], Record]:
        """The records, those that are still there. Each ownership is checked by the read."""
        wanted: defaultdict[tuple[Partition, int], set[int]] = defaultdict(set)
        for failure in failures:
            wanted[failure.partition, failure.epoch].add(failure.offset)
        found: dict[tuple[Partition, int], Record] = {}
        for (partition, epoch), offsets in wanted.items():
            fence = Fence(f"{group}/{partition}", epoch)
            left = sorted(offsets)
            while left:
                try:
                    batch = await self._log.read(partition, left[0], max_records=_near(left), fence=fence)
                except OffsetTrimmed as error:
                    left = [offset for offset in left if offset >= error.first]
                    continue
                if not len(batch):
                    raise OffsetBeyondEnd(partition, left[0], batch.end)
                found |= _picked(batch, {offset for offset in left if offset < batch.end})
                left = [offset for offset in left if offset >= batch.end]
        return found

    def _judge(self, group: str, waits: Sequence[float], failure: Failure, record: Record, home: str) -> _Case:
        """Only what came by the retry topic has failed before: elsewhere our headers are a publisher's own."""
        before, origin, published = 0, None, None
        if original(group, failure.partition.topic) != failure.partition.topic:
            before, origin = number(record.header(ATTEMPT)) or 0, origin_of(record)
            published = published_of(record)
        due = None
        marks: Headers = (
            (ATTEMPT, b"%d" % (before + 1)),
            (ORIGIN, (origin or f"{failure.partition}/{failure.offset}").encode()),
            (PUBLISHED, b"%d" % (record.timestamp if published is None else published)),
            (ERROR, failure.reason[:REASON_CHARACTERS].encode(errors="replace")),
        )
        if before < len(waits):
            due = int(self._clock.now() * 1000 + min(waits[before] * 1000, MAX_DELAY_MS))
        bare = bare_record(record)
        record = replace(bare, headers=bare.headers + marks)
        fence = Fence(f"{group}/{failure.partition}", failure.epoch)
        return _Case(failure, fence, home, record, before + 1, due)

    async def _store(self, group: str, cases: Sequence[_Case]) -> list[_Case]:
        """Returns those that are dead because they are too large to wait: with our headers the log refuses them."""
        retries: defaultdict[tuple[str, Fence], list[_Case]] = defaultdict(list)
        dead: defaultdict[str, list[_Case]] = defaultdict(list)
        for case in cases:
            if case.due is None:
                dead[case.home].append(case)
            else:
                retries[case.home, case.fence].append(case)
        too_large: list[_Case] = []
        for (home, fence), waiting in retries.items():
            beside = await self._log.topic(waiting[0].failure.partition.topic)
            to = await made(self._log, retry_topic(group, home), beside, TopicKind.RETRY)
            for part in _small_parts(waiting):
                refused = await _in_parts(partial(self._put, to, fence), part)
                too_large += refused
                dead[home] += refused
        for home, given_up in dead.items():
            await self._bury(dead_topic(group, home), given_up)
        return too_large

    async def _put(self, to: str, fence: Fence, cases: Sequence[_Case]) -> None:
        dues = [case.due or 0 for case in cases]
        await self._delays.put(to, [case.record for case in cases], dues, fence=fence)

    async def _bury(self, name: str, cases: Sequence[_Case]) -> None:
        """Append to the dead-letter topic, as the owner of the partition where they failed."""
        if not cases:
            return
        await made(self._log, name, await self._log.topic(cases[0].failure.partition.topic))
        receiving = (await self._log.topic(name)).receiving
        letters: defaultdict[tuple[int, Fence], list[Record]] = defaultdict(list)
        died: Headers = ((DIED, b"%d" % int(self._clock.now() * 1000)),)
        for case in cases:
            letter = replace(case.record, headers=case.record.headers + died)
            letters[case.failure.partition.index % receiving, case.fence].append(letter)
        for (index, fence), records in letters.items():
            append = partial(self._log.append, Partition(name, index), fence=fence)
            for record in await _in_parts(append, records):
                _log.warning("record %r is too large for the headers of a dead letter; kept without them", record.id)
                await append([bare_record(record)])


def _small_parts(cases: Iterable[_Case]) -> Iterable[list[_Case]]:
    """Large ones alone: when the delays refuse one, others of its part may be stored, and come twice."""
    part: list[_Case] = []
    total = 0
    for case in cases:
        size = len(case.record.value) + sum(len(value) for _, value in case.record.headers)
        if part and total + size > PART_BYTES:
            yield part
            part, total = [], 0
        part.append(case)
        total += size
    if part:
        yield part


async def _in_parts(store: Callable[[list[T]], Awaitable[object]], rows: list[T]) -> list[T]:
    """Store them, in halves where they are too large together; returns those that are too large alone."""
    try:
        await store(rows)
    except TooLarge:
        if len(rows) == 1:
            return rows
        half = len(rows) // 2
        return [*await _in_parts(store, rows[:half]), *await _in_parts(store, rows[half:])]
    return []


def _near(offsets: Sequence[int]) -> int:
    """How many records to read from the first offset on, to have those that lie near."""
    last = offsets[0]
    for offset in offsets:
        if offset - last > NEAR_RECORDS:
            break
        last = offset
    return last - offsets[0] + 1


def _picked(batch: Batch, offsets: Collection[int]) -> dict[tuple[Partition, int], Record]:
    """The records at these offsets of a batch; only they become Python objects."""
    chosen = sorted(offsets)
    rows = batch.data.take(pa.array([offset - batch.first for offset in chosen], pa.int64()))
    records = replace(batch, data=rows).records()
    return {(batch.partition, offset): record for offset, record in zip(chosen, records, strict=True)}
