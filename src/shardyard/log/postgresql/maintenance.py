"""Keeping the log small: retention, deletion of trimmed batches, merging of small ones, forgetting of old stamps.

Each step is a small transaction that returns whether there is more to do, so that appends never wait long for it.
PostgreSQL frees the space by itself (autovacuum).
"""

import logging
from collections.abc import Callable

from shardyard.log import merging
from shardyard.log.postgresql.appends import PUT_BATCH, batch_row
from shardyard.log.postgresql.catalog import NOW
from shardyard.log.stored_batches import decode, encode
from shardyard.model import Damaged
from shardyard.runtime.postgresql import Connection

_log = logging.getLogger(__name__)

Step = Callable[[Connection, int | None], bool]
"""Gets the time in milliseconds, or None for the database's. Returns whether there is more to do."""

CLEAR_BATCHES = 256
"""Batches deleted in one step."""
FORGET_FROM = 100_000
"""The number of stamps from which on old ones are forgotten."""
STAMP_MS = 7 * 24 * 3600 * 1000
"""How long a producer's stamps are remembered after its last append."""
FORGET_EVERY = 1000
"""How many times maintenance runs before it looks for old stamps again, which takes a while if there are many."""
_LOCK = int.from_bytes(b"yard-log", "big")
"""The advisory lock of a transaction that maintains the log."""

# The first offset to keep: of the first batch that is young enough, and of the batches that are within the size; whole
# batches, and always the newest one.
_RETAIN = f"""
SELECT p.id, greatest(p.first, CASE WHEN t.age_ms > 0 THEN coalesce(young.first, p."end") END, large.keep)
FROM log_topics t JOIN log_partitions p ON p.topic = t.name AND p.number < t.partitions
LEFT JOIN LATERAL (
    SELECT b.first FROM log_batches b
    WHERE t.age_ms > 0 AND b.partition = p.id AND b.first + b.count > p.first
      AND b.first >=
          coalesce((SELECT max(s.first) FROM log_batches s WHERE s.partition = p.id AND s.first <= p.first), 0)
      AND b.latest >= coalesce(%s::bigint, {NOW}) - t.age_ms
    ORDER BY b.first LIMIT 1
) young ON true
LEFT JOIN LATERAL (
    SELECT CASE WHEN newest THEN first ELSE first + count END AS keep
    FROM (
        SELECT b.first, b.count, row_number() OVER newest_first = 1 AS newest, sum(b.bytes) OVER newest_first AS total
        FROM log_batches b
        WHERE t.bytes_per_partition > 0 AND b.partition = p.id AND b.first + b.count > p.first
        WINDOW newest_first AS (ORDER BY b.first DESC ROWS UNBOUNDED PRECEDING)
    ) sizes
    WHERE total > t.bytes_per_partition ORDER BY first DESC LIMIT 1
) large ON true
WHERE t.age_ms > 0 OR t.bytes_per_partition > 0
ORDER BY p.id
"""  # noqa: S608 names of ours
_CLEAR = """
DELETE FROM log_batches WHERE (partition, first) IN (
    SELECT dead.partition, dead.first
    FROM log_partitions p CROSS JOIN LATERAL (
        SELECT b.partition, b.first FROM log_batches b
        WHERE b.partition = p.id AND b.first < p.first AND b.first + b.count <= p.first ORDER BY b.first LIMIT %s
    ) dead
    WHERE p.first > 0 LIMIT %s
)
"""
_CLEAR_PARTITIONS = """
WITH gone AS (
    DELETE FROM log_partitions p
    WHERE p.topic IS NULL AND NOT EXISTS (SELECT FROM log_batches b WHERE b.partition = p.id) RETURNING p.id
)
DELETE FROM log_stamps s USING gone WHERE s.partition = gone.id
"""
_FORGET = f"""
DELETE FROM log_stamps WHERE (partition, producer) IN (
    SELECT partition, producer FROM log_stamps GROUP BY partition, producer
    HAVING max(at) < coalesce(%s::bigint, {NOW}) - %s
)
"""  # noqa: S608 names of ours
_SET_MERGED = "UPDATE log_partitions SET merged = greatest(merged, %s) WHERE id = %s"
_UNMERGED = 'SELECT id, merged, "end" FROM log_partitions WHERE merged < "end"'
_SIZES = """
SELECT first, first, count, bytes FROM log_batches WHERE partition = %s AND first >= %s AND first < %s
ORDER BY first LIMIT %s
"""


