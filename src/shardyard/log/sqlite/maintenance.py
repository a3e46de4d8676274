"""Keeping the embedded log small: retention, deletion of trimmed batches, merging of small ones, freeing of space.

Each step is a function on the writer's connection that does a little and returns whether there is more to do, so that
appends never wait long behind it.
"""

import json
import logging
import random
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

import pyarrow as pa

from shardyard.log import merging
from shardyard.log.appending import PartitionState
from shardyard.log.database import CLEAR_BATCHES, FORGET_EVERY, FORGET_FROM, STAMP_MS
from shardyard.log.sqlite import store
from shardyard.log.stored_batches import StoredBatch, encode, join
from shardyard.model import Damaged, Partition, PartitionOutOfRange, Retention, UnknownTopic

_log = logging.getLogger(__name__)

Step = Callable[[sqlite3.Connection, int], bool]
"""Gets the time in milliseconds. Returns whether there is more to do."""

VACUUM_PAGES = 512
"""The number of free pages from which on the file is shrunk."""
VACUUM_STEP_PAGES = 32
"""By how many pages it is shrunk in one step: each is written to the write-ahead log again."""
PARTITIONS_A_STEP = 200
"""Partitions examined in one step."""
STAMPS_A_STEP = 2000
"""Stamps examined or deleted in one step; more than one producer has."""
PIECE_RECORDS = 100
"""How many are joined in one turn of the event loop."""
MERGE_REST = 400.0
"""How much longer than a step took merging rests while records are appended: it delays them, and a quieter time may
come later."""
MOST_UNMERGED = 50_000
"""Small batches; with more of them, merging rests no longer than other maintenance does, so that they do not become
ever more."""
_Row: TypeAlias = tuple[int, int, int, bytes]
"""First offset, count, checksum and data of a batch."""
_BEFORE_ALL = (0, "")
"""A partition and a producer that come before all others."""

_PRODUCERS = """
SELECT partition, producer, max(at) < ?, count(*)
FROM (
    SELECT partition, producer, at FROM stamps
    WHERE (partition, producer) > (?, ?) ORDER BY partition, producer, sequence LIMIT ?
)
GROUP BY partition, producer ORDER BY partition, producer
"""
_COUNT_UNMERGED = """
SELECT count(*) FROM (
    SELECT 1 FROM partitions p JOIN batches b ON b.partition = p.id AND b.first >= p.merged LIMIT ?
)
"""
_CLEAR_STAMPS = """
DELETE FROM stamps WHERE (partition, producer, sequence) IN (
    SELECT partition, producer, sequence FROM stamps WHERE partition = ? LIMIT ?
)
"""


MAY_REST = {"clear", "merge", "free"}
"""Steps that appends have priority over: if it takes long until they are done, nothing but space is lost."""


