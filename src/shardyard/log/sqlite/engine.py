"""`SqliteLog`: the port on its threads."""

import asyncio
import fcntl
import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, TypeVar, get_args

import pyarrow as pa

from shardyard.log.port import (
    DEFAULT_RETENTION,
    READ_BYTES,
    READ_RECORDS,
    Log,
    check_marks,
    check_placement,
    check_retention,
)
from shardyard.log.sqlite import maintenance, store
from shardyard.log.sqlite.files import Durability, connect, create_or_check, open_lock, translated
from shardyard.log.sqlite.tail import Tail
from shardyard.log.sqlite.writer import Append, Operation, Writer
from shardyard.model import (
    Appended,
    Busy,
    Closed,
    Fence,
    InvalidValue,
    Partition,
    Record,
    Retention,
    ShardyardError,
    Span,
    Stamp,
    Topic,
    TopicKind,
    whole_number,
)
from shardyard.model.batch import Batch, now_ms
from shardyard.model.checks import check_int64, check_text
from shardyard.model.limits import Limits, check_batch, check_partitions, check_records, check_topic_name

_log = logging.getLogger(__name__)
T = TypeVar("T")

MAINTAIN_SECONDS = 2.0
WAITING_BYTES = 64 * 1024 * 1024
"""Appends beyond this wait for room before they join the queue of the writer."""
ROOM_SECONDS = 0.01
MERGE_SECONDS = 1.0
MERGE_REST = 10.0
"""Times as long as a merge took."""
READERS = 3
AT_ONCE_BYTES = 1024 * 1024
"""Of records that a reader who waited for them may ask for; more are read in another thread."""
TURN_SECONDS = 0.02
"""How often to ask whether another process has finished its maintenance. Asking, unlike waiting, can be cancelled."""


