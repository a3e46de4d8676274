"""The SQL of the embedded log: functions on a connection, within a transaction that the caller has started."""

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pyarrow as pa

from shardyard.log import rules
from shardyard.log.batch_cache import BatchCache
from shardyard.log.stored_batches import LoadedBatch, Read, decode, encode, first_since
from shardyard.model import (
    SEQUENCE_WINDOW,
    Damaged,
    Fence,
    Fenced,
    InvalidValue,
    OffsetBeyondEnd,
    Partition,
    PartitionOutOfRange,
    Retention,
    SequenceTooOld,
    Span,
    Stamp,
    Topic,
    TopicExists,
    TopicKind,
    UnknownTopic,
)
from shardyard.model.batch import Batch

Connection = sqlite3.Connection


@dataclass(slots=True)
class Found:
    """A partition's row, with what its topic's row says about appends."""

    id: int
    epoch: int
    first: int
    end: int
    sealed: bool
    """Also when the seal has ended, until somebody notices: see `Writer`."""
    successor: str | None
    receiving: int
    generation: int
    sealed_since: int
    sealed_until: int


# Topics

_COLUMNS = (
    "name, partitions, kind, age_ms, bytes_per_partition, epoch, partitioner, hash, sealed, successor,"
    " open_partitions, generation"
)


def topics(db: Connection, now: int, name: str | None = None) -> list[Topic]:
    """All topics, or the one of that name. `now`, here and elsewhere: in milliseconds, decides which seals hold."""
    rows = db.execute(
        f"SELECT {_COLUMNS}, sealed_since <= ?2 AND ?2 < sealed_until FROM topics"  # noqa: S608 names of ours
        " WHERE ?1 IS NULL OR name = ?1 ORDER BY name",
        (name, now),
    ).fetchall()
    try:
        return [_topic(*row) for row in rows]
    except ValueError as error:
        raise Damaged("the list of topics", str(error)) from error


def _topic(
    name: str,
    partitions: int,
    kind: str,
    age: int | None,
    size: int | None,
    epoch: int,
    partitioner: str,
    hash_: str | None,
    sealed: int,
    successor: str | None,
    open_partitions: int | None,
    generation: int,
    in_force: int,
) -> Topic:
    return Topic(
        name,
        partitions,
        TopicKind(kind),
        Retention(age, size),
        epoch,
        *rules.check_placement(partitioner, partitions, hash_),
        bool(sealed and (in_force or successor is not None)),
        successor,
        open_partitions,
        generation,
    )


def topic(db: Connection, now: int, name: object) -> Topic:
    if not isinstance(name, str):
        raise InvalidValue("topic", name, "a string")
    found = topics(db, now, name)
    if not found:
        raise UnknownTopic(name)
    return found[0]


def create_topic(db: Connection, now: int, wanted: Topic) -> Topic:
    if there := topics(db, now, wanted.name):
        raise TopicExists(wanted.name, there[0].partitions)
    epoch = _next_number(db, now)
    retention = wanted.retention
    keeps = (retention.age_ms, retention.bytes_per_partition)
    places = (wanted.partitioner, wanted.hash)
    db.execute(
        f"INSERT INTO topics ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, 0, NULL, NULL, ?)",  # noqa: S608 names of ours
        (wanted.name, wanted.partitions, wanted.kind, *keeps, epoch, *places, epoch),
    )
    _add_partitions(db, wanted.name, 0, wanted.partitions)
    return topic(db, now, wanted.name)


def _next_number(db: Connection, now: int) -> int:
    """For epochs, generations and versions of the catalog: the time, or one more than the last one. It is higher than
    any before, even than those of a log that was lost."""
    number = max(catalog_version(db) + 1, now)
    db.execute("UPDATE epochs SET last = ?", (number,))
    return number


def catalog_version(db: Connection) -> int:
    """The last number that was given out: every change of the catalog takes a new one."""
    (last,) = db.execute("SELECT last FROM epochs").fetchone()
    return int(last)


def expand_topic(db: Connection, now: int, name: str, partitions: int) -> Topic:
    before = topic(db, now, name)
    after = rules.expanded(before, partitions)
    _add_partitions(db, name, before.partitions, after.partitions)
    return _change(db, now, before, after)


def _add_partitions(db: Connection, name: str, start: int, stop: int) -> None:
    """A partition that was dropped still has its row, and continues from there."""
    numbers = ((name, i) for i in range(start, stop))
    db.executemany("INSERT OR IGNORE INTO partitions (topic, number) VALUES (?, ?)", numbers)


def contract_topic(db: Connection, now: int, name: str, partitions: int) -> Topic:
    before = topic(db, now, name)
    return _change(db, now, before, rules.contracted(before, partitions))


