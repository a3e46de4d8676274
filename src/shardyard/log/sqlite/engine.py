"""`SqliteLog`: the port, on top of the threads that read and write."""

import asyncio
import fcntl
import logging
import sqlite3
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import IO, TypeVar, get_args

from shardyard.log import database, rules
from shardyard.log.appending import Append
from shardyard.log.catalog import StoredCatalog
from shardyard.log.database import LOCK_SECONDS, DatabaseLog
from shardyard.log.port import READ_BYTES, READ_RECORDS
from shardyard.log.requests import Outcomes, ReadRequest
from shardyard.log.sqlite import maintenance, store
from shardyard.log.sqlite.catalog import SqliteCatalog
from shardyard.log.sqlite.files import Durability, connect, create_or_check, open_lock
from shardyard.log.sqlite.known_ends import KnownEnds
from shardyard.log.sqlite.reading import PartitionRead, Reading
from shardyard.log.sqlite.snapshots import Snapshots
from shardyard.log.sqlite.tail import Tail
from shardyard.log.sqlite.writer import Appends, Operation, Writer
from shardyard.model import (
    Appended,
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
MERGE_PAUSE_SECONDS = 0.001
"""How long the event loop does other things before it joins more records in the background."""


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
        self._forgetter = maintenance.Forgetter()
        self._known = KnownEnds()
        self._snapshots = Snapshots(self._path, self._open)
        self._tail = Tail(self._folder, lambda: connect(self._path, "process"), self._known.clear)
        self._reading = Reading(self._snapshots, self._tail, self._known, self._clock)
        self._writer = Writer(
            self._path, durability, busy_wait, self._now, self._reading.committed, self._changed_elsewhere
        )

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
        wanted = PartitionRead(self._reading, partition, offset, epoch, max_records, max_bytes, fence)
        return await wanted.run(wait)

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

        return await self._reading.read_many(requests, max_records, max_bytes, total_bytes, wait)

    def _changed_elsewhere(self) -> None:
        self._appends += 1
        self._known.clear()

    async def span(self, partition: Partition) -> Span:
        return await self._snapshots.look(lambda db: store.span(db, partition))

    async def ends(self, topic: str, *, dropped: bool = False) -> dict[int, Span]:
        """Its few rows are in memory, and fan-out workers look at them before each batch."""
        check_text("topic", topic)
        return await self._snapshots.look_inline(lambda db: store.spans(db, topic, dropped=dropped))

    async def offset_at(self, partition: Partition, timestamp: int) -> int:
        since = check_int64("timestamp", timestamp)
        return await self._snapshots.look(lambda db: store.offset_at(db, self._reading.cache, partition, since))

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
                if isinstance(step, maintenance.Merger):
                    await self._merge_all(step, in_background=in_background)
                elif name in maintenance.MAY_REST:
                    await self._take_all(partial(self._change, step), in_background=in_background)
                else:
                    while await self._change(step):
                        pass

    async def _merge_all(self, merger: maintenance.Merger, *, in_background: bool) -> None:
        await self._take_all(
            partial(self._merge_run, merger, MERGE_PAUSE_SECONDS if in_background else 0.0),
            in_background=in_background,
            rest=lambda: database.STEP_REST if merger.is_behind else maintenance.MERGE_REST,
        )

    async def _merge_run(self, merger: maintenance.Merger, pause: float = 0.0) -> bool:
        """Readers at the ends of their partitions, and appends, go on with what they know: looking all of it up again
        after each merge would take longer than the merge."""
        if not await self._snapshots.look(merger.plan):
            return False
        for _ in merger.join():
            await self._pause(pause)
        self._open()
        await self._writer.do(Operation(merger, only_rearranges=True))
        return True

    def _stop(self) -> None:
        self._writer.close()
        self._tail.close()
        self._snapshots.close()

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
        return await self._snapshots.look_inline(lambda db: SqliteCatalog(db, 0).last_number())

    async def _change_catalog(self, work: Callable[[StoredCatalog], T]) -> T:
        return await self._change(lambda db, now: work(SqliteCatalog(db, now)))

    async def _look_at_catalog(self, work: Callable[[StoredCatalog], T]) -> T:
        return await self._snapshots.look(lambda db: work(SqliteCatalog(db, self._now())))

    async def _change(self, work: Callable[[sqlite3.Connection, int], T]) -> T:
        self._open()
        result: T = await self._writer.do(Operation(work))
        return result


def _acquired(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
