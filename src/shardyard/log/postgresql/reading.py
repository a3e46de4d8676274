"""Reading from partitions: statements that change nothing, each of which sees one state of the log."""

from typing import Any, NamedTuple

from shardyard.log import rules
from shardyard.log.batch_cache import BatchCache
from shardyard.log.postgresql.catalog import may_be_topic, number_of
from shardyard.log.stored_batches import LoadedBatch, Read, decode, first_since
from shardyard.model import Fence, Partition, PartitionOutOfRange, ShardyardError, Span, UnknownTopic
from shardyard.model.batch import Batch
from shardyard.runtime.postgresql import Connection

FETCH_BATCHES = 128
"""The most stored batches that one statement returns."""

_PLACE = """
SELECT t.partitions, p.id, t.epoch, p.first, p."end",
    (SELECT f.epoch FROM log_fences f WHERE f.name = %(fence)s) AS fence
FROM log_topics t LEFT JOIN log_partitions p ON p.topic = t.name AND p.number = %(number)s AND p.number < t.partitions
WHERE t.name = %(topic)s
"""
_FROM_OFFSET = """
partition = place.id AND first + count > %(offset)s AND first >=
    coalesce((SELECT max(s.first) FROM log_batches s WHERE s.partition = place.id AND s.first <= %(offset)s), 0)
"""
_READ = f"""
WITH place AS ({_PLACE})
SELECT place.*, b.first, b.count, b.checksum, b.data
FROM place LEFT JOIN LATERAL (
    SELECT *, sum(wanted) OVER before AS records_before, sum(bytes * wanted / count) OVER before AS bytes_before
    FROM (
        SELECT first, count, bytes, checksum, data, first + count - greatest(first, %(offset)s) AS wanted
        FROM log_batches WHERE {_FROM_OFFSET} ORDER BY first LIMIT %(batches)s
    ) from_offset
    WINDOW before AS (ORDER BY first ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)
) b ON coalesce(b.records_before < %(records)s AND b.bytes_before < %(bytes)s, true)
ORDER BY b.first
"""  # noqa: S608 names of ours
_FIND_TIME = f"""
WITH place AS ({_PLACE})
SELECT place.*, b.first, b.count, b.checksum, b.data
FROM place LEFT JOIN LATERAL (
    SELECT first, count, checksum, data FROM log_batches
    WHERE {_FROM_OFFSET} AND first + count > place.first AND latest >= %(timestamp)s ORDER BY first LIMIT 1
) b ON true
"""  # noqa: S608 names of ours
_HIGHEST = 2**63 - 1


class Place(NamedTuple):
    """Where a partition is stored, and what it holds."""

    id: int
    span: Span


def find(connection: Connection, partition: Partition, fence: Fence | None = None) -> Place:
    return _fetch(connection, _PLACE, partition, fence)[0]


def read(
    connection: Connection,
    cache: BatchCache,
    partition: Partition,
    offset: int,
    epoch: int | None,
    max_records: int,
    max_bytes: int,
    fence: Fence | None,
) -> tuple[Place, Batch]:
    """A read that takes many small batches is several statements. What changes meanwhile ends it early at most."""
    if cache.covers(partition, offset, max_records, max_bytes):
        place = find(connection, partition, fence)
        rules.check_offset(partition, place.span, offset, epoch)
        if (cached := cache.find(partition, place.span.epoch, offset)) is not None:
            wanted = Read(partition, place.span, offset, max_records, max_bytes)
            wanted.add(cached)
            return place, wanted.result()
    limits = {"records": min(max_records, _HIGHEST), "bytes": min(max_bytes, _HIGHEST), "batches": FETCH_BATCHES}
    place, rows = _fetch(connection, _READ, partition, fence, offset=min(offset, _HIGHEST), **limits)
    rules.check_offset(partition, place.span, offset, epoch)
    wanted = Read(partition, place.span, offset, max_records, max_bytes)
    while _add(wanted, rows, place, cache) and len(rows) == FETCH_BATCHES:
        try:
            now, rows = _fetch(connection, _READ, partition, fence, offset=wanted.end, **limits)
        except ShardyardError:
            break
        if now.id != place.id or now.span.first > wanted.end:
            break
    return place, wanted.result()


def _add(wanted: Read, rows: list[tuple[Any, ...]], place: Place, cache: BatchCache) -> bool:
    """Add batches to a read. Returns whether more fits."""
    for row in rows:
        batch = _load(row, place, wanted.partition)
        if not wanted.add(batch):
            if wanted.end < batch.end:  # the next read will continue in this batch
                cache.add(wanted.partition, place.span.epoch, batch)
            return False
    return True


def offset_at(connection: Connection, partition: Partition, timestamp: int) -> int:
    """A batch that was trimmed in its middle may have its late records below the first offset: then a later one has
    what is looked for."""
    offset = 0
    while True:
        place, rows = _fetch(connection, _FIND_TIME, partition, None, offset=offset, timestamp=timestamp)
        if not rows:
            return place.span.end
        loaded = _load(rows[0], place, partition)
        if (reached := first_since(loaded, timestamp, place.span.first)) is not None:
            return reached
        offset = loaded.end


def spans(connection: Connection, topic: str, *, dropped: bool) -> dict[int, Span]:
    """The spans of all partitions of a topic, with those that were dropped if `dropped`."""
    if not may_be_topic(topic):
        raise UnknownTopic(topic)
    rows = connection.execute(
        'SELECT p.number, t.epoch, p.first, p."end" FROM log_partitions p'
        " JOIN log_topics t ON t.name = p.topic AND (p.number < t.partitions OR %s) WHERE t.name = %s"
        " ORDER BY p.number",
        (dropped, topic),
        binary=True,
    ).fetchall()
    if not rows:
        raise UnknownTopic(topic)
    return {number: Span(*span) for number, *span in rows}


def ends(connection: Connection, partition_ids: list[int]) -> dict[int, int]:
    """The ends of those partitions that still exist."""
    rows = connection.execute(
        'SELECT p.id, p."end" FROM log_partitions p JOIN log_topics t ON t.name = p.topic AND p.number < t.partitions'
        " WHERE p.id = ANY(%s::bigint[])",
        (partition_ids,),
    )
    return dict(rows.fetchall())


def _fetch(
    connection: Connection, query: Any, partition: Partition, fence: Fence | None, **parameters: int
) -> tuple[Place, list[tuple[Any, ...]]]:
    """The partition's place, and the batches that were found: first offset, count, checksum, data."""
    rules.check_partition(partition)
    number = number_of(partition)
    if not may_be_topic(partition.topic):
        raise UnknownTopic(partition.topic)
    named = {"topic": partition.topic, "number": number, "fence": fence and fence.name}
    rows = connection.execute(query, named | parameters, binary=True).fetchall()
    if not rows:
        raise UnknownTopic(partition.topic)
    partitions, partition_id, epoch, first, end, known = rows[0][:6]
    if fence is not None:
        rules.check_fence(fence, known)
    if partition_id is None:
        raise PartitionOutOfRange(partition, partitions)
    batches = [row[6:] for row in rows if len(row) > 6 and row[6] is not None]
    return Place(partition_id, Span(epoch, first, end)), batches


def _load(row: tuple[Any, ...], place: Place, partition: Partition) -> LoadedBatch:
    first, count, checksum, data = row
    return decode(data, checksum, place.id, first, count, str(partition))