def drop_partitions(db: Connection, now: int, name: str, partitions: int) -> Topic:
    """Their batches are deleted later, in small steps."""
    before = topic(db, now, name)
    after = rules.without_draining(before, partitions)
    db.execute(
        'UPDATE partitions SET first = "end", merged = "end" WHERE topic = ? AND number >= ?', (name, after.partitions)
    )
    return _change(db, now, before, after)


def set_retention(db: Connection, now: int, name: str, retention: Retention) -> Topic:
    topic(db, now, name)
    _next_number(db, now)
    db.execute(
        "UPDATE topics SET age_ms = ?, bytes_per_partition = ? WHERE name = ?",
        (retention.age_ms, retention.bytes_per_partition, name),
    )
    return topic(db, now, name)


def seal_topic(db: Connection, now: int, name: str, holder: str, duration: int) -> Topic:
    """`duration`: milliseconds."""
    before = topic(db, now, name)
    rules.check_sealable(before, _seal(db, name), holder, now)
    return _change(db, now, before, replace(before, sealed=True), rules.Seal(holder, now, now + duration))


def unseal_topic(db: Connection, now: int, name: str, holder: str) -> Topic:
    before = topic(db, now, name)
    rules.check_open(name, sealed=False, successor=before.successor)
    if (seal := _seal(db, name)) is None or seal.holder != holder:
        return before
    return _change(db, now, before, replace(before, sealed=False))


def move_topic(db: Connection, now: int, name: str, successor: str, holder: str, generation: int) -> Topic:
    before = topic(db, now, name)
    if before.successor == successor:
        return before
    rules.check_open(name, sealed=False, successor=before.successor)
    rules.check_move(before, topic(db, now, successor), _seal(db, name), holder, generation, now)
    return _change(db, now, before, replace(before, sealed=True, successor=successor))


def _seal(db: Connection, name: str) -> rules.Seal | None:
    row = db.execute(
        "SELECT sealed_by, sealed_since, sealed_until FROM topics WHERE name = ? AND sealed_by IS NOT NULL", (name,)
    ).fetchone()
    return row and rules.Seal(*row)


def _change(db: Connection, now: int, before: Topic, after: Topic, seal: rules.Seal | None = None) -> Topic:
    """Store what a change made of a topic. A seal that has ended is gone with it."""
    if rules.raises_generation(before, after):
        after = replace(after, generation=_next_number(db, now))
    elif seal is None:
        return before
    db.execute(
        "UPDATE topics SET partitions = ?, open_partitions = ?, sealed = ?, successor = ?, generation = ?,"
        " sealed_by = ?, sealed_since = ?, sealed_until = ? WHERE name = ?",
        (
            after.partitions,
            after.open_partitions,
            after.sealed,
            after.successor,
            after.generation,
            *((seal.holder, seal.since, seal.until) if seal is not None else (None, 0, 0)),
            after.name,
        ),
    )
    return after


def end_seal(db: Connection, name: str) -> None:
    """Record that a topic takes records again, so that a clock that is set back can't put the seal in force again."""
    db.execute(
        "UPDATE topics SET sealed = 0, sealed_by = NULL, sealed_since = 0, sealed_until = 0 WHERE name = ?", (name,)
    )


def delete_topic(db: Connection, now: int, name: str) -> None:
    """Its batches are deleted later, in small steps."""
    topic(db, now, name)
    db.execute('UPDATE partitions SET topic = NULL, first = "end" WHERE topic = ?', (name,))
    db.execute("DELETE FROM topics WHERE name = ?", (name,))
    _next_number(db, now)


# Partitions, fences and stamps


def find(db: Connection, partition: Partition) -> Found:
    rules.check_partition(partition)
    row = db.execute(
        'SELECT p.id, t.epoch, p.first, p."end", t.sealed, t.successor, coalesce(t.open_partitions, t.partitions),'
        " t.generation, t.sealed_since, t.sealed_until"
        " FROM partitions p JOIN topics t ON t.name = p.topic AND p.number < t.partitions"
        " WHERE p.topic = ? AND p.number = ?",
        (partition.topic, partition.index if partition.index < 2**63 else -1),  # the highest that SQLite can compare
    ).fetchone()
    if row is None:
        raise PartitionOutOfRange(partition, topic(db, 0, partition.topic).partitions)
    return Found(*row)


def check_fence(db: Connection, fence: Fence) -> bool:
    """Whether this epoch is higher than the one that is known; `Fenced` if it is lower."""
    row = db.execute("SELECT epoch FROM fences WHERE name = ?", (fence.name,)).fetchone()
    if row is not None and row[0] > fence.epoch:
        raise Fenced(f"epoch {fence.epoch} of {fence.name} is over: the current one is {row[0]}")
    return row is None or row[0] < fence.epoch


def raise_fence(db: Connection, fence: Fence) -> None:
    row = (fence.name, fence.epoch)
    db.execute("INSERT INTO fences VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET epoch = excluded.epoch", row)


