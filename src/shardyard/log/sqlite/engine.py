"""`SqliteLog`: the port, on top of the threads that read and write."""

import asyncio
import fcntl
import logging
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import IO, TypeVar, cast, get_args

from shardyard.log import rules
from shardyard.log.appending import Append, Changes, PartitionState
from shardyard.log.batch_cache import BatchCache
from shardyard.log.catalog import StoredCatalog
from shardyard.log.database import LOCK_SECONDS, DatabaseLog
from shardyard.log.port import READ_BYTES, READ_RECORDS
from shardyard.log.requests import Outcomes, ReadRequest
from shardyard.log.sqlite import maintenance, store
from shardyard.log.sqlite.catalog import SqliteCatalog
from shardyard.log.sqlite.files import Durability, connect, create_or_check, open_lock, translated
from shardyard.log.sqlite.known_ends import KnownEnds
from shardyard.log.sqlite.read_many import KnownIds, read_many
from shardyard.log.sqlite.tail import Tail
from shardyard.log.sqlite.writer import Appends, Operation, Writer
from shardyard.log.waiting import Looked, look_until_news, wait_at_most
from shardyard.model import (
    Appended,
    Busy,
    Fence,
    InvalidValue,
    Partition,
    ShardyardError,
    Span,
    whole_number,
)
from shardyard.model.batch import Batch
from shardyard.model.checks import check_int64, check_text
from shardyard.model.limits import Limits
from shardyard.runtime.clock import Clock

_log = logging.getLogger(__name__)
T = TypeVar("T")

MAINTAIN_SECONDS = 2.0
READERS = 3
RECENT_BATCHES = 16
"""Of a partition for which readers wait, kept at hand as they were appended."""
INLINE_READ_BYTES = 1024 * 1024
"""If no more than this has just arrived, a waiting read fetches it in the event loop's own thread."""


