"""The SQL of the embedded log: functions on a connection, inside a transaction that the caller has begun."""

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from shardyard.log.port import (
    check_move,
    check_offset,
    check_open,
    check_partition,
    check_placement,
    contracted,
    expanded,
    without_closing,
)
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
from shardyard.model.batch import SCHEMA, Batch, cut

Connection = sqlite3.Connection


@dataclass(slots=True)
class Found:
    """A partition's row, and whether its topic takes records, in how many partitions."""

    id: int
    epoch: int
    first: int
    end: int
    sealed: bool
    successor: str | None
    receiving: int


# Topics

_COLUMNS = (
    "name, partitions, kind, age_ms, bytes_per_partition, epoch, partitioner, hash, sealed, successor, open_partitions"
)


def topics(db: Connection, name: str | None = None) -> list[Topic]:
    rows = db.execute(
        f"SELECT {_COLUMNS} FROM topics WHERE ?1 IS NULL OR name = ?1 ORDER BY name",  # noqa: S608 names of ours
        (name,),
    )
    try:
        return [
            Topic(n, p, TopicKind(kind), Retention(age, size), epoch, *check_placement(by, p, on), bool(sealed), to, o)
            for n, p, kind, age, size, epoch, by, on, sealed, to, o in rows
        ]
    except ValueError as error:
        raise Damaged("the list of topics", str(error)) from error


def topic(db: Connection, name: object) -> Topic:
    if not isinstance(name, str):
        raise InvalidValue("topic", name, "a text")
    found = topics(db, name)
    if not found:
        raise UnknownTopic(name)
    return found[0]


def create_topic(db: Connection, wanted: Topic, now: int) -> Topic:
    """Its epoch is the time, or one more than the last one: higher even after the whole log was lost."""
    if there := topics(db, wanted.name):
        raise TopicExists(wanted.name, there[0].partitions)
    (last,) = db.execute("SELECT last FROM epochs").fetchone()
    epoch = max(last + 1, now)
    db.execute("UPDATE epochs SET last = ?", (epoch,))
    retention = wanted.retention
    keeps = (retention.age_ms, retention.bytes_per_partition)
    places = (wanted.partitioner, wanted.hash)
    db.execute(
        f"INSERT INTO topics ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, 0, NULL, NULL)",  # noqa: S608 names of ours
        (wanted.name, wanted.partitions, wanted.kind, *keeps, epoch, *places),
    )
    _add_partitions(db, wanted.name, 0, wanted.partitions)
    return topic(db, wanted.name)


def expand_topic(db: Connection, name: str, partitions: int) -> Topic:
    before = topic(db, name)
    after = expanded(before, partitions)
    _add_partitions(db, name, before.partitions, after.partitions)
    return _set_partitions(db, after)


def _add_partitions(db: Connection, name: str, start: int, stop: int) -> None:
    """One that was dropped is there yet, and goes on as it is."""
    numbers = ((name, i) for i in range(start, stop))
    db.executemany("INSERT OR IGNORE INTO partitions (topic, number) VALUES (?, ?)", numbers)


def contract_topic(db: Connection, name: str, partitions: int) -> Topic:
    return _set_partitions(db, contracted(topic(db, name), partitions))


def drop_partitions(db: Connection, name: str, partitions: int) -> Topic:
    """Their batches are cleared away later, in small steps."""
    after = without_closing(topic(db, name), partitions)
    db.execute(
        'UPDATE partitions SET first = "end", merged = "end" WHERE topic = ? AND number >= ?', (name, after.partitions)
    )
    return _set_partitions(db, after)


def _set_partitions(db: Connection, wanted: Topic) -> Topic:
    db.execute(
        "UPDATE topics SET partitions = ?, open_partitions = ? WHERE name = ?",
        (wanted.partitions, wanted.open_partitions, wanted.name),
    )
    return topic(db, wanted.name)


def set_retention(db: Connection, name: str, retention: Retention) -> Topic:
    topic(db, name)
    db.execute(
        "UPDATE topics SET age_ms = ?, bytes_per_partition = ? WHERE name = ?",
        (retention.age_ms, retention.bytes_per_partition, name),
    )
    return topic(db, name)


def set_sealed(db: Connection, name: str, *, sealed: bool) -> Topic:
    check_open(name, sealed=False, successor=topic(db, name).successor)
    db.execute("UPDATE topics SET sealed = ? WHERE name = ?", (sealed, name))
    return topic(db, name)


def move_topic(db: Connection, name: str, successor: str) -> Topic:
    there = topic(db, name)
    if there.successor != successor:
        check_open(name, sealed=False, successor=there.successor)
        check_move(there, topic(db, successor))
        db.execute("UPDATE topics SET sealed = 1, successor = ? WHERE name = ?", (successor, name))
    return topic(db, name)


def delete_topic(db: Connection, name: str) -> None:
    """Its batches are cleared away later, in small steps."""
    topic(db, name)
    db.execute('UPDATE partitions SET topic = NULL, first = "end" WHERE topic = ?', (name,))
    db.execute("DELETE FROM topics WHERE name = ?", (name,))


# Partitions, fences and stamps


def find(db: Connection, partition: Partition) -> Found:
    check_partition(partition)
    row = db.execute(
        'SELECT p.id, t.epoch, p.first, p."end", t.sealed, t.successor, coalesce(t.open_partitions, t.partitions)'
        " FROM partitions p JOIN topics t ON t.name = p.topic AND p.number < t.partitions"
        " WHERE p.topic = ? AND p.number = ?",
        (partition.topic, partition.index if partition.index < 2**63 else -1),  # SQLite has no greater number
    ).fetchone()
    if row is None:
        raise PartitionOutOfRange(partition, topic(db, partition.topic).partitions)
    return Found(*row)


