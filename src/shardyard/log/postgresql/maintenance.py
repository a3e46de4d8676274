"""Keeping the log small: retention, deletion of trimmed batches, merging of small ones, forgetting of old stamps.

Each step is a small transaction, so that appends never wait long for it, nor does it take too long for the database.
PostgreSQL frees the space by itself (autovacuum).
"""

import logging

from shardyard.log import merging
from shardyard.log.database import CLEAR_BATCHES, FORGET_EVERY, FORGET_FROM, STAMP_MS
from shardyard.log.postgresql import retention
from shardyard.log.postgresql.appends import PUT_BATCH, batch_row
from shardyard.log.postgresql.catalog import NOW
from shardyard.log.postgresql.steps import Committed, Step
from shardyard.log.stored_batches import encode, join
from shardyard.model import Damaged
from shardyard.runtime.postgresql import Connection

_log = logging.getLogger(__name__)

STAMPS_A_STEP = 10_000
"""Stamps examined or deleted in one step; more than one producer has."""
PARTITIONS_A_STEP = 200
"""Partitions examined or deleted in one step."""
_BEFORE_ALL = (0, "")
"""A partition and a producer that come before all others."""
_LOCK = int.from_bytes(b"yard-log", "big")
"""The advisory lock of a transaction that maintains the log."""

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
_CLEAR_STAMPS = """
DELETE FROM log_stamps WHERE (partition, producer, sequence) IN (
    SELECT s.partition, s.producer, s.sequence FROM log_partitions p JOIN log_stamps s ON s.partition = p.id
    WHERE p.topic IS NULL LIMIT %s
)
"""
_CLEAR_PARTITIONS = """
DELETE FROM log_partitions WHERE id IN (
    SELECT p.id FROM log_partitions p
    WHERE p.topic IS NULL AND NOT EXISTS (SELECT FROM log_batches b WHERE b.partition = p.id)
      AND NOT EXISTS (SELECT FROM log_stamps s WHERE s.partition = p.id)
    LIMIT %s
)
"""
_PRODUCERS = f"""
SELECT partition, producer, max(at) < coalesce(%s::bigint, {NOW}) - %s, count(*)
FROM (
    SELECT partition, producer, at FROM log_stamps
    WHERE (partition, producer) > (%s, %s) ORDER BY partition, producer, sequence LIMIT %s
) AS next_stamps
GROUP BY partition, producer ORDER BY partition, producer
"""  # noqa: S608 names of ours
_FORGET = """
DELETE FROM log_stamps s USING unnest(%s::bigint[], %s::text[]) AS old (partition, producer)
WHERE s.partition = old.partition AND s.producer = old.producer
"""
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
        self._sizes = retention.SizeRetention()
        self._examined: dict[int, int] = {}
        """The ends at which partitions had nothing to merge, by id."""
        self._until_forget = 0

    def steps(self) -> dict[str, Step]:
        """The steps by name, in their order."""
        return {
            "retain by age": retention.by_age(),
            "retain by size": self._sizes.step(),
            "forget": self._forgetter(),
            "clear": clear,
            "merge": self._merger(),
        }

    def _forgetter(self) -> Step:
        """Forgets producers whose last append is long ago, once there are enough stamps for it to matter."""
        after = _BEFORE_ALL

        def step(connection: Connection, now: int | None) -> Committed:
            last = None
            if self._until_forget <= 0 and (after != _BEFORE_ALL or _has_many_stamps(connection)):
                last = _forget_some(connection, now, after)

            def committed() -> bool:
                nonlocal after
                if last is None:
                    self._until_forget = self._until_forget - 1 if self._until_forget > 0 else FORGET_EVERY
                    return False
                after = last
                return True

            return committed

        return step

    def _merger(self) -> Step:
        """Merges what is there when it starts. What producers append meanwhile waits for the next time, or it would
        never finish."""
        left: list[tuple[int, int, int]] | None = None

        def step(connection: Connection, _: int | None) -> Committed:
            listed = connection.execute(_UNMERGED).fetchall() if left is None else []
            todo = [row for row in listed if self._examined.get(row[0]) != row[2]] if left is None else left.copy()
            examined: dict[int, int] = {}
            while todo and len(examined) < PARTITIONS_A_STEP:
                partition, merged_to, end = todo.pop()
                done = merge(connection, partition, merged_to, end)
                if done is not None:
                    todo.append((partition, done, end))
                    break
                examined[partition] = end

            def committed() -> bool:
                nonlocal left
                if left is None:
                    self._examined = {id_: end for id_, _, end in listed if self._examined.get(id_) == end}
                self._examined |= examined
                left = todo
                return bool(left)

            return committed

        return step


def _has_many_stamps(connection: Connection) -> bool:
    some = "SELECT count(*) FROM (SELECT FROM log_stamps LIMIT %s) AS counted"
    ((stamps,),) = connection.execute(some, (FORGET_FROM,)).fetchall()
    return bool(stamps >= FORGET_FROM)


def _forget_some(connection: Connection, now: int | None, after: tuple[int, str]) -> tuple[int, str] | None:
    """Forget producers among those that follow `after`. Returns the last that was examined; None if it was the last of
    all."""
    producers = connection.execute(_PRODUCERS, (now, STAMP_MS, *after, STAMPS_A_STEP)).fetchall()
    is_all = sum(stamps for *_, stamps in producers) < STAMPS_A_STEP
    if not is_all:
        producers.pop()  # some of its stamps may not have been examined
    old = [(partition, producer) for partition, producer, is_old, _ in producers if is_old]
    connection.execute(_FORGET, ([partition for partition, _ in old], [producer for _, producer in old]))
    return None if is_all else producers[-1][:2]


def clear(connection: Connection, _: int | None) -> Committed:
    """Delete batches below the first offset, and what is left of deleted topics."""
    is_more = (
        connection.execute(_CLEAR, (CLEAR_BATCHES, CLEAR_BATCHES)).rowcount > 0
        or connection.execute(_CLEAR_STAMPS, (STAMPS_A_STEP,)).rowcount > 0
        or connection.execute(_CLEAR_PARTITIONS, (PARTITIONS_A_STEP,)).rowcount > 0
    )
    return lambda: is_more


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
    rows = connection.execute(
        "SELECT first, count, checksum, data FROM log_batches WHERE partition = %s AND first = ANY(%s::bigint[])"
        " ORDER BY first",
        (partition, firsts),
        binary=True,
    ).fetchall()
    batch = encode(partition, rows[0][0], join(rows, partition, f"partition {partition}"))
    connection.execute("SET LOCAL synchronous_commit = off")
    connection.execute(
        "DELETE FROM log_batches WHERE partition = %s AND first = ANY(%s::bigint[])", (partition, firsts)
    )
    connection.execute(PUT_BATCH, batch_row(partition, batch))