class SqliteLog(DatabaseLog):
    """A log in a folder, which several processes of one machine may open."""

    def __init__(
        self,
        folder: Path | str,
        *,
        durability: Durability = "power",
        limits: Limits | None = None,
        busy_wait: float = 10.0,
        maintain_every: float | None = MAINTAIN_SECONDS,
        clock: Clock | None = None,
    ) -> None:
        """`busy_wait`: seconds that a write waits for other processes. `maintain_every`: seconds; None for never.
        `clock`: for timestamps, seals, retention, waiting reads and maintenance in the background."""
        if durability not in get_args(Durability):
            raise InvalidValue("durability", durability, "'power' or 'process'")
        self._folder = Path(folder)
        super().__init__(str(self._folder), limits=limits, maintain_every=maintain_every, clock=clock)
        self._path = create_or_check(self._folder)
        self._durability: Durability = durability
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="shardyard-log-reader")
        self._local = threading.local()
        self._connections: list[sqlite3.Connection] = []
        self._cache = BatchCache()
        self._ends: dict[Partition, tuple[int, int]] = {}
        """The id of each partition that was read to its end, and that end: what follows was just written."""
        self._read = KnownIds()
        """Of partitions that were read together with others."""
        self._recent: dict[Partition, deque[int]] = {}
        """The first offsets of the batches that were kept at hand for readers that waited for them."""
        self._forgetter = maintenance.Forgetter()
        self._known = KnownEnds()
        self._tail = Tail(self._folder, lambda: connect(self._path, "process"), self._known.clear)
        self._writer = Writer(self._path, durability, busy_wait, self._now, self._committed, self._changed_elsewhere)

    # Records

    async def read(
        self,
        partition: Partition,
        offset: int,
        *,
        epoch: int | None = None,
        max_records: int = READ_RECORDS,
        max_bytes: int = READ_BYTES,
        wait: float = 0.0,
        fence: Fence | None = None,
    ) -> Batch:
        offset = whole_number("offset", offset, at_least=0)
        max_records = whole_number("max_records", max_records, at_least=1)
        max_bytes = whole_number("max_bytes", max_bytes, at_least=1)

        self._open()
        wanted = (self._cache, partition, offset, epoch, max_records, max_bytes)

        def fetch(db: sqlite3.Connection) -> tuple[PartitionState, Batch]:
            return store.read(db, *wanted, fence)

        def fetch_newest(db: sqlite3.Connection) -> tuple[PartitionState, Batch | None]:
            found = store.find(db, partition, fence)
            return found, store.newest(found, *wanted)

        async def fetch_new(partition_id: int) -> tuple[PartitionState, Batch]:
            """Records that were just written: usually by this process, so that they are at hand."""
            found, batch = await self._look_inline(fetch_newest, in_transaction=False)
            return (found, batch) if batch is not None else await self._look_at_new(partition_id, offset, fetch)

        async def fetch_arrived(partition_id: int) -> tuple[PartitionState, Batch]:
            """The same when a record has arrived: if this process has written it, the writer has just looked whether
            anything else has changed."""
            known = self._known.find(partition, fence)
            batch = None if known is None else store.newest(known, *wanted)
            return (known, batch) if known is not None and batch else await fetch_new(partition_id)

        news, version = self._tail.news, self._known.version
        known = self._known.find(partition, fence) if wait > 0 else None
        partition_id, end = self._ends.get(partition, (0, -1))
        if known is not None and known.end == offset and epoch in (None, known.epoch):
            found, batch = known, Batch(partition, known.epoch, offset, ())
        elif self._cache.covers(partition, offset, max_records, max_bytes):
            await asyncio.sleep(0)  # a reader that takes many batches in a row must not keep other tasks from running
            found, batch = await self._look_inline(fetch)
        elif 0 <= end <= offset:
            found, batch = await fetch_new(partition_id)
        else:
            found, batch = await self._look(fetch)
        self._note_end(partition, found, batch, fence, version)  # also if it is cancelled while it waits
        if not len(batch) and wait > 0:
            arrived = self._tail.wait_for([(found.id, offset)], news)
            try:
                has_arrived = await wait_at_most(arrived, wait, self._clock)
            finally:
                arrived.cancel()
            version = self._known.version
            found, batch = await (fetch_arrived(found.id) if has_arrived else self._look(fetch))
            self._note_end(partition, found, batch, fence, version)
        return batch

    async def read_many(
        self,
        requests: Sequence[ReadRequest],
        *,
        max_records: int = READ_RECORDS,
        max_bytes: int = READ_BYTES,
        total_bytes: int | None = None,
        wait: float = 0.0,
    ) -> Outcomes:
        rules.check_reads(requests, max_records, max_bytes, total_bytes)

        def look(db: sqlite3.Connection, most: int | None = None) -> Looked | None:
            return read_many(db, self._cache, self._read, requests, max_records, max_bytes, total_bytes, most)

        async def look_inline_if_few() -> Looked:
            few = await self._look_inline(partial(look, most=INLINE_READ_BYTES))
            return few if few is not None else cast(Looked, await self._look(look))

        return await look_until_news(look_inline_if_few, self._tail, wait, self._clock)

    def _committed(self, changes: Changes, *, only_appends: bool) -> None:
        """Keep what was appended at hand for readers that wait for it, and wake them."""
        for partition, epoch, batch in changes.loaded:
            partition_id = self._read.find(partition) or self._ends.get(partition, (0, -1))[0]
            if self._tail.is_awaited(partition_id):
                self._cache.add(partition, epoch, batch)
                recent = self._recent.setdefault(partition, deque())
                recent.append(batch.first)
                if len(recent) > RECENT_BATCHES:  # readers that wait have it: kept longer, it would only take memory
                    self._cache.drop(partition, recent.popleft())
        if only_appends and not changes.fences:
            self._known.grew(changes.ends)
        else:
            self._known.clear()
        self._tail.committed(changes.ends, only_appends=only_appends)

    def _changed_elsewhere(self) -> None:
        self._appends += 1
        self._known.clear()

    def _note_end(
        self, partition: Partition, found: PartitionState, batch: Batch, fence: Fence | None, version: int
    ) -> None:
        if batch.end == found.end:
            self._ends[partition] = (found.id, batch.end)
            self._known.add(partition, found, fence, version)

    async def span(self, partition: Partition) -> Span:
        return await self._look(lambda db: store.span(db, partition))

    async def ends(self, topic: str, *, dropped: bool = False) -> dict[int, Span]:
        """Its few rows are in memory, and fan-out workers look at them before each batch."""
        check_text("topic", topic)
        return await self._look_inline(lambda db: store.spans(db, topic, dropped=dropped))

    async def offset_at(self, partition: Partition, timestamp: int) -> int:
        since = check_int64("timestamp", timestamp)
        return await self._look(lambda db: store.offset_at(db, self._cache, partition, since))

    async def trim(self, partition: Partition, before: int) -> Span:
        offset = whole_number("before", before, at_least=0)
        return await self._change(lambda db, _: store.trim(db, partition, offset))

    async def set_fence(self, fence: Fence) -> None:
        def work(db: sqlite3.Connection, _: int) -> None:
            if rules.check_fence(fence, store.fence_epoch(db, fence.name)):
                store.raise_fences(db, {fence.name: fence.epoch})

        await self._change(work)

    async def _maintain(self, *, in_background: bool) -> None:
        """One process at a time. The others wait, and then find little to do."""
        with open_lock(self._folder / "maintain.lock") as lock:
            while not _acquired(lock):  # noqa: ASYNC110 another process sends no event
                await asyncio.sleep(LOCK_SECONDS)
            for name, step in maintenance.steps(self._forgetter).items():
                merge = partial(self._merge_run, step) if isinstance(step, maintenance.Merger) else None
                take = merge or partial(self._change, step)
                if name in maintenance.MAY_REST:
                    await self._take_all(take, in_background=in_background)
                else:
                    while await take():
                        pass

    async def _merge_run(self, merger: maintenance.Merger) -> bool:
        """Readers at the ends of their partitions, and appends, go on with what they know: looking all of it up again
        after each merge would take longer than the merge."""
        if not await self._look(merger.plan):
            return False
        self._open()
        await self._writer.do(Operation(merger, only_rearranges=True))
        return True

    def _stop(self) -> None:
        self._writer.close()
        self._tail.close()
        self._readers.shutdown()
        for connection in self._connections:
            connection.close()

    # Threads

    def _now(self) -> int:
        return rules.milliseconds(self._clock)

    async def _write(self, requests: Sequence[Append]) -> list[Appended | ShardyardError]:
        outcomes: list[Appended | ShardyardError]
        outcomes = await self._writer.do(Appends(requests, sum(request.size for request in requests)))
        return outcomes

    @property
    def _waiting_bytes(self) -> int:
        return self._writer.waiting_bytes

    async def catalog_version(self) -> int:
        """It is one row, which is in memory and which rebalancers look at often."""
        return await self._look_inline(lambda db: SqliteCatalog(db, 0).last_number())

    async def _change_catalog(self, work: Callable[[StoredCatalog], T]) -> T:
        return await self._change(lambda db, now: work(SqliteCatalog(db, now)))

    async def _look_at_catalog(self, work: Callable[[StoredCatalog], T]) -> T:
        return await self._look(lambda db: work(SqliteCatalog(db, self._now())))

    async def _change(self, work: Callable[[sqlite3.Connection, int], T]) -> T:
        self._open()
        result: T = await self._writer.do(Operation(work))
        return result

    async def _look(self, work: Callable[[sqlite3.Connection], T]) -> T:
        self._open()
        return await asyncio.get_running_loop().run_in_executor(self._readers, self._snapshot, work)

    async def _look_inline(self, work: Callable[[sqlite3.Connection], T], *, in_transaction: bool = True) -> T:
        """The same in this thread. For records that are in memory, because they were just written or are in the cache,
        going to another thread and back would take ten times as long as reading them. A single statement needs no
        transaction."""
        self._open()
        try:
            return self._snapshot(work, wait=False, in_transaction=in_transaction)
        except Busy:
            return await self._look(work)

    async def _look_at_new(self, partition_id: int, offset: int, fetch: Callable[[sqlite3.Connection], T]) -> T:
        """Fetch records from this offset on, which were just written: in this thread if they are few."""

        def fetch_few(db: sqlite3.Connection) -> T | None:
            return fetch(db) if store.bytes_from(db, partition_id, offset) <= INLINE_READ_BYTES else None

        few = await self._look_inline(fetch_few)
        return few if few is not None else await self._look(fetch)

    def _snapshot(
        self, work: Callable[[sqlite3.Connection], T], *, wait: bool = True, in_transaction: bool = True
    ) -> T:
        """Run `work` on one state of the log, with this thread's own connection. `wait`: while the file is busy."""
        with translated(self._path):
            db: sqlite3.Connection | None = getattr(self._local, "db", None)
            if db is None:
                db = self._local.db = connect(self._path, "process")
                if not wait:
                    db.execute("PRAGMA busy_timeout = 0")
                self._connections.append(db)
            if not in_transaction:
                return work(db)
            db.execute("BEGIN")
            try:
                return work(db)
            finally:
                if db.in_transaction:  # SQLite ends it by itself after some errors
                    db.execute("COMMIT")


def _acquired(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
