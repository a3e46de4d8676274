"""Keeping the embedded log small: retention, deletion of trimmed batches, merging of small ones, freeing of space.

Each step is a function on the writer's connection that does a little and returns whether there is more to do, so that
appends never wait long behind it.
"""

import logging
import sqlite3
from collections.abc import Callable

from shardyard.log import merging
from shardyard.log.appending import PartitionState
from shardyard.log.database import CLEAR_BATCHES, FORGET_FROM, STAMP_MS
from shardyard.log.sqlite import store
from shardyard.log.stored_batches import LoadedBatch, decode, encode
from shardyard.model import Damaged, Partition, PartitionOutOfRange, Retention, UnknownTopic

_log = logging.getLogger(__name__)

Step = Callable[[sqlite3.Connection, int], bool]
"""Gets the time in milliseconds. Returns whether there is more to do."""

VACUUM_PAGES = 512
"""The number of free pages from which on the file is shrunk, and by which it is in one step."""
PARTITIONS_A_STEP = 200
"""Partitions examined in one step."""


def steps() -> dict[str, Step]:
    """The steps by name, in their order."""
    return {
        "retain": retention(),
        "forget": forget_stamps,
        "clear": clearing(),
        "merge": merger(),
        "free": free_space,
    }


def retention() -> Step:
    """Trims what is too old or too large, some partitions in each step."""
    left: list[tuple[Partition, Retention]] | None = None

    def step(db: sqlite3.Connection, now: int) -> bool:
        nonlocal left
        if left is None:
            retained = db.execute(
                "SELECT name, partitions, age_ms, bytes_per_partition FROM topics"
                " WHERE age_ms IS NOT NULL OR bytes_per_partition IS NOT NULL"
            )
            left = [(Partition(name, i), Retention(*wanted)) for name, count, *wanted in retained for i in range(count)]
        for _ in range(min(PARTITIONS_A_STEP, len(left))):
            partition, wanted = left.pop()
            try:
                _apply_retention(db, now, partition, wanted)
            except (UnknownTopic, PartitionOutOfRange, Damaged) as error:  # gone since, or must not block the others
                _log.warning("retention of %s will be retried: %s", partition, error)
        return bool(left)

    return step


def _apply_retention(db: sqlite3.Connection, now: int, partition: Partition, wanted: Retention) -> None:
    found = store.find(db, partition)
    keep = found.first
    if wanted.age_ms:
        keep = max(keep, _first_young(db, found, now - wanted.age_ms))
    if wanted.bytes_per_partition:
        keep = max(keep, _first_within(db, found, wanted.bytes_per_partition))
    store.trim(db, partition, keep)


def _first_young(db: sqlite3.Connection, found: PartitionState, since: int) -> int:
    row = db.execute(
        "SELECT first FROM batches WHERE partition = ? AND first + count > ? AND latest >= ? ORDER BY first LIMIT 1",
        (found.id, found.first, since),
    ).fetchone()
    return int(row[0]) if row else found.end


def _first_within(db: sqlite3.Connection, found: PartitionState, size: int) -> int:
    """Keeps whole batches, and always the newest one, so a partition may be smaller than its limit by up to a batch."""
    keep, total = found.end, 0
    for first, stored in db.execute(
        "SELECT first, bytes FROM batches WHERE partition = ? AND first + count > ? ORDER BY first DESC",
        (found.id, found.first),
    ):
        total += stored
        if total > size and keep < found.end:
            break
        keep = max(first, found.first)
    return keep


def forget_stamps(db: sqlite3.Connection, now: int) -> bool:
    """Forget producers whose last append is long ago, once there are enough stamps for it to matter."""
    (stamps,) = db.execute("SELECT count(*) FROM (SELECT 1 FROM stamps LIMIT ?)", (FORGET_FROM,)).fetchone()
    if stamps >= FORGET_FROM:
        db.execute(
            "DELETE FROM stamps WHERE (partition, producer) IN"
            " (SELECT partition, producer FROM stamps GROUP BY partition, producer HAVING max(at) < ?)",
            (now - STAMP_MS,),
        )
    return False