def steps(forgetter: "Forgetter") -> dict[str, Step]:
    """The steps by name, in their order."""
    return {
        "retain": retention(),
        "forget": forgetter,
        "clear": clearing(),
        "merge": Merger(),
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


class Forgetter:
    """A step that forgets producers whose last append is long ago, once there are enough stamps for it to matter. It
    examines some producers in each step, and is kept between the times that maintenance runs, because it skips most of
    them: to examine all producers takes a while if there are many."""

    def __init__(self) -> None:
        self._after = _BEFORE_ALL
        """The last partition and producer that were examined."""
        self._times_to_skip = 0

    def __call__(self, db: sqlite3.Connection, now: int) -> bool:
        if self._times_to_skip > 0:
            self._times_to_skip -= 1
            return False
        if self._after != _BEFORE_ALL or _has_many_stamps(db):
            self._after = _forget_some(db, now, self._after)
        if self._after == _BEFORE_ALL:
            self._times_to_skip = FORGET_EVERY
            return False
        return True


def _has_many_stamps(db: sqlite3.Connection) -> bool:
    (stamps,) = db.execute("SELECT count(*) FROM (SELECT 1 FROM stamps LIMIT ?)", (FORGET_FROM,)).fetchone()
    return bool(stamps >= FORGET_FROM)


def _forget_some(db: sqlite3.Connection, now: int, after: tuple[int, str]) -> tuple[int, str]:
    """Forget old producers among those that follow `after`. Returns the last that was examined, or `_BEFORE_ALL` if it
    was the last of all."""
    producers = db.execute(_PRODUCERS, (now - STAMP_MS, *after, STAMPS_A_STEP)).fetchall()
    is_all = sum(stamps for *_, stamps in producers) < STAMPS_A_STEP
    if not is_all:
        producers.pop()  # some of its stamps may not have been examined
    old = [(partition, producer) for partition, producer, is_old, _ in producers if is_old]
    db.executemany("DELETE FROM stamps WHERE partition = ? AND producer = ?", old)
    return _BEFORE_ALL if is_all else producers[-1][:2]


def clearing() -> Step:
    """Deletes batches below the first offset, and what is left of deleted topics."""
    left: list[tuple[int, int, str | None]] | None = None

    def step(db: sqlite3.Connection, _: int) -> bool:
        nonlocal left
        if left is None:
            left = db.execute("SELECT id, first, topic FROM partitions WHERE first > 0 OR topic IS NULL").fetchall()
            random.shuffle(left)  # under load there is no time for all of them
        for _ in range(min(PARTITIONS_A_STEP, len(left))):
            if _clear(db, *left[-1]):
                return True
            left.pop()
        return bool(left)

    return step


def _clear(db: sqlite3.Connection, partition: int, first: int, topic: str | None) -> bool:
    dead = db.execute(
        "SELECT id FROM batches WHERE partition = ? AND first < ? AND first + count <= ? ORDER BY first LIMIT ?",
        (partition, first, first, CLEAR_BATCHES),
    ).fetchall()
    db.executemany("DELETE FROM batches WHERE id = ?", dead)
    if dead or topic is not None:
        return bool(dead)
    stamps = db.execute(_CLEAR_STAMPS, (partition, STAMPS_A_STEP)).rowcount
    if not stamps:
        db.execute("DELETE FROM partitions WHERE id = ?", (partition,))
    return bool(stamps)


@dataclass(slots=True)
class _Merge:
    """What a step of merging changes."""

    partition: int
    done: int | None
    """The offset below which nothing is left to merge, if it has changed."""
    ids: list[int] = field(default_factory=list)
    """Of the batches that become one."""
    rows: list[_Row] = field(default_factory=list)
    """Those batches."""
    merged: StoredBatch | None = None


class Merger:
    """A step that merges a run of small neighbours into one batch. Before it, `plan` is called in a thread that only
    reads, and then `join` in the event loop: a thread that joins batches would keep the interpreter from it, even
    while the processor does something else.

    It merges what is there when it starts. What producers append meanwhile waits for the next time, or it would never
    finish."""

    def __init__(self) -> None:
        self._left: dict[int, tuple[int, int]] | None = None
        """By partition, the offsets between which there may be something to merge."""
        self._next: _Merge | None = None
        self.is_behind = False
        """There is so much to merge that it should not wait for a quieter time."""

    def plan(self, db: sqlite3.Connection) -> bool:
        """Find what to merge next. Returns whether there is anything to do."""
        if self._left is None:
            pa.array([0])  # the first array takes long, because Arrow loads pandas: not in the event loop
            unmerged = db.execute('SELECT id, merged, "end" FROM partitions WHERE merged < "end"').fetchall()
            random.shuffle(unmerged)  # under load there is no time for all of them
            self._left = {partition: (merged, end) for partition, merged, end in unmerged}
            self.is_behind = db.execute(_COUNT_UNMERGED, (MOST_UNMERGED,)).fetchone()[0] >= MOST_UNMERGED
        self._next = _plan(db, self._left)
        return self._next is not None

    def join(self) -> Iterator[None]:
        """Join the batches that are to be merged, some records at a time."""
        merge = self._next
        if merge is None or not merge.rows:
            return
        where, first = f"partition {merge.partition}", merge.rows[0][0]
        pieces, end = list[pa.RecordBatch](), first
        try:
            for piece in _pieces(merge.rows):
                if piece[0][0] != end:
                    raise Damaged(where, f"offsets {end} to {piece[0][0] - 1} are missing")
                pieces.append(join(piece, merge.partition, where))
                end += len(pieces[-1])
                yield
            merge.merged = encode(merge.partition, first, pa.concat_batches(pieces))
        except Damaged as error:  # it is left for inspection, and must not block the others
            _log.warning("merging will be retried: %s", error)
            if self._left is not None:
                del self._left[merge.partition]

    def __call__(self, db: sqlite3.Connection, _: int) -> bool:
        merge = self._next
        if merge is None:
            return False
        if merge.merged is not None and not _replace(db, merge.partition, merge.ids, merge.merged):
            return True  # they were trimmed, or their topic was deleted
        if merge.done is not None:
            db.execute("UPDATE partitions SET merged = ? WHERE id = ?", (merge.done, merge.partition))
        return True


def _plan(db: sqlite3.Connection, left: dict[int, tuple[int, int]]) -> _Merge | None:
    """The next run of small neighbours in what is `left` of the partitions."""
    while left:
        partition, (start, end) = next(iter(left.items()))
        rows = db.execute(
            "SELECT id, first, count, bytes FROM batches WHERE partition = ? AND first >= ? AND first < ?"
            " ORDER BY first LIMIT ?",
            (partition, start, end, merging.MERGE_BATCHES + 1),
        ).fetchall()
        run = merging.next_run([merging.StoredSize(*row) for row in rows])
        merge = _Merge(partition, run.done if run.done > start else None)
        left[partition] = (max(run.done, start), end)
        if run.is_due:
            merge.ids, merge.rows = run.ids, _rows(db, run.ids)
            return merge
        if merge.done is None or len(rows) <= merging.MERGE_BATCHES:  # there is nothing else in this partition
            del left[partition]
        if merge.done is not None:
            return merge
    return None


def _rows(db: sqlite3.Connection, ids: list[int]) -> list[_Row]:
    return db.execute(
        "SELECT first, count, checksum, data FROM batches WHERE id IN (SELECT value FROM json_each(?)) ORDER BY first",
        (json.dumps(ids),),
    ).fetchall()


def _pieces(rows: list[_Row]) -> Iterator[list[_Row]]:
    piece: list[_Row] = []
    records = 0
    for row in rows:
        piece.append(row)
        records += row[1]
        if records >= PIECE_RECORDS:
            yield piece
            piece, records = [], 0
    if piece:
        yield piece


def _replace(db: sqlite3.Connection, partition: int, ids: list[int], merged: StoredBatch) -> bool:
    """Put a batch in the place of those that it was merged from. Returns whether all of them were still there: SQLite
    gives the ids of deleted rows to new ones, which have other offsets. Few statements, because this thread has to wait
    for the interpreter after each."""
    listed = (json.dumps(ids), partition, merged.first, merged.first + merged.count - 1)
    those = "FROM batches WHERE id IN (SELECT value FROM json_each(?)) AND partition = ? AND first BETWEEN ? AND ?"
    if db.execute(f"SELECT count(*) {those}", listed).fetchone() != (len(ids),):
        return False
    db.execute(f"DELETE {those}", listed)
    store.put_batches(db, [(partition, merged)])
    return True


def free_space(db: sqlite3.Connection, _: int) -> bool:
    """Shrink the file when an eighth of it is free. Fewer free pages are kept for the next appends."""
    (free,) = db.execute("PRAGMA freelist_count").fetchone()
    (pages,) = db.execute("PRAGMA page_count").fetchone()
    if free < max(VACUUM_PAGES, pages // 8):
        return False
    for _ in range(VACUUM_STEP_PAGES):  # Python's driver stops after one page, however many the pragma is asked for
        db.execute("PRAGMA incremental_vacuum(1)").fetchall()
    (left,) = db.execute("PRAGMA freelist_count").fetchone()
    return bool(left < free)
