"""The SQL of the embedded log: functions on a connection, within a transaction that the caller has started."""

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing

from shardyard.log import rules
from shardyard.log.appending import Changes, PartitionState
from shardyard.log.batch_cache import BatchCache
from shardyard.log.sqlite.catalog import SqliteCatalog
from shardyard.log.stored_batches import LoadedBatch, Read, StoredBatch, decode, first_since
from shardyard.model import (
    Fence,
    OffsetBeyondEnd,
    Partition,
    PartitionOutOfRange,
    Span,
    Stamp,
)
from shardyard.model.batch import Batch

Connection = sqlite3.Connection


# Partitions, fences and stamps


_FIND = (
    'SELECT p.id, t.epoch, p.first, p."end", t.sealed, t.successor, coalesce(t.open_partitions, t.partitions),'
    " t.generation, t.sealed_since, t.sealed_until, (SELECT epoch FROM fences WHERE name = ?3)"
    " FROM partitions p JOIN topics t ON t.name = p.topic AND p.number < t.partitions"
    " WHERE p.topic = ?1 AND p.number = ?2"
)


def find(db: Connection, partition: Partition, fence: Fence | None = None) -> PartitionState:
    """`Fenced` if a higher epoch than that of the fence is known."""
    rules.check_partition(partition)
    index = partition.index if partition.index < 2**63 else -1  # the highest that SQLite can compare
    row = db.execute(_FIND, (partition.topic, index, fence and fence.name)).fetchone()
    if row is None:
        raise PartitionOutOfRange(partition, SqliteCatalog(db, 0).topic(partition.topic).partitions)
    *state, known = row
    if fence is not None:
        rules.check_fence(fence, known)
    return PartitionState(*state)


def fence_epoch(db: Connection, name: str) -> int | None:
    row = db.execute("SELECT epoch FROM fences WHERE name = ?", (name,)).fetchone()
    return row and int(row[0])


def raise_fences(db: Connection, epochs: dict[str, int]) -> None:
    db.executemany(
        "INSERT INTO fences VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET epoch = excluded.epoch", epochs.items()
    )


class SqliteLookup:
    """What appends depend on, each looked up when it is needed."""

    def __init__(self, db: Connection) -> None:
        self._db = db

    def partition(self, partition: Partition) -> PartitionState:
        return find(self._db, partition)

    def fence(self, name: str) -> int | None:
        return fence_epoch(self._db, name)

    def stamp(self, partition_id: int, stamp: Stamp) -> tuple[int, int] | None:
        found: tuple[int, int] | None = self._db.execute(
            "SELECT first, count FROM stamps WHERE partition = ? AND producer = ? AND sequence = ?",
            (partition_id, stamp.producer, stamp.sequence),
        ).fetchone()
        return found

    def last_sequence(self, partition_id: int, producer: str) -> int | None:
        last: int | None
        (last,) = self._db.execute(
            "SELECT max(sequence) FROM stamps WHERE partition = ? AND producer = ?", (partition_id, producer)
        ).fetchone()
        return last


def put(db: Connection, changes: Changes, now: int) -> None:
    """Store what appends have changed."""
    put_batches(db, changes.batches)
    if changes.stamps:
        stamps = [(s.partition_id, s.producer, s.sequence, s.first, s.count, now) for s in changes.stamps]
        db.executemany("INSERT INTO stamps VALUES (?, ?, ?, ?, ?, ?)", stamps)
        db.executemany(
            "DELETE FROM stamps WHERE partition = ? AND producer = ? AND sequence <= ?", changes.forgotten_stamps()
        )
    if changes.fences:
        raise_fences(db, changes.fences)
    for name in changes.unsealed:
        db.execute(
            "UPDATE topics SET sealed = 0, sealed_by = NULL, sealed_since = 0, sealed_until = 0 WHERE name = ?", (name,)
        )
    ends = [(end, partition_id) for partition_id, end in changes.ends.items()]
    db.executemany('UPDATE partitions SET "end" = ? WHERE id = ?', ends)


# Batches


def put_batches(db: Connection, batches: Sequence[tuple[int, StoredBatch]]) -> None:
    """Store batches, which are given with the ids of their partitions."""
    rows = [(id_, b.first, b.count, b.latest, len(b.data), b.checksum, b.data) for id_, b in batches]
    db.executemany(
        "INSERT INTO batches (partition, first, count, latest, bytes, checksum, data) VALUES (?, ?, ?, ?, ?, ?, ?)",
        rows,
    )


def span(db: Connection, partition: Partition) -> Span:
    found = find(db, partition)
    return Span(found.epoch, found.first, found.end)


def spans(db: Connection, topic: str, *, dropped: bool) -> dict[int, Span]:
    """Of all partitions of the topic, with those that were dropped if `dropped`."""
    rows = db.execute(
        'SELECT p.number, t.epoch, p.first, p."end" FROM partitions p JOIN topics t ON t.name = p.topic'
        " WHERE p.topic = ? AND (p.number < t.partitions OR ?) ORDER BY p.number",
        (topic, dropped),
    ).fetchall()
    if not rows:
        SqliteCatalog(db, 0).topic(topic)  # raises the error
    return {number: Span(*span) for number, *span in rows}


def read(
    db: Connection,
    cache: BatchCache,
    partition: Partition,
    offset: int,
    epoch: int | None,
    max_records: int,
    max_bytes: int,
    fence: Fence | None,
) -> tuple[PartitionState, Batch]:
    found = find(db, partition, fence)
    wanted = _wanted(found, partition, offset, epoch, max_records, max_bytes)
    for batch in _batches_from(db, cache, partition, found, offset):
        if not wanted.add(batch):
            if wanted.end < batch.end:  # the next read will continue in this batch
                cache.add(partition, found.epoch, batch)
            break
    return found, wanted.result()


def newest(
    found: PartitionState,
    cache: BatchCache,
    partition: Partition,
    offset: int,
    epoch: int | None,
    max_records: int,
    max_bytes: int,
) -> Batch | None:
    """The same of a partition whose state was found, without a statement: nothing, or what is cached. None if other
    batches have to be read."""
    wanted = _wanted(found, partition, offset, epoch, max_records, max_bytes)
    while wanted.end < found.end:
        cached = cache.find(partition, found.epoch, wanted.end)
        if cached is None:
            return None
        if not wanted.add(cached):
            break
    return wanted.result()


def _wanted(
    found: PartitionState, partition: Partition, offset: int, epoch: int | None, max_records: int, max_bytes: int
) -> Read:
    span = Span(found.epoch, found.first, found.end)
    rules.check_offset(partition, span, offset, epoch)
    return Read(partition, span, offset, max_records, max_bytes)


def _batches_from(
    db: Connection, cache: BatchCache, partition: Partition, found: PartitionState, offset: int
) -> Iterator[LoadedBatch]:
    """The batches that reach beyond `offset`."""
    while (cached := cache.find(partition, found.epoch, offset)) is not None:
        yield cached
        offset = cached.end
    if offset >= found.end:
        return
    rows = db.execute(
        "SELECT first, count, checksum, data FROM batches WHERE partition = ?1 AND first >="
        " (SELECT max(first) FROM batches WHERE partition = ?1 AND first <= ?2) ORDER BY first",
        (found.id, offset),
    )
    with closing(rows):  # otherwise what an error refers to would keep the connection at this state of the file
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
