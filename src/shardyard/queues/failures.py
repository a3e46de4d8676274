"""Failed records: they are retried later and, after the last retry, become dead letters.

A group has a retry topic and a dead-letter topic for each of its topics (see `retry_topics`), so a failed record is
delivered again to this group only, and does not block other records. It leaves the order of its key: later records of
the key are handled in the meantime.

Call `Failures.handle` first, then commit: after a crash between the two the record is retried once more. Everything
here is at least once.
"""

import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import TypeVar

from msgspec import structs

from shardyard.groups.broadcast import parent_group
from shardyard.groups.fence import ownership_fence
from shardyard.log import Log
from shardyard.model import Fence, Headers, Partition, Record, TooLarge, TopicKind
from shardyard.queues.delays import Delays
from shardyard.queues.read_at import read_at
from shardyard.queues.retry_topics import (
    dead_topic,
    ensure_companion,
    home_topic,
    is_dead_topic,
    origin_of,
    original_topic,
    parse_number,
    published_of,
    retry_topic,
    strip_headers,
)
from shardyard.runtime.clock import Clock, SystemClock
from shardyard.wire.headers import (
    ATTEMPT,
    DIED,
    ERROR,
    ORIGIN,
    PUBLISHED,
    REASON_CHARACTERS,
    TRACEBACK,
    TRACEBACK_BYTES,
    end_of,
)
from shardyard.wire.media import MAX_DELAY_MS
from shardyard.wire.settings import GroupSettings

_log = logging.getLogger(__name__)
T = TypeVar("T")

PART_BYTES = 256 * 1024
"""The size of failed records that are delayed in one call."""


