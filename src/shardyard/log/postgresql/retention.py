"""Retention: trimming what is too old or too large, some partitions and some batches in each step."""

from dataclasses import dataclass, replace
from typing import Any

from shardyard.log.postgresql.catalog import NOW
from shardyard.log.postgresql.steps import Committed, Step
from shardyard.runtime.postgresql import Connection

PARTITIONS_A_STEP = 50
"""Partitions examined in one step."""
BATCHES_A_STEP = 5000
"""Batches of a partition examined in one step."""

_WITH_AGE = """
SELECT p.id FROM log_topics t JOIN log_partitions p ON p.topic = t.name AND p.number < t.partitions
WHERE t.age_ms > 0 ORDER BY p.id
"""
# For each partition the first offset to keep: of its first batch that is young enough, or the end of those that were
# examined if none is. In the second case there may be more that is too old.
_FIRST_YOUNG = f"""
SELECT p.id, p.first, p."end", young.first IS NOT NULL, coalesce(young.first, examined."end", p."end")
FROM log_partitions p JOIN log_topics t ON t.name = p.topic AND p.number < t.partitions
CROSS JOIN LATERAL (
    SELECT coalesce(max(s.first), 0) AS first FROM log_batches s WHERE s.partition = p.id AND s.first <= p.first
) start
LEFT JOIN LATERAL (
    SELECT oldest.first FROM (
        SELECT b.first, b.latest FROM log_batches b
        WHERE b.partition = p.id AND b.first >= start.first AND b.first + b.count > p.first
        ORDER BY b.first LIMIT %(batches)s
    ) oldest
    WHERE oldest.latest >= coalesce(%(now)s::bigint, {NOW}) - t.age_ms ORDER BY oldest.first LIMIT 1
) young ON true
LEFT JOIN LATERAL (
    SELECT max(oldest."end") AS "end" FROM (
        SELECT b.first + b.count AS "end" FROM log_batches b
        WHERE young.first IS NULL AND b.partition = p.id AND b.first >= start.first AND b.first + b.count > p.first
        ORDER BY b.first LIMIT %(batches)s
    ) oldest
) examined ON true
WHERE t.age_ms > 0 AND p.id = ANY(%(ids)s::bigint[])
"""  # noqa: S608 names of ours
_WITH_SIZE = """
SELECT p.id, p.first, p."end", t.bytes_per_partition
FROM log_topics t JOIN log_partitions p ON p.topic = t.name AND p.number < t.partitions
WHERE t.bytes_per_partition > 0 ORDER BY p.id
"""
_ADDED = "SELECT coalesce(sum(bytes), 0)::bigint FROM log_batches WHERE partition = %s AND first >= %s AND first < %s"
# Batches from the newest one on: the first with which the partition is too large, or else the last that was examined.
# Totals rise from batch to batch, so in both cases it is the one whose total is nearest to the limit.
_WALK = """
SELECT first, count, total, examined FROM (
    SELECT first, count, %(total)s + sum(bytes) OVER newest_first AS total, row_number() OVER newest_first AS examined
    FROM (
        SELECT first, count, bytes FROM log_batches
        WHERE partition = %(id)s AND first < %(before)s AND first + count <= %(before)s AND first + count > %(first)s
        ORDER BY first DESC LIMIT %(batches)s
    ) newest
    WINDOW newest_first AS (ORDER BY first DESC ROWS UNBOUNDED PRECEDING)
) walked
ORDER BY total > %(limit)s DESC, abs(total - %(limit)s) LIMIT 1
"""


def by_age() -> Step:
    """Trims what is too old."""
    left: list[int] | None = None

    def step(connection: Connection, now: int | None) -> Committed:
        ids = left if left is not None else [row[0] for row in connection.execute(_WITH_AGE).fetchall()]
        some, rest = ids[:PARTITIONS_A_STEP], ids[PARTITIONS_A_STEP:]
        parameters = {"batches": BATCHES_A_STEP, "now": now, "ids": some}
        found = connection.execute(_FIRST_YOUNG, parameters).fetchall() if some else []
        unfinished = []
        for partition, first, end, is_young, keep in sorted(found):  # locked in the same order as everywhere
            _trim(connection, partition, keep)
            if not is_young and first < keep < end:
                unfinished.append(partition)

        def committed() -> bool:
            nonlocal left
            left = unfinished + rest
            return bool(left)

        return committed

    return step