class SqliteLog(Log):
    """The log in a folder. Several processes of one machine may open the same one."""

    def __init__(
        self,
        folder: Path | str,
        *,
        durability: Durability = "power",
        limits: Limits | None = None,
        busy_wait: float = 10.0,
        maintain_every: float | None = MAINTAIN_SECONDS,
    ) -> None:
        """`busy_wait`: seconds that a write waits for other processes. `maintain_every`: seconds; None for never."""
        if durability not in get_args(Durability):
            raise InvalidValue("durability", durability, "'power' or 'process'")
        self._folder = Path(folder)
        self._limits = limits or Limits()
        self._path = create_or_check(self._folder)
        self._durability: Durability = durability
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="shardyard-log-reader")
        self._local = threading.local()
        self._connections: list[sqlite3.Connection] = []
        self._tail = Tail(lambda: connect(self._path, "process"))
        self._writer = Writer(self._path, durability, busy_wait, self._tail.notify)
        self._maintain_every = maintain_every
        self._maintaining = asyncio.Lock()
        self._maintenance: asyncio.Task[None] | None = None
        self._closed = False

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
            check_retention(retention),
            0,
            *check_placement(partitioner, partitions, hash_),
        )
        return await self._change(lambda db: store.create_topic(db, wanted, now_ms()))

    async def expand_topic(self, name: str, partitions: int) -> Topic:
        count = check_partitions(partitions, self._limits)
        return await self._change(lambda db: store.expand_topic(db, name, count))

    async def contract_topic(self, name: str, partitions: int) -> Topic:
        count = whole_number("partitions", partitions, at_least=1)
        return await self._change(lambda db: store.contract_topic(db, name, count))

    async def drop_partitions(self, name: str, partitions: int) -> Topic:
        count = whole_number("partitions", partitions, at_least=1)
        return await self._change(lambda db: store.drop_partitions(db, name, count))

    async def set_retention(self, name: str, retention: Retention) -> Topic:
        check_retention(retention)
        return await self._change(lambda db: store.set_retention(db, name, retention))

    async def seal_topic(self, name: str) -> Topic:
        return await self._change(lambda db: store.set_sealed(db, name, sealed=True))

    async def unseal_topic(self, name: str) -> Topic:
        return await self._change(lambda db: store.set_sealed(db, name, sealed=False))

    async def move_topic(self, name: str, successor: str) -> Topic:
        check_text("successor", successor)
        return await self._change(lambda db: store.move_topic(db, name, successor))

    async def delete_topic(self, name: str) -> None:
        await self._change(lambda db: store.delete_topic(db, name))

    async def topic(self, name: str) -> Topic:
        return await self._look(lambda db: store.topic(db, name))

    async def topics(self) -> list[Topic]:
        return await self._look(store.topics)

    # Records

    async def append(
        self,
        partition: Partition,
        records: Sequence[Record] | pa.RecordBatch,
        *,
        stamp: Stamp | None = None,
        fence: Fence | None = None,
        placed_on: Topic | None = None,
    ) -> Appended:
        if isinstance(records, pa.RecordBatch):
            records = check_batch(records, self._limits, now_ms())
            size = records.nbytes
        else:
            records, size = check_records(records, self._limits)
        check_marks(stamp, fence)
        self._open()
        while self._writer.waiting_bytes > WAITING_BYTES:  # noqa: ASYNC110 the room is made by another thread
            await asyncio.sleep(ROOM_SECONDS)
        self._open()
        appended: Appended = await self._writer.do(Append(partition, records, size, stamp, fence, placed_on))
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
            return store.read(db, partition, offset, epoch, max_records, max_bytes)

        found, batch = await self._look(fetch)
        if len(batch) or wait <= 0:
            return batch
        arrived = self._tail.wait_for(found.id, offset)
        try:
            async with asyncio.timeout(wait):  # wait_for() may swallow a cancellation in Python 3.11
                await arrived
            look = self._look_at_once if max_bytes <= AT_ONCE_BYTES else self._look
        except TimeoutError:
            look = self._look
        finally:
            arrived.cancel()
        return (await look(fetch))[1]

    async def span(self, partition: Partition) -> Span:
        return await self._look(lambda db: store.span(db, partition))

    async def offset_at(self, partition: Partition, timestamp: int) -> int:
        since = check_int64("timestamp", timestamp)
        return await self._look(lambda db: store.offset_at(db, partition, since))

    async def trim(self, partition: Partition, before: int) -> Span:
        offset = whole_number("before", before, at_least=0)
        return await self._change(lambda db: store.trim(db, partition, offset))

    async def set_fence(self, fence: Fence) -> None:
        def work(db: sqlite3.Connection) -> None:
            if store.check_fence(db, fence):
                store.raise_fence(db, fence)

        await self._change(work)

    async def maintain(self) -> None:
        await self._maintain(in_background=False)

    async def _maintain(self, *, in_background: bool) -> None:
        """One process at a time; the others wait for their turn, which then finds little to do."""
        async with self._maintaining:
            self._open()
            with open_lock(self._folder / "maintain.lock") as lock:
                while not _taken(lock):  # noqa: ASYNC110 no event comes from another process
                    await asyncio.sleep(TURN_SECONDS)
                for name, step in maintenance.steps().items():
                    if name == "merge":
                        await self._merge(step, in_background=in_background)
                    else:
                        while await self._change(step):
                            pass

    async def _merge(self, step: maintenance.Step, *, in_background: bool) -> None:
        """In the background appends come first: rest much longer than a merge took, and leave off after a while."""
        until = time.monotonic() + MERGE_SECONDS
        while True:
            began = time.monotonic()
            if not await self._change(step) or (in_background and began > until):
                break
            if in_background:
                await asyncio.sleep(MERGE_REST * (time.monotonic() - began))

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
        """Complain if the log is closed; begin to maintain it if this is its first use."""
        if self._closed:
            raise Closed(f"the log {self._folder}")
        if self._maintenance is None and self._maintain_every is not None:
            self._maintenance = asyncio.create_task(self._keep_maintained(self._maintain_every))

    async def _keep_maintained(self, every: float) -> None:
        while True:
            await asyncio.sleep(every)
            try:
                await self._maintain(in_background=True)
            except ShardyardError as error:
                _log.warning("maintenance of %s put off: %s", self._folder, error)
            except Exception:  # noqa: BLE001 the log works on without it, and the next time may go better
                _log.exception("maintenance of %s failed", self._folder)

    async def _change(self, work: Callable[[sqlite3.Connection], T]) -> T:
        self._open()
        result: T = await self._writer.do(Operation(work))
        return result

    async def _look(self, work: Callable[[sqlite3.Connection], T]) -> T:
        self._open()
        return await asyncio.get_running_loop().run_in_executor(self._readers, self._snapshot, work)

    async def _look_at_once(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """The same in this thread, for little that is in memory, as what was just written: going to another thread and
        back takes ten times as long."""
        self._open()
        try:
            return self._snapshot(work, patient=False)
        except Busy:
            return await self._look(work)

    def _snapshot(self, work: Callable[[sqlite3.Connection], T], *, patient: bool = True) -> T:
        """Run `work` on one state of the log, on a connection of this thread's own."""
        with translated(self._path):
            db: sqlite3.Connection | None = getattr(self._local, "db", None)
            if db is None:
                db = self._local.db = connect(self._path, "process")
                if not patient:
                    db.execute("PRAGMA busy_timeout = 0")
                self._connections.append(db)
            db.execute("BEGIN")
            try:
                return work(db)
            finally:
                if db.in_transaction:  # SQLite ends it by itself after some errors
                    db.execute("COMMIT")


def _taken(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
