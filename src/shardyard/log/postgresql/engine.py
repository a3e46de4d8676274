"""`PostgresqlLog`: the port, on top of the threads that read and write."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from shardyard.log import rules
from shardyard.log.appending import Append
from shardyard.log.batch_cache import BatchCache
from shardyard.log.catalog import StoredCatalog
from shardyard.log.database import LOCK_SECONDS, DatabaseLog
from shardyard.log.port import READ_BYTES, READ_RECORDS
from shardyard.log.postgresql import reading
from shardyard.log.postgresql.catalog import PostgresqlCatalog
from shardyard.log.postgresql.maintenance import Maintenance, is_alone
from shardyard.log.postgresql.read_many import read_many
from shardyard.log.postgresql.schema import MIGRATIONS
from shardyard.log.postgresql.sessions import Sessions
from shardyard.log.postgresql.steps import Committed, Step
from shardyard.log.postgresql.tail import Tail
from shardyard.log.postgresql.writer import Writer
from shardyard.log.requests import Outcomes, ReadRequest
from shardyard.log.waiting import Looked, look_until_news, wait_at_most
from shardyard.model import (
    Appended,
    Fence,
    InvalidValue,
    OffsetBeyondEnd,
    Partition,
    ShardyardError,
    Span,
    whole_number,
)
from shardyard.model.batch import Batch
from shardyard.model.checks import check_int64, check_text
from shardyard.model.limits import Limits
from shardyard.model.url import parse_url
from shardyard.runtime.clock import Clock
from shardyard.runtime.postgresql import Connection, connect, migrate

T = TypeVar("T")

MAINTAIN_SECONDS = 5.0
THREADS = 4
"""For reads, and for changes other than appends. Each has a connection of its own."""


class PostgresqlLog(DatabaseLog):
    """A log in a PostgreSQL database, which any number of processes on any machines may open.

    A process has up to six connections: one that writes, four for everything else and one that listens for
    notifications while readers wait. Time is the database's, unless a clock is given.
    """

    def __init__(
        self,
        url: str,
        *,
        limits: Limits | None = None,
        maintain_every: float | None = MAINTAIN_SECONDS,
        clock: Clock | None = None,
    ) -> None:
        """Create the tables if there are none, upgrade older ones. `maintain_every`: seconds; None for never. `clock`:
        for seals and retention instead of the database's time, and for everything that waits."""
        self._url = parse_url("log", url)
        if self._url.engine != "postgresql":
            raise InvalidValue("log URL", str(self._url), "postgresql://user:password@host:port/database")
        super().__init__(str(self._url), limits=limits, maintain_every=maintain_every, clock=clock)
        with connect(self._url, "log") as connection:
            migrate(connection, self._url, "log", MIGRATIONS)
        self._given_now = None if clock is None else self._now
        self._cache = BatchCache()
        self._sessions = Sessions(self._url, THREADS, self._cache.clear)
        self._tail = Tail(self._url, self._ends)
        self._writer = Writer(self._url, self._given_now, self._tail.notify)
        self._ids: dict[Partition, int] = {}
        """Of partitions that were read together with others."""
        self._steps = Maintenance()

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

        def fetch(connection: Connection) -> tuple[reading.Place, Batch]:
            return reading.read(connection, self._cache, partition, offset, epoch, max_records, max_bytes, fence)

        news = self._tail.news
        place, batch = await self._run(fetch)
        if len(batch) or wait <= 0:
            return batch
        arrived = self._tail.wait_for({place.id: offset}, news)
        try:
            await wait_at_most(arrived, wait, self._clock)
        finally:
            arrived.cancel()
        return (await self._run(fetch))[1]

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

        def look(connection: Connection) -> Looked:
            return read_many(connection, self._cache, self._ids, requests, max_records, max_bytes, total_bytes)

        return await look_until_news(lambda: self._run(look), self._tail, wait, self._clock)

    async def span(self, partition: Partition) -> Span:
        return await self._run(lambda connection: reading.find(connection, partition).span)

    async def ends(self, topic: str, *, dropped: bool = False) -> dict[int, Span]:
        check_text("topic", topic)
        return await self._run(lambda connection: reading.spans(connection, topic, dropped=dropped))

    async def offset_at(self, partition: Partition, timestamp: int) -> int:
        since = check_int64("timestamp", timestamp)
        return await self._run(lambda connection: reading.offset_at(connection, partition, since))

    async def trim(self, partition: Partition, before: int) -> Span:
        offset = whole_number("before", before, at_least=0)

        def work(connection: Connection) -> Span:
            place, span = reading.find(connection, partition)
            if offset > span.end:
                raise OffsetBeyondEnd(partition, offset, span.end)
            if offset <= span.first:
                return span
            connection.execute(
                "UPDATE log_partitions SET first = greatest(first, %s) WHERE id = %s AND topic IS NOT NULL",
                (offset, place),
            )
            return reading.find(connection, partition).span

        return await self._run(work)

    async def set_fence(self, fence: Fence) -> None:
        def work(connection: Connection) -> None:
            connection.execute(
                "INSERT INTO log_fences AS known VALUES (%s, %s) ON CONFLICT (name) DO UPDATE"
                " SET epoch = excluded.epoch WHERE known.epoch < excluded.epoch",
                (fence.name, fence.epoch),
            )
            known = connection.execute("SELECT epoch FROM log_fences WHERE name = %s", (fence.name,)).fetchone()
            rules.check_fence(fence, None if known is None else known[0])

        await self._run(work)

    async def _maintain(self, *, in_background: bool) -> None:
        """One process at a time. In the background the others leave it to that one."""
        for name, step in self._steps.steps().items():
            take = partial(self._take, step, in_background=in_background)
            if name == "merge":
                await self._take_all(take, in_background=in_background)
            else:
                while await take():
                    pass

    async def _take(self, step: Step, *, in_background: bool) -> bool:
        """Take a step of maintenance. Returns whether there is more to do."""
        now = self._given_now and self._given_now()

        def work(connection: Connection) -> Committed | None:
            return step(connection, now) if is_alone(connection) else None

        self._appends += 1  # whether other processes append is not known
        while (committed := await self._change(work)) is None and not in_background:  # noqa: ASYNC110 no event comes
            await asyncio.sleep(LOCK_SECONDS)
        return committed is not None and committed()

    # Threads

    def _stop(self) -> None:
        self._writer.close()
        self._tail.close()
        self._sessions.close()

    def _now(self) -> int:
        return rules.milliseconds(self._clock)

    async def _write(self, requests: Sequence[Append]) -> list[Appended | ShardyardError]:
        return await self._writer.append(requests)

    @property
    def _waiting_bytes(self) -> int:
        return self._writer.waiting_bytes

    async def _change_catalog(self, work: Callable[[StoredCatalog], T]) -> T:
        now = self._given_now and self._given_now()
        return await self._change(lambda connection: work(PostgresqlCatalog.to_change(connection, now)))

    async def _look_at_catalog(self, work: Callable[[StoredCatalog], T]) -> T:
        now = self._given_now and self._given_now()
        return await self._run(lambda connection: work(PostgresqlCatalog(connection, now)))

    async def _change(self, work: Callable[[Connection], T]) -> T:
        self._open()
        return await self._sessions.transact(work)

    async def _run(self, work: Callable[[Connection], T]) -> T:
        self._open()
        return await self._sessions.run(work)

    def _ends(self, partition_ids: list[int]) -> dict[int, int]:
        work = self._sessions.submit(lambda session: session.run(lambda db: reading.ends(db, partition_ids)))
        return work.result()