@dataclass(frozen=True, slots=True)
class _Walk:
    """A partition whose size is added up from its newest batch on."""

    partition: int
    first: int
    end: int
    limit: int
    before: int
    """Batches from this offset on are in `total`."""
    total: int = 0


@dataclass(frozen=True, slots=True)
class _Size:
    """What a partition held at most when it was examined."""

    end: int
    limit: int
    total: int


class SizeRetention:
    """Trims what is too large, and remembers sizes, so that only partitions that have outgrown their limit since are
    added up again. Whole batches are trimmed, and the newest one never."""

    def __init__(self) -> None:
        self._sizes: dict[int, _Size] = {}
        """By partition id."""

    def step(self) -> Step:
        left: list[_Walk] | None = None

        def step(connection: Connection, _: int | None) -> Committed:
            listed = connection.execute(_WITH_SIZE).fetchall() if left is None else []
            walks = self._changed(listed) if left is None else left
            some, rest = walks[:PARTITIONS_A_STEP], walks[PARTITIONS_A_STEP:]
            unfinished: list[_Walk] = []
            sizes: dict[int, _Size] = {}
            for at, walk in enumerate(some):
                result = self._examine(connection, walk)
                if isinstance(result, _Walk):
                    unfinished = [result, *some[at + 1 :]]
                    break
                sizes[walk.partition] = result

            def committed() -> bool:
                nonlocal left
                if left is None:
                    self._sizes = {row[0]: self._sizes[row[0]] for row in listed if row[0] in self._sizes}
                self._sizes |= sizes
                left = unfinished + rest
                return bool(left)

            return committed

        return step

    def _changed(self, listed: list[Any]) -> list[_Walk]:
        """The partitions that were appended to, or got another limit, since they were last examined."""
        walks = []
        for partition, first, end, limit in listed:
            known = self._sizes.get(partition)
            if known is None or (known.end, known.limit) != (end, limit):
                walks.append(_Walk(partition, first, end, limit, before=end))
        return walks

    def _examine(self, connection: Connection, walk: _Walk) -> _Size | _Walk:
        """Returns the walk to continue with, if the size is not known yet."""
        known = self._sizes.get(walk.partition)
        if known is not None and known.limit == walk.limit and known.end <= walk.end and walk.before == walk.end:
            ((added,),) = connection.execute(_ADDED, (walk.partition, known.end, walk.end)).fetchall()
            if known.total + added <= walk.limit:
                return _Size(walk.end, walk.limit, known.total + added)
        return self._walk(connection, walk)

    def _walk(self, connection: Connection, walk: _Walk) -> _Size | _Walk:
        """Add up some more batches, and trim the partition if it is too large."""
        parameters = {
            "id": walk.partition,
            "first": walk.first,
            "before": walk.before,
            "limit": walk.limit,
            "total": walk.total,
            "batches": BATCHES_A_STEP,
        }
        found = connection.execute(_WALK, parameters).fetchone()
        if found is None:
            return _Size(walk.end, walk.limit, walk.total)
        first, count, total, examined = found
        if total <= walk.limit:
            is_more = examined == BATCHES_A_STEP
            return replace(walk, before=first, total=total) if is_more else _Size(walk.end, walk.limit, total)
        is_newest = walk.before == walk.end and examined == 1
        _trim(connection, walk.partition, first if is_newest else first + count)
        return _Size(walk.end, walk.limit, walk.limit)


def _trim(connection: Connection, partition: int, keep: int) -> None:
    connection.execute(
        "UPDATE log_partitions SET first = %s WHERE id = %s AND topic IS NOT NULL AND first < %s",
        (keep, partition, keep),
    )
