"""Dead letters: records that a group has given up, and how it gets them again."""

import contextlib
import heapq
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Iterable
from dataclasses import dataclass, replace

from shardyard.log import Log, Sender
from shardyard.model import (
    Headers,
    InvalidValue,
    OffsetTrimmed,
    Partition,
    PartitionOutOfRange,
    Record,
    Topic,
    TopicKind,
    UnknownTopic,
    whole_number,
)
from shardyard.model.batch import Batch
from shardyard.queues.retry_topics import (
    bare_record,
    dead_topic,
    home_of,
    made,
    number,
    origin_of,
    original,
    published_of,
    retry_topic,
)
from shardyard.wire.headers import ATTEMPT, DIED, ERROR, ORIGIN, PUBLISHED, REDRIVEN

CHUNK_RECORDS = 100
CHUNK_BYTES = 4 * 1024 * 1024
"""Of dead letters that are read together."""
MOST_NAMED = 10
"""Ids that an error names."""


@dataclass(frozen=True, slots=True)
class Dead:
    """A dead letter."""

    partition: Partition
    offset: int
    record: Record
    """As it was published. The timestamp is that of its death if the other one is not known."""
    reason: str
    attempts: int
    origin: str | None
    published: int | None
    """When, in ms since 1970, as far as it is known."""
    died_at: int
    order: tuple[int, int, int]
    """Its place in the list: what `dead` takes as `before`."""


async def dead(
    log: Log, group: str, topic: str, limit: int = 100, before: tuple[int, int, int] | None = None
) -> list[Dead]:
    """A group's dead letters of a topic that were not driven again, newest first.

    `before`: the `Dead.order` of the last one of a page, to get the next page.
    """
    limit = whole_number("limit", limit, at_least=1)
    found = await letters_topic(log, group, topic)
    newest: list[Dead] = []
    for partition in found or ():
        letters: list[Dead] = []
        async with contextlib.aclosing(_newest_first(log, partition)) as found_there:
            async for letter in found_there:
                if before is None or letter.order < before:
                    letters.append(letter)
                    if len(letters) == limit:
                        break
        newest = heapq.nlargest(limit, newest + letters, key=lambda letter: letter.order)
    return newest


@dataclass(frozen=True, slots=True)
class Held:
    """How many records a dead-letter topic has that were not driven again."""

    letters: int
    others: int
    """That bear no mark of having been given up: somebody else put them there, or they were too large for it."""


async def held(log: Log, topic: Topic) -> Held:
    """Count what is in a topic."""
    letters = others = 0
    for partition in topic:
        async for _, record in _backwards(log, partition):
            if number(record.header(DIED)) is None:
                others += 1
            else:
                letters += 1
    return Held(letters, others)


async def redrive(log: Log, group: str, topic: str, *, ids: Collection[str] | None = None) -> int:
    """Give a group its dead letters of a topic again, all or those of these ids, as if they had never failed.

    They are durable on the retry topic before they are dropped here: if it breaks off, or two do it at once, some come
    twice. Returns how many there were. `InvalidValue` if there is none of one of the ids, and `UnknownTopic` if nobody
    could read them; nothing is driven again then.
    """
    if isinstance(ids, str):
        raise InvalidValue("ids", ids, "a list of ids, or None for all")
    wanted = None if ids is None else frozenset(ids)
    found = await letters_topic(log, group, topic)
    await _check_there(log, found, wanted or frozenset(), f"`shardyard dead list {group} {topic}`")
    if found is None:
        return 0
    home = await home_of(log, group, topic)
    sender = Sender(log, await _retry_topic(log, group, home, found))
    return sum([await _redrive(log, sender, partition, wanted) for partition in found])


async def _check_there(log: Log, found: Topic | None, ids: frozenset[str], see: str) -> None:
    missing = set(ids)
    for partition in found or ():
        if missing:
            missing -= {record.id async for _, record in _backwards(log, partition)}
    if missing:
        few = sorted(missing)[:MOST_NAMED]
        raise InvalidValue("ids", few, f"ids of dead letters that are there, unlike {len(missing)} of these: see {see}")


async def _retry_topic(log: Log, group: str, home: str, beside: Topic) -> str:
    """The retry topic, made if it is missing; `UnknownTopic` if the topic beside which it would be is gone, too."""
    name = retry_topic(group, home)
    try:
        await log.topic(name)
    except UnknownTopic:
        await log.topic(home)
    return await made(log, name, beside, TopicKind.RETRY)