def find_stamp(db: Connection, partition: Partition, found: Found, stamp: Stamp) -> tuple[int, int] | None:
    """The first offset and the number of records that were stored under this stamp; None if none were."""
    key = (found.id, stamp.producer)
    row = db.execute(
        "SELECT first, count FROM stamps WHERE partition = ? AND producer = ? AND sequence = ?", (*key, stamp.sequence)
    ).fetchone()
    if row is not None:
        return int(row[0]), int(row[1])
    (last,) = db.execute("SELECT max(sequence) FROM stamps WHERE partition = ? AND producer = ?", key).fetchone()
    if last is not None and stamp.sequence <= last - SEQUENCE_WINDOW:
        raise SequenceTooOld(partition, stamp.producer, stamp.sequence, last)
    return None


def put_stamp(db: Connection, partition_id: int, stamp: Stamp, first: int, count: int, now: int) -> None:
    row = (partition_id, stamp.producer, stamp.sequence, first, count, now)
    db.execute("INSERT INTO stamps VALUES (?, ?, ?, ?, ?, ?)", row)
    db.execute(
        "DELETE FROM stamps WHERE partition = ? AND producer = ? AND sequence <= ?",
        (partition_id, stamp.producer, stamp.sequence - SEQUENCE_WINDOW),
    )


# Batches


def put_batch(db: Connection, partition_id: int, first: int, data: pa.RecordBatch) -> None:
    batch = encode(partition_id, first, data)
    db.execute(
        "INSERT INTO batches (partition, first, count, latest, bytes, checksum, data) VALUES (?, ?, ?, ?, ?, ?, ?)",
        (partition_id, first, batch.count, batch.latest, batch.data.size, batch.checksum, batch.data),
    )


def set_ends(db: Connection, ends: list[tuple[int, int]]) -> None:
    """`ends`: pairs of an end and a partition id."""
    db.executemany('UPDATE partitions SET "end" = ? WHERE id = ?', ends)


def span(db: Connection, partition: Partition) -> Span:
    found = find(db, partition)
    return Span(found.epoch, found.first, found.end)


def read(
    db: Connection,
    cache: BatchCache,
    partition: Partition,
    offset: int,
    epoch: int | None,
    max_records: int,
    max_bytes: int,
) -> tuple[Found, Batch]:
    found = find(db, partition)
    span = Span(found.epoch, found.first, found.end)
    rules.check_offset(partition, span, offset, epoch)
    wanted = Read(partition, span, offset, max_records, max_bytes)
    for batch in _batches_from(db, cache, partition, found, offset):
        if not wanted.add(batch):
            if wanted.end < batch.end:  # the next read will continue in this batch
                cache.add(partition, found.epoch, batch)
            break
    return found, wanted.result()


def _batches_from(
    db: Connection, cache: BatchCache, partition: Partition, found: Found, offset: int
) -> Iterator[LoadedBatch]:
    """The batches that reach beyond `offset`."""
    while (cached := cache.find(partition, found.epoch, offset)) is not None:
        yield cached
        offset = cached.end
    rows = db.execute(
        "SELECT first, count, checksum, data FROM batches WHERE partition = ?1 AND first >="
        " (SELECT max(first) FROM batches WHERE partition = ?1 AND first <= ?2) ORDER BY first",
        (found.id, offset),
    )
    for first, count, checksum, stored in rows:
        if first + count > offset:
            yield decode(stored, checksum, found.id, first, count, str(partition))


def bytes_from(db: Connection, partition_id: int, offset: int) -> int:
    """The stored bytes from the batch with `offset` to the end."""
    (size,) = db.execute(
        "SELECT coalesce(sum(bytes), 0) FROM batches WHERE partition = ?1 AND first >="
        " (SELECT max(first) FROM batches WHERE partition = ?1 AND first <= ?2)",
        (partition_id, offset),
    ).fetchone()
    return int(size)


def offset_at(db: Connection, cache: BatchCache, partition: Partition, timestamp: int) -> int:
    found = find(db, partition)
    row = db.execute(
        "SELECT first FROM batches WHERE partition = ? AND first + count > ? AND latest >= ? ORDER BY first LIMIT 1",
        (found.id, found.first, timestamp),
    ).fetchone()
    # A batch that was trimmed in its middle may have its late records below the first offset: then a later one has it.
    for batch in _batches_from(db, cache, partition, found, row[0]) if row else ():
        if (offset := first_since(batch, timestamp, found.first)) is not None:
            return offset
    return found.end


def trim(db: Connection, partition: Partition, before: int) -> Span:
    """The batches themselves are deleted later, in small steps."""
    found = find(db, partition)
    if before > found.end:
        raise OffsetBeyondEnd(partition, before, found.end)
    if before > found.first:
        db.execute("UPDATE partitions SET first = ? WHERE id = ?", (before, found.id))
    return Span(found.epoch, max(before, found.first), found.end)
