"""The statements of an append: a constant number for all appends of a group, in two round trips."""

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import psycopg

from shardyard.log import rules
from shardyard.log.appending import Append, Changes, PartitionState
from shardyard.log.postgresql.catalog import CHANNEL, NOW, may_be_topic, number_of
from shardyard.log.stored_batches import StoredBatch
from shardyard.model import Damaged, Partition, PartitionOutOfRange, Stamp, UnknownTopic
from shardyard.runtime.postgresql import Connection

_log = logging.getLogger(__name__)

PAYLOAD_PARTITIONS = 150
"""In one notification, whose payload must be below 8000 bytes."""

# The order by id, and fences after partitions, are the same in all transactions, so that nobody waits in a circle.
# Whatever changes a topic locks its partitions first: so what is read after it stays true until the commit.
_LOCK_PARTITIONS = """
SELECT p.topic, p.number, p.id, p.first, p."end"
FROM log_partitions p JOIN unnest(%s::text[], %s::int[]) AS wanted (topic, number)
    ON p.topic = wanted.topic AND p.number = wanted.number
ORDER BY p.id FOR NO KEY UPDATE OF p
"""
_TOPICS = f"""
SELECT {NOW}, t.name, t.partitions, t.epoch, t.sealed, t.successor, coalesce(t.open_partitions, t.partitions),
    t.generation, t.sealed_since, t.sealed_until
FROM (SELECT) AS always LEFT JOIN log_topics t ON t.name = ANY(%s::text[])
"""  # noqa: S608 names of ours
_ADD_FENCES = """
INSERT INTO log_fences SELECT name, -1 FROM unnest(%s::text[]) AS name ORDER BY name ON CONFLICT DO NOTHING
"""
_LOCK_FENCES = "SELECT name, epoch FROM log_fences WHERE name = ANY(%s::text[]) ORDER BY name FOR NO KEY UPDATE"
_STAMPS = """
SELECT p.id, wanted.producer, wanted.sequence, s.first, s.count,
    (SELECT max(l.sequence) FROM log_stamps l WHERE l.partition = p.id AND l.producer = wanted.producer)
FROM unnest(%s::text[], %s::int[], %s::text[], %s::bigint[]) AS wanted (topic, number, producer, sequence)
    JOIN log_partitions p ON p.topic = wanted.topic AND p.number = wanted.number
    LEFT JOIN log_stamps s ON s.partition = p.id AND s.producer = wanted.producer AND s.sequence = wanted.sequence
"""
PUT_BATCH = """
INSERT INTO log_batches (partition, first, count, latest, bytes, checksum, data) VALUES (%b, %b, %b, %b, %b, %b, %b)
"""
_PUT_ENDS = """
UPDATE log_partitions p SET "end" = new."end" FROM unnest(%s::bigint[], %s::bigint[]) AS new (id, "end")
WHERE p.id = new.id
"""
_PUT_STAMPS = """
INSERT INTO log_stamps SELECT stamp.*, %s::bigint
FROM unnest(%s::bigint[], %s::text[], %s::bigint[], %s::bigint[], %s::int[]) AS stamp
"""
_FORGET_STAMPS = """
DELETE FROM log_stamps s USING unnest(%s::bigint[], %s::text[], %s::bigint[]) AS old (partition, producer, sequence)
WHERE s.partition = old.partition AND s.producer = old.producer AND s.sequence <= old.sequence
"""
_PUT_FENCES = """
UPDATE log_fences f SET epoch = new.epoch FROM unnest(%s::text[], %s::bigint[]) AS new (name, epoch)
WHERE f.name = new.name
"""
_UNSEAL = """
UPDATE log_topics SET sealed = false, sealed_by = NULL, sealed_since = 0, sealed_until = 0 WHERE name = %s
"""
_NOTIFY = """
SELECT set_config('synchronous_commit', 'off', true), pg_notify(%s, payload) FROM unnest(%s::text[]) AS payload
"""


