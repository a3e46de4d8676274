"""`SqliteLog`: the port, on top of the threads that read and write."""

import asyncio
import fcntl
import logging
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, TypeVar, get_args

from shardyard.log import rules
from shardyard.log.batch_cache import BatchCache
from shardyard.log.port import DEFAULT_RETENTION, READ_BYTES, READ_RECORDS, SEAL_SECONDS, Capabilities, Log
from shardyard.log.sqlite import maintenance, store
from shardyard.log.sqlite.files import Durability, connect, create_or_check, open_lock, translated
from shardyard.log.sqlite.tail import Tail
from shardyard.log.sqlite.writer import Append, Operation, Writer
from shardyard.log.waiting import wait_at_most
from shardyard.model import (
    Appended,
    Busy,
    Closed,
    Fence,
    InvalidValue,
    Partition,
    Retention,
    ShardyardError,
    Span,
    Stamp,
    Topic,
    TopicKind,
    whole_number,
)
from shardyard.model.batch import Batch
from shardyard.model.checks import check_int64, check_text
from shardyard.model.limits import Limits, Records, check_partitions, check_topic_name, validate
from shardyard.runtime.clock import Clock, SystemClock

_log = logging.getLogger(__name__)
T = TypeVar("T")

MAINTAIN_SECONDS = 2.0
WAITING_BYTES = 64 * 1024 * 1024
"""While more than this waits for the writer, further appends are held back."""
HELD_BACK_SECONDS = 0.01
"""How often an append that is held back tries again."""
MERGE_SECONDS = 1.0
"""How long merging in the background may take at a time."""
MERGE_REST = 10.0
"""How much longer than a merge took to wait before the next one."""
READERS = 3
INLINE_READ_BYTES = 1024 * 1024
"""If no more than this has just arrived, a waiting read fetches it in the event loop's own thread."""
LOCK_SECONDS = 0.02
"""How often to try for the maintenance lock while another process has it. Trying, unlike waiting, can be cancelled."""


