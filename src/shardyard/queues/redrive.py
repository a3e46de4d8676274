"""Redriving dead letters: delivering them to their group again."""

from collections.abc import Collection

from msgspec import structs

from shardyard.log import Log, Sender
from shardyard.model import Headers, InvalidValue, Partition, Record, Topic, TopicKind, UnknownTopic
from shardyard.queues.dead_letters import (
    find_dead_topic,
    marked_offset,
    records_backwards,
    scan_batches,
    scan_records,
)
from shardyard.queues.retry_topics import (
    ensure_companion,
    home_topic,
    origin_of,
    published_of,
    retry_topic,
    strip_headers,
)
from shardyard.runtime.clock import Clock
from shardyard.wire.headers import ORIGIN, PUBLISHED, REDRIVEN

MAX_NAMED_IDS = 10
"""How many missing ids an error names."""


async def redrive(
    log: Log, group: str, topic: str, *, ids: Collection[str] | None = None, clock: Clock | None = None
) -> int:
    """Deliver a group's dead letters of a topic to it again, all of them or those with these ids, as if they had never
    failed. Returns how many were redriven.

    They are durable on the retry topic before they are removed here: if the call is interrupted, or two run at once,
    some are delivered twice. Nothing is redriven on `InvalidValue`, if there is no dead letter with one of the ids, and
    on `UnknownTopic`, if no group could read them.
    """
    if isinstance(ids, str):
        raise InvalidValue("ids", ids, "a list of ids, or None for all")
    wanted = None if ids is None else frozenset(ids)
    found = await find_dead_topic(log, group, topic)
    await _check_ids(log, found, wanted or frozenset(), f"`shardyard dead list {group} {topic}`")
    if found is None:
        return 0
    home = await home_topic(log, group, topic)
    sender = Sender(log, await _ensure_retry_topic(log, group, home, found), clock=clock)
    return sum([await _redrive_partition(log, sender, partition, wanted) for partition in found])


async def _check_ids(log: Log, found: Topic | None, ids: frozenset[str], see: str) -> None:
    missing = set(ids)
    for partition in found or ():
        if missing:
            missing -= {record.id async for _, record in records_backwards(log, partition)}
    if missing:
        few = sorted(missing)[:MAX_NAMED_IDS]
        raise InvalidValue("ids", few, f"ids of existing dead letters ({len(missing)} missing): see {see}")


async def _ensure_retry_topic(log: Log, group: str, home: str, found: Topic) -> str:
    """Create the retry topic if it does not exist; `UnknownTopic` if its topic does not exist either."""
    name = retry_topic(group, home)
    try:
        await log.topic(name)
    except UnknownTopic:
        await log.topic(home)
    return await ensure_companion(log, name, found, TopicKind.RETRY)


async def _redrive_partition(log: Log, sender: Sender, partition: Partition, ids: frozenset[str] | None) -> int:
    """Records up to the first dead letter that stays are trimmed; those behind it are marked by tombstones."""
    end = (await log.span(partition)).end
    redriven = {
        (marked, record.id)
        async for offset, record in scan_records(log, partition, 0, end)
        if (marked := marked_offset(offset, record)) is not None
    }
    first_kept: int | None = None
    count = 0
    async for batch in scan_batches(log, partition, 0, end):
        again: list[Record] = []
        tombstones: list[Record] = []
        for offset, record in zip(batch.offsets(), batch.records(), strict=True):
            if marked_offset(offset, record) is not None or (offset, record.id) in redriven:
                continue
            if ids is not None and record.id not in ids:
                first_kept = offset if first_kept is None else first_kept
                continue
            again.append(_never_failed(record))
            if first_kept is not None:
                tombstones.append(Record(record.id, None, b"", ((REDRIVEN, b"%d" % offset),)))
        await sender.send(again)
        if tombstones:
            await log.append(partition, tombstones)
        if first_kept is None or first_kept >= batch.first:
            await log.trim(partition, batch.end if first_kept is None else first_kept)
        count += len(again)
    return count


def _never_failed(record: Record) -> Record:
    """The record as if it had never failed, but with its origin and its time of publishing."""
    origin, published = origin_of(record), published_of(record)
    bare = strip_headers(record)
    headers: Headers = ()
    if origin is not None:
        headers += ((ORIGIN, origin.encode()),)
    if published is not None:
        headers += ((PUBLISHED, b"%d" % published),)
    return structs.replace(bare, headers=bare.headers + headers)
