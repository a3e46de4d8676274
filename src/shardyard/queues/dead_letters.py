"""Dead letters: records that a group has given up after their last retry."""

import contextlib
import heapq
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass

from msgspec import structs

from shardyard.log import Log
from shardyard.log.scan import scan
from shardyard.model import Partition, PartitionOutOfRange, Record, Topic, UnknownTopic, whole_number
from shardyard.model.batch import Batch
from shardyard.queues.retry_topics import (
    dead_topic,
    home_topic,
    origin_of,
    original_topic,
    parse_number,
    published_of,
    strip_headers,
)
from shardyard.wire.headers import ATTEMPT, DIED, ERROR, REDRIVEN, TRACEBACK

CHUNK_RECORDS = 100
CHUNK_BYTES = 4 * 1024 * 1024
"""The limits of one read."""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A dead letter."""

    partition: Partition
    offset: int
    record: Record
    """As it was published. If the time of publishing is not known, its timestamp is that of its death."""
    reason: str
    traceback: str
    """The end of the traceback of the handler's last error; empty if it is not known."""
    attempts: int
    origin: str | None
    """Where it was published, such as `orders/3/17`, if that is known."""
    published: int | None
    """When it was published, in ms since 1970, if that is known."""
    died_at: int
    """In ms since 1970."""
    order: tuple[int, int, int]
    """Its place in the list: pass that of the last one of a page as `before` to get the next page."""


async def list_dead_letters(
    log: Log, group: str, topic: str, limit: int = 100, before: tuple[int, int, int] | None = None
) -> list[DeadLetter]:
    """A group's dead letters of a topic that were not redriven, newest first.

    `before`: the `order` of the last one of a page, to get the next page.
    """
    limit = whole_number("limit", limit, at_least=1)
    found = await find_dead_topic(log, group, topic)
    newest: list[DeadLetter] = []
    for partition in found or ():
        page: list[DeadLetter] = []
        async with contextlib.aclosing(_newest_first(log, partition)) as letters:
            async for letter in letters:
                if before is None or letter.order < before:
                    page.append(letter)
                    if len(page) == limit:
                        break
        newest = heapq.nlargest(limit, newest + page, key=lambda letter: letter.order)
    return newest


@dataclass(frozen=True, slots=True)
class DeadLetterCount:
    """How many records a dead-letter topic has that were not redriven."""

    letters: int
    others: int
    """Records without the headers of a dead letter: a user published them there, or they were too large for these
    headers."""


async def count_dead_letters(log: Log, topic: Topic) -> DeadLetterCount:
    """Count the records of a dead-letter topic."""
    letters = others = 0
    for partition in topic:
        async for _, record in records_backwards(log, partition):
            if parse_number(record.header(DIED)) is None:
                others += 1
            else:
                letters += 1
    return DeadLetterCount(letters, others)


async def find_dead_topic(log: Log, group: str, topic: str) -> Topic | None:
    """The topic with a group's dead letters of `topic`. None if it does not exist yet, because no record died;
    `UnknownTopic` if `topic` does not exist either."""
    try:
        return await log.topic(dead_topic(group, await home_topic(log, group, topic)))
    except UnknownTopic:
        await log.topic(original_topic(group, topic))
        return None


async def _newest_first(log: Log, partition: Partition) -> AsyncGenerator[DeadLetter, None]:
    """The dead letters of a partition, from its end backwards."""
    at: int | None = None
    async with contextlib.aclosing(records_backwards(log, partition)) as records:
        async for offset, record in records:
            died = parse_number(record.header(DIED))
            died_at = record.timestamp if died is None else died
            at = died_at if at is None else min(at, died_at)  # clocks differ; within a partition the offset decides
            yield _dead_letter(partition, offset, record, died_at, (at, partition.index, offset))


def _dead_letter(
    partition: Partition, offset: int, record: Record, died_at: int, order: tuple[int, int, int]
) -> DeadLetter:
    reason = (record.header(ERROR) or b"").decode(errors="replace")
    attempts = parse_number(record.header(ATTEMPT)) or 0
    published = published_of(record)
    bare = structs.replace(strip_headers(record), timestamp=record.timestamp if published is None else published)
    traceback = (record.header(TRACEBACK) or b"").decode(errors="replace")
    origin = origin_of(record)
    return DeadLetter(partition, offset, bare, reason, traceback, attempts, origin, published, died_at, order)


async def records_backwards(log: Log, partition: Partition) -> AsyncGenerator[tuple[int, Record], None]:
    """The records of a dead-letter partition that were not redriven, with their offsets, from the end backwards. In
    this direction a tombstone comes before the record that it marks."""
    redriven: set[tuple[int, str]] = set()
    try:
        span = await log.span(partition)
    except (UnknownTopic, PartitionOutOfRange):  # it was dropped in the meantime
        return
    end = span.end
    while end > span.first:
        start = max(end - CHUNK_RECORDS, span.first)
        chunk = [numbered async for numbered in scan_records(log, partition, start, end)]
        for offset, record in reversed(chunk):
            if (marked := marked_offset(offset, record)) is not None:
                redriven.add((marked, record.id))
            elif (offset, record.id) not in redriven:
                yield offset, record
        end = start


async def scan_records(log: Log, partition: Partition, start: int, end: int) -> AsyncIterator[tuple[int, Record]]:
    """The records of `scan_batches` with their offsets."""
    async for batch in scan_batches(log, partition, start, end):
        for numbered in zip(batch.offsets(), batch.records(), strict=True):
            yield numbered


async def scan_batches(log: Log, partition: Partition, start: int, end: int) -> AsyncIterator[Batch]:
    """The records with offsets from `start` up to, but without, `end`. Records that are trimmed meanwhile, or dropped
    with their partition, are skipped."""
    with contextlib.suppress(UnknownTopic, PartitionOutOfRange):
        async for batch in scan(log, partition, start, end, max_records=CHUNK_RECORDS, max_bytes=CHUNK_BYTES):
            yield batch


def marked_offset(offset: int, record: Record) -> int | None:
    """The offset of the dead letter that this tombstone marks as redriven; None if the record is not a tombstone."""
    marked = parse_number(record.header(REDRIVEN))
    return marked if marked is not None and marked < offset else None