class PostgresqlLookup:
    """What the appends of a group depend on, locked until the transaction ends."""

    def __init__(self, connection: Connection, pipeline: psycopg.Pipeline, group: Sequence[Append]) -> None:
        """One round trip. The pipeline stays open: leaving it sends the server a message after which it would no longer
        end the transaction of a process that was stopped (`idle_in_transaction_session_timeout`)."""
        group = [append for append in group if _may_exist(append.partition)]
        places = {(append.partition.topic, number_of(append.partition)) for append in group}
        fences = sorted({fence.name for append in group for fence in append.fences})
        stamps = [
            (append.partition.topic, append.partition.index, append.stamp.producer, append.stamp.sequence)
            for append in group
            if append.stamp is not None and (append.partition.topic, append.partition.index) in places
        ]
        no_rows: list[tuple[Any, ...]] = []
        connection.execute("BEGIN")
        partitions = connection.execute(_LOCK_PARTITIONS, _columns(places, 2), binary=True)
        topics = connection.execute(_TOPICS, [list({topic for topic, _ in places})], binary=True)
        if fences:
            connection.execute(_ADD_FENCES, [fences])
        epochs = connection.execute(_LOCK_FENCES, [fences], binary=True) if fences else no_rows
        known = connection.execute(_STAMPS, _columns(stamps, 4), binary=True) if stamps else no_rows
        pipeline.sync()
        self._partitions = {(topic, number): rest for topic, number, *rest in partitions}
        self._topics: dict[str, Sequence[Any]] = {}
        self.now = 0
        """The database's time in milliseconds."""
        for now, name, *rest in topics:
            self.now = now
            self._topics[name] = rest
        self.missing = [
            Partition(topic, number)
            for topic, number in places - self._partitions.keys()
            if topic in self._topics and 0 <= number < self._topics[topic][0]
        ]
        """Partitions of existing topics that were not found. Their topics were deleted and created again meanwhile, or
        the tables are damaged if it stays so."""
        self._fences: dict[str, int] = dict(epochs)
        self._stamps: dict[tuple[int, Stamp], tuple[int, int]] = {}
        self._last: dict[tuple[int, str], int | None] = {}
        for partition_id, producer, sequence, first, count, last in known:
            self._last[partition_id, producer] = last
            if first is not None:
                self._stamps[partition_id, Stamp(producer, sequence)] = (first, count)

    def partition(self, partition: Partition) -> PartitionState:
        topic = self._topics.get(partition.topic)
        if topic is None:
            raise UnknownTopic(partition.topic)
        partitions, epoch, *rest = topic
        if not 0 <= partition.index < partitions:
            raise PartitionOutOfRange(partition, partitions)
        row = self._partitions.get((partition.topic, partition.index))
        if row is None:
            raise Damaged(str(partition), "the row of the partition is missing")
        partition_id, first, end = row
        return PartitionState(partition_id, epoch, first, end, *rest)

    def fence(self, name: str) -> int | None:
        epoch = self._fences[name]
        return None if epoch < 0 else epoch

    def stamp(self, partition_id: int, stamp: Stamp) -> tuple[int, int] | None:
        return self._stamps.get((partition_id, stamp))

    def last_sequence(self, partition_id: int, producer: str) -> int | None:
        return self._last[partition_id, producer]


def put(connection: Connection, leave_pipeline: ExitStack, changes: Changes, now: int) -> None:
    """Store the changes, commit, and tell those who wait for records, in the round trip that leaves the pipeline. The
    notification is a transaction of its own: in the same one, PostgreSQL would let commits of all processes sync to
    disk one after the other."""
    commit = connection.cursor()
    try:
        with leave_pipeline:
            _store(connection, changes, now)
            commit.execute("COMMIT")
            if changes.ends:
                connection.execute(_NOTIFY, [CHANNEL, _payloads(changes.ends)])
    except psycopg.Error as error:
        if commit.statusmessage != "COMMIT":
            raise
        _log.warning("waiting readers were not notified, and will look by themselves: %s", error)


def _store(connection: Connection, changes: Changes, now: int) -> None:
    if changes.batches:
        connection.cursor().executemany(PUT_BATCH, [batch_row(*batch) for batch in changes.batches])
    if changes.ends:
        connection.execute(_PUT_ENDS, [list(changes.ends), list(changes.ends.values())])
    if changes.stamps:
        stamps = [(s.partition_id, s.producer, s.sequence, s.first, s.count) for s in changes.stamps]
        connection.execute(_PUT_STAMPS, [now, *_columns(stamps, 5)])
        if old := list(changes.forgotten_stamps()):
            connection.execute(_FORGET_STAMPS, _columns(old, 3))
    if changes.fences:
        connection.execute(_PUT_FENCES, [list(changes.fences), list(changes.fences.values())])
    for name in sorted(changes.unsealed):
        connection.execute(_UNSEAL, [name])


def batch_row(partition_id: int, batch: StoredBatch) -> tuple[object, ...]:
    """The parameters of `PUT_BATCH`."""
    data = memoryview(batch.data)
    return (partition_id, batch.first, batch.count, batch.latest, len(data), batch.checksum, data)


def _payloads(ends: dict[int, int]) -> list[str]:
    pairs = [f"{partition_id}:{end}" for partition_id, end in ends.items()]
    return [",".join(pairs[i : i + PAYLOAD_PARTITIONS]) for i in range(0, len(pairs), PAYLOAD_PARTITIONS)]


def _columns(rows: Any, count: int) -> list[list[Any]]:
    return [list(column) for column in zip(*rows, strict=True)] or [[] for _ in range(count)]


def _may_exist(partition: Partition) -> bool:
    """Whether a query can name its topic. What is not a partition at all is refused later."""
    try:
        rules.check_partition(partition)
    except ValueError:
        return False
    return may_be_topic(partition.topic)