def is_alone(connection: Connection) -> bool:
    """Whether no other process maintains the log at this moment, nor will before the transaction ends."""
    return connection.execute("SELECT pg_try_advisory_xact_lock(%s)", (_LOCK,)).fetchone() == (True,)


class Maintenance:
    """The steps, and what they remember to find out cheaply that there is nothing to do."""

    def __init__(self) -> None:
        self._examined: dict[int, int] = {}
        """The ends at which partitions had nothing to merge, by id."""
        self._until_forget = 0

    def steps(self) -> dict[str, Step]:
        """The steps by name, in their order."""
        return {"retain": retain, "forget": self._forget, "clear": clear, "merge": self._merger()}

    def _forget(self, connection: Connection, now: int | None) -> bool:
        """Forget producers whose last append is long ago, once there are enough stamps for it to matter."""
        self._until_forget -= 1
        if self._until_forget < 0:
            self._until_forget = FORGET_EVERY
            some = "SELECT count(*) FROM (SELECT FROM log_stamps LIMIT %s) AS counted"
            ((stamps,),) = connection.execute(some, (FORGET_FROM,)).fetchall()
            if stamps >= FORGET_FROM:
                connection.execute(_FORGET, (now, STAMP_MS))
        return False

    def _merger(self) -> Step:
        """Merges what is there when it starts. What producers append meanwhile waits for the next time, or it would
        never finish."""
        left: list[tuple[int, int, int]] | None = None

        def step(connection: Connection, _: int | None) -> bool:
            nonlocal left
            if left is None:
                rows = connection.execute(_UNMERGED).fetchall()
                left = [(id_, merged, end) for id_, merged, end in rows if self._examined.get(id_) != end]
                self._examined = {id_: end for id_, _, end in rows}
            while left:
                partition, merged_to, end = left.pop()
                done = merge(connection, partition, merged_to, end)
                if done is not None:
                    left.append((partition, done, end))
                    return True
            return False

        return step


def retain(connection: Connection, now: int | None) -> bool:
    """Trim what is too old or too large. Rows are locked in the same order as everywhere."""
    for partition, keep in connection.execute(_RETAIN, (now,)).fetchall():
        connection.execute(
            "UPDATE log_partitions SET first = %s WHERE id = %s AND topic IS NOT NULL AND first < %s",
            (keep, partition, keep),
        )
    return False


def clear(connection: Connection, _: int | None) -> bool:
    """Delete batches below the first offset, and what is left of deleted topics."""
    if connection.execute(_CLEAR, (CLEAR_BATCHES, CLEAR_BATCHES)).rowcount:
        return True
    connection.execute(_CLEAR_PARTITIONS)
    return False


def merge(connection: Connection, partition: int, merged_to: int, end: int) -> int | None:
    """Merge one run of small neighbours from `merged_to` on, below `end`, into one batch. Returns from where on there
    may be more; None if there is no more."""
    found = connection.execute(_SIZES, (partition, merged_to, end, merging.MERGE_BATCHES + 1)).fetchall()
    run = merging.next_run([merging.StoredSize(*row) for row in found])
    more = run.is_due or (run.done > merged_to and len(found) > merging.MERGE_BATCHES)
    if run.is_due:
        try:
            _merge_run(connection, partition, run.ids)
        except Damaged as error:  # it is left for inspection, and must not block the others
            _log.warning("merging will be retried: %s", error)
            return None
    if run.done > merged_to:  # last, because appends to this partition wait from here on
        connection.execute(_SET_MERGED, (run.done, partition))
    return max(run.done, merged_to) if more else None


def _merge_run(connection: Connection, partition: int, firsts: list[int]) -> None:
    """If the commit is lost in a crash, the small batches are still there, so it need not be synced."""
    where = f"partition {partition}"
    rows = connection.execute(
        "SELECT first, count, checksum, data FROM log_batches WHERE partition = %s AND first = ANY(%s::bigint[])"
        " ORDER BY first",
        (partition, firsts),
        binary=True,
    )
    parts = [decode(data, checksum, partition, first, count, where) for first, count, checksum, data in rows]
    batch = encode(partition, parts[0].first, merging.merged(parts, where))
    connection.execute("SET LOCAL synchronous_commit = off")
    connection.execute(
        "DELETE FROM log_batches WHERE partition = %s AND first = ANY(%s::bigint[])", (partition, firsts)
    )
    connection.execute(PUT_BATCH, batch_row(partition, batch))