class Disposition(StrEnum):
    """What was done with a failed record."""

    RETRY = "retry"
    """It will be delivered again."""
    DEAD = "dead"
    """It is a dead letter."""
    GONE = "gone"
    """It was trimmed before it could be retried."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A record whose handling failed."""

    partition: Partition
    epoch: int
    """Of the ownership under which it was handled."""
    offset: int
    reason: str
    traceback: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was done about a failure."""

    failure: Failure
    disposition: Disposition
    attempts: int = 0
    """How often its handling has failed so far."""
    due: int | None = None
    """When it is retried, in ms since 1970."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """A failed record and what is to be done with it."""

    failure: Failure
    fence: Fence
    home: str
    record: Record
    attempts: int
    due: int | None
    """None: it becomes a dead letter."""

    @property
    def outcome(self) -> Outcome:
        disposition = Disposition.DEAD if self.due is None else Disposition.RETRY
        return Outcome(self.failure, disposition, self.attempts, self.due)


class Failures:
    """Retries failed records after the group's back-off, and turns them into dead letters after the last retry."""

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
        """Schedule the next retry of each record or, after the last one, make it a dead letter. Everything is durable
        when this returns; commit after that. `read`: the topics that members of the group read, if that is known. If
        its retry topic is not among them, as in a broadcast group, a record becomes a dead letter at once.

        Nothing is stored on `Fenced`, if one of the partitions has another owner, and on `OffsetBeyondEnd`, if there is
        no such record. A record that fails on the dead-letter topic itself stays there as it is.
        """
        found = await self._read(group, failures)
        owner, group = group, parent_group(group)
        outcomes: dict[tuple[Partition, int], Outcome] = {}
        plans: list[_Plan] = []
        homes: dict[str, str] = {}
        for failure in {(f.partition, f.offset): f for f in failures}.values():
            record = found.get((failure.partition, failure.offset))
            topic = failure.partition.topic
            if record is None:
                _log.warning("offset %d of %s is not retried: it was trimmed", failure.offset, failure.partition)
                outcome = Outcome(failure, Disposition.GONE)
            elif is_dead_topic(group, topic):
                outcome = Outcome(failure, Disposition.DEAD, parse_number(record.header(ATTEMPT)) or 0)
            else:
                if topic not in homes:
                    homes[topic] = await home_topic(self._log, group, topic)
                waits = settings.backoff if read is None or retry_topic(group, homes[topic]) in read else ()
                plans.append(self._plan(owner, waits, failure, record, homes[topic]))
                outcome = plans[-1].outcome
            outcomes[failure.partition, failure.offset] = outcome
        for plan in await self._store(group, plans):
            outcomes[plan.failure.partition, plan.failure.offset] = replace(plan, due=None).outcome
        return [replace(outcomes[f.partition, f.offset], failure=f) for f in failures]

    async def _read(self, group: str, failures: Sequence[Failure]) -> dict[tuple[Partition, int], Record]:
        """The records that still exist. Each read checks the ownership."""
        offsets: defaultdict[tuple[Partition, int], set[int]] = defaultdict(set)
        for failure in failures:
            offsets[failure.partition, failure.epoch].add(failure.offset)
        found: dict[tuple[Partition, int], Record] = {}
        for (partition, epoch), wanted in offsets.items():
            records = await read_at(self._log, partition, wanted, ownership_fence(group, partition, epoch))
            found |= {(partition, offset): record for offset, record in records.items()}
        return found

    def _plan(self, group: str, waits: Sequence[float], failure: Failure, record: Record, home: str) -> _Plan:
        """Only records of the retry topic have failed before: on other topics such headers are the publisher's."""
        failed, origin, published = 0, None, None
        if original_topic(group, failure.partition.topic) != failure.partition.topic:
            failed, origin = parse_number(record.header(ATTEMPT)) or 0, origin_of(record)
            published = published_of(record)
        due = None
        headers: Headers = (
            (ATTEMPT, b"%d" % (failed + 1)),
            (ORIGIN, (origin or f"{failure.partition}/{failure.offset}").encode()),
            (PUBLISHED, b"%d" % (record.timestamp if published is None else published)),
            (ERROR, failure.reason[:REASON_CHARACTERS].encode(errors="replace")),
        )
        if failed < len(waits):
            due = int(self._clock.now() * 1000 + min(waits[failed] * 1000, MAX_DELAY_MS))
        bare = strip_headers(record)
        record = structs.replace(bare, headers=bare.headers + headers)
        fence = ownership_fence(group, failure.partition, failure.epoch)
        return _Plan(failure, fence, home, record, failed + 1, due)

    async def _store(self, group: str, plans: Sequence[_Plan]) -> list[_Plan]:
        """Returns those that became dead letters because the log refuses them as too large to be delayed, with the
        headers for that."""
        retries: defaultdict[tuple[str, Fence], list[_Plan]] = defaultdict(list)
        dead: defaultdict[str, list[_Plan]] = defaultdict(list)
        for plan in plans:
            if plan.due is None:
                dead[plan.home].append(plan)
            else:
                retries[plan.home, plan.fence].append(plan)
        too_large: list[_Plan] = []
        for (home, fence), waiting in retries.items():
            topic = await self._log.topic(waiting[0].failure.partition.topic)
            to = await ensure_companion(self._log, retry_topic(group, home), topic, TopicKind.RETRY)
            for part in _small_parts(waiting):
                refused = await _store_in_halves(partial(self._delay, to, fence), part)
                too_large += refused
                dead[home] += refused
        for home, given_up in dead.items():
            await self._append_dead(dead_topic(group, home), given_up)
        return too_large

    async def _delay(self, to: str, fence: Fence, plans: Sequence[_Plan]) -> None:
        dues = [plan.due or 0 for plan in plans]
        await self._delays.put(to, [plan.record for plan in plans], dues, fence=fence)

    async def _append_dead(self, name: str, plans: Sequence[_Plan]) -> None:
        """Append to the dead-letter topic, as the owner of the partition where they failed."""
        if not plans:
            return
        await ensure_companion(self._log, name, await self._log.topic(plans[0].failure.partition.topic))
        receiving = (await self._log.topic(name)).receiving
        letters: defaultdict[tuple[int, Fence], list[Record]] = defaultdict(list)
        died = b"%d" % int(self._clock.now() * 1000)
        for plan in plans:
            headers: Headers = ((DIED, died),)
            if plan.failure.traceback:
                headers = ((TRACEBACK, end_of(plan.failure.traceback, TRACEBACK_BYTES)), *headers)
            letter = structs.replace(plan.record, headers=plan.record.headers + headers)
            letters[plan.failure.partition.index % receiving, plan.fence].append(letter)
        for (index, fence), records in letters.items():
            append = partial(self._log.append, Partition(name, index), fence=fence)
            for record in await _store_in_halves(append, records):
                _log.warning("record %r is too large for the headers of a dead letter; stored without them", record.id)
                await append([strip_headers(record)])


def _small_parts(plans: Iterable[_Plan]) -> Iterator[list[_Plan]]:
    """Large records alone: when one of a part is refused, others of it may have been stored, and would be stored
    twice."""
    part: list[_Plan] = []
    total = 0
    for plan in plans:
        size = len(plan.record.value) + sum(len(value) for _, value in plan.record.headers)
        if part and total + size > PART_BYTES:
            yield part
            part, total = [], 0
        part.append(plan)
        total += size
    if part:
        yield part


async def _store_in_halves(store: Callable[[list[T]], Awaitable[object]], rows: list[T]) -> list[T]:
    """Store the rows, in halves where they are too large together. Returns those that are too large alone."""
    try:
        await store(rows)
    except TooLarge:
        if len(rows) == 1:
            return rows
        half = len(rows) // 2
        return [*await _store_in_halves(store, rows[:half]), *await _store_in_halves(store, rows[half:])]
    return []