async def _redrive(log: Log, sender: Sender, partition: Partition, ids: frozenset[str] | None) -> int:
    """A beginning that is driven again is trimmed away; behind the first letter that stays, tombstones say so."""
    end = (await log.span(partition)).end
    gone: set[tuple[int, str]] = set()
    async for offset, record in _all(log, partition, end):
        if (of := _tombstone_of(offset, record)) is not None:
            gone.add((of, record.id))

    stays: int | None = None
    count = 0
    async for batch in _batches(log, partition, end):
        again: list[Record] = []
        tombstones: list[Record] = []
        for offset, record in _numbered(batch):
            if _tombstone_of(offset, record) is not None or (offset, record.id) in gone:
                continue
            if ids is not None and record.id not in ids:
                stays = offset if stays is None else stays
                continue
            again.append(_fresh(record))
            if stays is not None:
                tombstones.append(Record(record.id, None, b"", ((REDRIVEN, b"%d" % offset),)))
        await sender.send(again)
        if tombstones:
            await log.append(partition, tombstones)
        if stays is None or stays >= batch.first:
            await log.trim(partition, batch.end if stays is None else stays)
        count += len(again)
    return count


def _fresh(record: Record) -> Record:
    """As if it had never failed, but for where it came from, and when."""
    origin, published = origin_of(record), published_of(record)
    bare = bare_record(record)
    marks: Headers = ()
    if origin is not None:
        marks += ((ORIGIN, origin.encode()),)
    if published is not None:
        marks += ((PUBLISHED, b"%d" % published),)
    return replace(bare, headers=bare.headers + marks)


def _tombstone_of(offset: int, record: Record) -> int | None:
    """The offset of the dead letter whose tombstone this is, if it is one."""
    of = number(record.header(REDRIVEN))
    return of if of is not None and of < offset else None


async def letters_topic(log: Log, group: str, topic: str) -> Topic | None:
    """Where a group's dead letters of a topic are. None if nothing died yet; `UnknownTopic` if there is no such topic
    either."""
    try:
        return await log.topic(dead_topic(group, await home_of(log, group, topic)))
    except UnknownTopic:
        await log.topic(original(group, topic))
        return None


async def _newest_first(log: Log, partition: Partition) -> AsyncGenerator[Dead, None]:
    """The letters of a partition from its end on backwards."""
    at: int | None = None
    async with contextlib.aclosing(_backwards(log, partition)) as records:
        async for offset, record in records:
            died = number(record.header(DIED))
            died_at = record.timestamp if died is None else died
            at = died_at if at is None else min(at, died_at)  # clocks differ; the order of a partition is its own
            yield _letter(partition, offset, record, died_at, (at, partition.index, offset))


async def _backwards(log: Log, partition: Partition) -> AsyncGenerator[tuple[int, Record], None]:
    """What was not driven again, from the end on: tombstones come before what they stand for."""
    gone: set[tuple[int, str]] = set()
    try:
        span = await log.span(partition)
    except (UnknownTopic, PartitionOutOfRange):  # it went meanwhile
        return
    end = span.end
    while end > span.first:
        start = max(end - CHUNK_RECORDS, span.first)
        chunk = [numbered async for numbered in _all(log, partition, end, start)]
        for offset, record in reversed(chunk):
            if (of := _tombstone_of(offset, record)) is not None:
                gone.add((of, record.id))
            elif (offset, record.id) not in gone:
                yield offset, record
        end = start


def _letter(partition: Partition, offset: int, record: Record, died_at: int, order: tuple[int, int, int]) -> Dead:
    reason = (record.header(ERROR) or b"").decode(errors="replace")
    attempts = number(record.header(ATTEMPT)) or 0
    published = published_of(record)
    bare = replace(bare_record(record), timestamp=record.timestamp if published is None else published)
    return Dead(partition, offset, bare, reason, attempts, origin_of(record), published, died_at, order)


async def _all(log: Log, partition: Partition, end: int, start: int = 0) -> AsyncIterator[tuple[int, Record]]:
    """The records from `start` up to, but without, `end`, with their offsets."""
    async for batch in _batches(log, partition, end, start):
        for numbered in _numbered(batch):
            yield numbered


async def _batches(log: Log, partition: Partition, end: int, start: int = 0) -> AsyncIterator[Batch]:
    """The same in batches. What is trimmed away meanwhile, or goes with its partition, is left out."""
    while start < end:
        try:
            batch = await log.read(partition, start, max_records=min(CHUNK_RECORDS, end - start), max_bytes=CHUNK_BYTES)
        except OffsetTrimmed as error:
            start = error.first
            continue
        except (UnknownTopic, PartitionOutOfRange):
            return
        if not len(batch):  # the topic was made anew
            return
        yield batch
        start = batch.end


def _numbered(batch: Batch) -> Iterable[tuple[int, Record]]:
    return enumerate(batch.records(), batch.first)