def check_fence(db: Connection, fence: Fence) -> bool:
    """Whether the fence is to be raised; `Fenced` if it stands higher already."""
    row = db.execute("SELECT epoch FROM fences WHERE name = ?", (fence.name,)).fetchone()
    if row is not None and row[0] > fence.epoch:
        raise Fenced(f"epoch {fence.epoch} of {fence.name} is over: the current one is {row[0]}")
    return row is None or row[0] < fence.epoch


def raise_fence(db: Connection, fence: Fence) -> None:
    row = (fence.name, fence.epoch)
    db.execute("INSERT INTO fences VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET epoch = excluded.epoch", row)


def find_stamp(db: Connection, partition: Partition, found: Found, stamp: Stamp) -> tuple[int, int] | None:
    """(first, count) of the batch that was stored under this stamp, if one was."""
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
    stored = data.serialize()
    latest = int(data["timestamp"].to_numpy().max())  # a fifth of the time of Arrow's own for a few records
    row = (partition_id, first, len(data), latest, stored.size, _checksum(stored, partition_id, first), stored)
    db.execute(
        "INSERT INTO batches (partition, first, count, latest, bytes, checksum, data) VALUES (?, ?, ?, ?, ?, ?, ?)", row
    )


def set_ends(db: Connection, ends: list[tuple[int, int]]) -> None:
    """(end, partition id) each."""
    db.executemany('UPDATE partitions SET "end" = ? WHERE id = ?', ends)


def load(stored: bytes, checksum: int, partition_id: int, first: int, count: int, where: str) -> pa.RecordBatch:
    """A stored batch, if it is what was stored."""
    if _checksum(stored, partition_id, first) != checksum:
        raise Damaged(where, f"the batch at offset {first} fails its checksum")
    data = pa.ipc.read_record_batch(pa.py_buffer(stored), SCHEMA)
    if len(data) != count:
        raise Damaged(where, f"the batch at offset {first} has {len(data)} records instead of {count}")
    return data


def _checksum(stored: pa.Buffer | bytes, partition_id: int, first: int) -> int:
    """Signed, as SQLite has it; partition and offset are in it, so that a batch in the wrong place fails too."""
    return xxhash.xxh3_64_intdigest(stored, seed=(partition_id << 44 ^ first) % 2**64) - 2**63


def span(db: Connection, partition: Partition) -> Span:
    found = find(db, partition)
    return Span(found.epoch, found.first, found.end)


def read(
    db: Connection, partition: Partition, offset: int, epoch: int | None, max_records: int, max_bytes: int
) -> tuple[Found, Batch]:
    found = find(db, partition)
    check_offset(partition, Span(found.epoch, found.first, found.end), offset, epoch)
    chunks: list[pa.RecordBatch] = []
    count = size = 0
    at = offset
    for first, data, stored in _batches_from(db, partition, found, offset):
        if first > at:
            raise Damaged(str(partition), f"offsets {at} to {first - 1} are missing")
        part = cut(data, stored, at - first, max_records - count, max_bytes - size, at_least=0 if chunks else 1)
        if len(part):
            chunks.append(part)
        count, size, at = count + len(part), size + stored * len(part) // len(data), at + len(part)
        if at < first + len(data) or count == max_records or size >= max_bytes:
            break
    if at == offset and offset < found.end:
        raise Damaged(str(partition), f"offset {offset} is missing")
    return found, Batch(partition, found.epoch, offset, pa.Table.from_batches(chunks, SCHEMA))


def _batches_from(
    db: Connection, partition: Partition, found: Found, offset: int
) -> Iterator[tuple[int, pa.RecordBatch, int]]:
    """(first offset, batch, its size in bytes) of every batch that reaches beyond `offset`."""
    rows = db.execute(
        "SELECT first, count, checksum, data FROM batches WHERE partition = ?1 AND first >="
        " (SELECT max(first) FROM batches WHERE partition = ?1 AND first <= ?2) ORDER BY first",
        (found.id, offset),
    )
    for first, count, checksum, stored in rows:
        if first + count > offset:
            yield first, load(stored, checksum, found.id, first, count, str(partition)), len(stored)


def offset_at(db: Connection, partition: Partition, timestamp: int) -> int:
    found = find(db, partition)
    rows = db.execute(
        "SELECT first FROM batches WHERE partition = ? AND first + count > ? AND latest >= ? ORDER BY first LIMIT 1",
        (found.id, found.first, timestamp),
    )
    for (first,) in rows:
        start, data, _ = next(_batches_from(db, partition, found, first))
        late = pc.indices_nonzero(pc.greater_equal(data["timestamp"], timestamp)).to_pylist()
        reached = [start + i for i in late if start + i >= found.first]
        # A batch that was trimmed in its middle may have its late records below the first offset.
        return reached[0] if reached else offset_after(db, partition, found, start + len(data), timestamp)
    return found.end


def offset_after(db: Connection, partition: Partition, found: Found, offset: int, timestamp: int) -> int:
    """`offset_at`, looking from `offset` on, which is where a batch begins."""
    for start, data, _ in _batches_from(db, partition, found, offset) if offset < found.end else ():
        late = pc.indices_nonzero(pc.greater_equal(data["timestamp"], timestamp))
        if len(late):
            return int(start + late[0].as_py())
    return found.end


def trim(db: Connection, partition: Partition, before: int) -> Span:
    """The batches themselves are cleared away later, in small steps."""
    found = find(db, partition)
    if before > found.end:
        raise OffsetBeyondEnd(partition, before, found.end)
    if before > found.first:
        db.execute("UPDATE partitions SET first = ? WHERE id = ?", (before, found.id))
    return Span(found.epoch, max(before, found.first), found.end)