class SqliteLog(Log):
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
        self._limits = limits or Limits()
        self._clock = clock or SystemClock()
        self._path = create_or_check(self._folder)
        self._durability: Durability = durability
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="shardyard-log-reader")
        self._local = threading.local()
        self._connections: list[sqlite3.Connection] = []
        self._cache = BatchCache()
        self._tail = Tail(self._folder, lambda: connect(self._path, "process"))
        self._writer = Writer(self._path, durability, busy_wait, self._now, self._tail.committed)
        self._maintain_every = maintain_every
        self._maintaining = asyncio.Lock()
        self._maintenance: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(contraction=True, stamps_across_processes=True, atomic_batches=True, dense_offsets=True)

    # Topics

    async def create_topic(
        self,
        name: str,
        partitions: int,
        *,
        kind: TopicKind = TopicKind.NORMAL,
        retention: Retention = DEFAULT_RETENTION,
        partitioner: str = "modulus",
        hash_: str | None = None,
    ) -> Topic:
        wanted = Topic(
            check_topic_name(name, self._limits),
            check_partitions(partitions, self._limits),
            kind,
            rules.check_retention(retention),
            0,
            *rules.check_placement(partitioner, partitions, hash_),
        )
        return await self._change(lambda db, now: store.create_topic(db, now, wanted))

    async def expand_topic(self, name: str, partitions: int) -> Topic:
        count = check_partitions(partitions, self._limits)
        return await self._change(lambda db, now: store.expand_topic(db, now, name, count))

    async def contract_topic(self, name: str, partitions: int) -> Topic:
        rules.check_contraction(self.capabilities)
        count = whole_number("partitions", partitions, at_least=1)
        return await self._change(lambda db, now: store.contract_topic(db, now, name, count))

    async def drop_partitions(self, name: str, partitions: int) -> Topic:
        rules.check_contraction(self.capabilities)
        count = whole_number("partitions", partitions, at_least=1)
        return await self._change(lambda db, now: store.drop_partitions(db, now, name, count))

    async def set_retention(self, name: str, retention: Retention) -> Topic:
        rules.check_retention(retention)
        return await self._change(lambda db, now: store.set_retention(db, now, name, retention))

    async def seal_topic(self, name: str, holder: str, *, seconds: float = SEAL_SECONDS) -> Topic:
        duration = rules.check_seal(holder, seconds)
        return await self._change(lambda db, now: store.seal_topic(db, now, name, holder, duration))

    async def unseal_topic(self, name: str, holder: str) -> Topic:
        check_text("holder", holder)
        return await self._change(lambda db, now: store.unseal_topic(db, now, name, holder))

    async def move_topic(self, name: str, successor: str, *, holder: str, generation: int) -> Topic:
        check_text("successor", successor)
        check_text("holder", holder)
        return await self._change(lambda db, now: store.move_topic(db, now, name, successor, holder, generation))

    async def delete_topic(self, name: str) -> None:
        await self._change(lambda db, now: store.delete_topic(db, now, name))

    async def topic(self, name: str) -> Topic:
        return await self._look(lambda db: store.topic(db, self._now(), name))

    async def topics(self) -> list[Topic]:
        return await self._look(lambda db: store.topics(db, self._now()))

    async def catalog_version(self) -> int:
        return await self._look(store.catalog_version)

    # Records

    async def append(
        self,
        partition: Partition,
        records: Records,
        *,
        stamp: Stamp | None = None,
        fence: Fence | None = None,
        generation: int | None = None,
    ) -> Appended:
        batch = validate(records, self._limits, self._now())
        rules.check_append_options(stamp, fence, generation)
        self._open()
        while self._writer.waiting_bytes > WAITING_BYTES:  # noqa: ASYNC110 it is another thread that writes
            await asyncio.sleep(HELD_BACK_SECONDS)
        self._open()
        appended: Appended = await self._writer.do(Append(partition, batch.rows, batch.size, stamp, fence, generation))
        return appended

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

        def fetch(db: sqlite3.Connection) -> tuple[store.Found, Batch]:
            if fence is not None:
                store.check_fence(db, fence)
            return store.read(db, self._cache, partition, offset, epoch, max_records, max_bytes)

        news = self._tail.news
        at_hand = self._cache.covers(partition, offset, max_records, max_bytes)
        if at_hand:
            await asyncio.sleep(0)  # a reader that takes many batches in a row must not keep other tasks from running
        found, batch = await (self._look_inline if at_hand else self._look)(fetch)
        if len(batch) or wait <= 0:
            return batch
        arrived = self._tail.wait_for(found.id, offset, news)
        try:
            inline = await wait_at_most(arrived, wait, self._clock)
        finally:
            arrived.cancel()

        def fetch_few(db: sqlite3.Connection) -> tuple[store.Found, Batch] | None:
            return fetch(db) if store.bytes_from(db, found.id, offset) <= INLINE_READ_BYTES else None

        few = await self._look_inline(fetch_few) if inline else None
        _, batch = few if few is not None else await self._look(fetch)
        return batch

    async def span(self, partition: Partition) -> Span:
        return await self._look(lambda db: store.span(db, partition))

    async def offset_at(self, partition: Partition, timestamp: int) -> int:
        since = check_int64("timestamp", timestamp)
        return await self._look(lambda db: store.offset_at(db, self._cache, partition, since))

    async def trim(self, partition: Partition, before: int) -> Span:
        offset = whole_number("before", before, at_least=0)
        return await self._change(lambda db, _: store.trim(db, partition, offset))

    async def set_fence(self, fence: Fence) -> None:
        def work(db: sqlite3.Connection, _: int) -> None:
            if store.check_fence(db, fence):
                store.raise_fence(db, fence)

        await self._change(work)

    async def maintain(self) -> None:
        await self._maintain(in_background=False)

    async def _maintain(self, *, in_background: bool) -> None:
        """One process at a time. The others wait, and then find little to do."""
        async with self._maintaining:
            self._open()
            with open_lock(self._folder / "maintain.lock") as lock:
                while not _acquired(lock):  # noqa: ASYNC110 another process sends no event
                    await asyncio.sleep(LOCK_SECONDS)
                for name, step in maintenance.steps().items():
                    if name == "merge":
                        await self._merge(step, in_background=in_background)
                    else:
                        while await self._change(step):
                            pass

    async def _merge(self, step: maintenance.Step, *, in_background: bool) -> None:
        """In the background appends have priority: pause much longer than each merge took, and stop after a while."""
        until = self._clock.monotonic() + MERGE_SECONDS
        while True:
            started = self._clock.monotonic()
            if not await self._change(step) or (in_background and started > until):
                break
            if in_background:
                await self._clock.sleep(MERGE_REST * (self._clock.monotonic() - started))

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._maintenance is not None:
            self._maintenance.cancel()
            await asyncio.gather(self._maintenance, return_exceptions=True)
        await asyncio.to_thread(self._stop)

    def _stop(self) -> None:
        self._writer.close()
        self._tail.close()
        self._readers.shutdown()
        for connection in self._connections:
            connection.close()

    # Threads

    def _open(self) -> None:
        """Raise if the log is closed; start its maintenance on first use."""
        if self._closed:
            raise Closed(f"the log {self._folder}")
        if self._maintenance is None and self._maintain_every is not None:
            self._maintenance = asyncio.create_task(self._keep_maintained(self._maintain_every))

    async def _keep_maintained(self, every: float) -> None:
        while True:
            await self._clock.sleep(every)
            try:
                await self._maintain(in_background=True)
            except ShardyardError as error:
                _log.warning("maintenance of %s will be retried: %s", self._folder, error)
            except Exception:  # noqa: BLE001 the log works without it, and the next attempt may succeed
                _log.exception("maintenance of %s failed and will be retried", self._folder)

    def _now(self) -> int:
        return rules.milliseconds(self._clock)

    async def _change(self, work: Callable[[sqlite3.Connection, int], T]) -> T:
        self._open()
        result: T = await self._writer.do(Operation(work))
        return result

    async def _look(self, work: Callable[[sqlite3.Connection], T]) -> T:
        self._open()
        return await asyncio.get_running_loop().run_in_executor(self._readers, self._snapshot, work)

    async def _look_inline(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """The same in this thread. For records that are in memory, because they were just written or are in the cache,
        going to another thread and back would take ten times as long as reading them."""
        self._open()
        try:
            return self._snapshot(work, wait=False)
        except Busy:
            return await self._look(work)

    def _snapshot(self, work: Callable[[sqlite3.Connection], T], *, wait: bool = True) -> T:
        """Run `work` on one state of the log, with this thread's own connection. `wait`: while the file is busy."""
        with translated(self._path):
            db: sqlite3.Connection | None = getattr(self._local, "db", None)
            if db is None:
                db = self._local.db = connect(self._path, "process")
                if not wait:
                    db.execute("PRAGMA busy_timeout = 0")
                self._connections.append(db)
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