def clearing() -> Step:
    """Deletes batches below the first offset, and what is left of deleted topics."""
    left: list[tuple[int, int, str | None]] | None = None

    def step(db: sqlite3.Connection, _: int) -> bool:
        nonlocal left
        if left is None:
            left = db.execute("SELECT id, first, topic FROM partitions WHERE first > 0 OR topic IS NULL").fetchall()
        for _ in range(min(PARTITIONS_A_STEP, len(left))):
            if _clear(db, *left[-1]):
                return True
            left.pop()
        return bool(left)

    return step


def _clear(db: sqlite3.Connection, partition: int, first: int, topic: str | None) -> bool:
    dead = db.execute(
        "SELECT id FROM batches WHERE partition = ? AND first + count <= ? ORDER BY first LIMIT ?",
        (partition, first, CLEAR_BATCHES),
    ).fetchall()
    db.executemany("DELETE FROM batches WHERE id = ?", dead)
    if topic is None and not dead:
        db.execute("DELETE FROM stamps WHERE partition = ?", (partition,))
        db.execute("DELETE FROM partitions WHERE id = ?", (partition,))
    return bool(dead)


def merger() -> Step:
    """Merges what is there when it starts. What producers append meanwhile waits for the next time, or it would never
    finish."""
    ends: dict[int, int] = {}

    def step(db: sqlite3.Connection, _: int) -> bool:
        if not ends:
            ends.update(db.execute('SELECT id, "end" FROM partitions WHERE merged < "end"').fetchall())
        return merge(db, ends)

    return step


def merge(db: sqlite3.Connection, ends: dict[int, int]) -> bool:
    """Merge one run of small neighbours below the `ends` of their partitions into one batch."""
    for partition, merged_to in db.execute('SELECT id, merged FROM partitions WHERE merged < "end"').fetchall():
        rows = db.execute(
            "SELECT id, first, count, bytes FROM batches WHERE partition = ? AND first >= ? AND first < ?"
            " ORDER BY first LIMIT ?",
            (partition, merged_to, ends.get(partition, 0), merging.MERGE_BATCHES + 1),
        ).fetchall()
        run = merging.next_run([merging.StoredSize(*row) for row in rows])
        if run.done > merged_to:
            db.execute("UPDATE partitions SET merged = ? WHERE id = ?", (run.done, partition))
        if run.is_due:
            try:
                _merge_run(db, partition, run.ids)
            except Damaged as error:  # it is left for inspection, and must not block the others
                _log.warning("merging will be retried: %s", error)
                ends[partition] = 0
                continue
            return True
        if run.done > merged_to and len(rows) > merging.MERGE_BATCHES:  # nothing to merge in these, but there are more
            return True
    return False


def _merge_run(db: sqlite3.Connection, partition: int, ids: list[int]) -> None:
    where = f"partition {partition}"
    parts: list[LoadedBatch] = []
    for batch in ids:
        first, count, checksum, stored = db.execute(
            "SELECT first, count, checksum, data FROM batches WHERE id = ?", (batch,)
        ).fetchone()
        parts.append(decode(stored, checksum, partition, first, count, where))
    data = merging.merged(parts, where)
    db.executemany("DELETE FROM batches WHERE id = ?", [(batch,) for batch in ids])
    store.put_batch(db, partition, encode(partition, parts[0].first, data))


def free_space(db: sqlite3.Connection, _: int) -> bool:
    """Shrink the file when an eighth of it is free. Fewer free pages are kept for the next appends."""
    (free,) = db.execute("PRAGMA freelist_count").fetchone()
    (pages,) = db.execute("PRAGMA page_count").fetchone()
    if free < max(VACUUM_PAGES, pages // 8):
        return False
    for _ in range(VACUUM_PAGES):  # Python's driver stops after one page, however many the pragma is asked for
        db.execute("PRAGMA incremental_vacuum(1)").fetchall()
    (left,) = db.execute("PRAGMA freelist_count").fetchone()
    return bool(left < free)
