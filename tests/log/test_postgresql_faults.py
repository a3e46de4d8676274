"""The log on a PostgreSQL server that is killed, cut off, stalled, or out of disk space, while producers append."""

import asyncio
import contextlib
import os
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import count
from pathlib import Path

import psycopg
import pytest

from shardyard.log.postgresql import PostgresqlLog, sessions
from shardyard.model import Busy, DatabaseUnavailable, NoRoom, OutcomeUnknown, Partition, Record, RetryLater, Stamp
from shardyard.runtime.postgresql import RESPONSE_SECONDS
from tests.disks import Ballast, small_disk
from tests.log.samples import TIMEOUT_SECONDS, awaited, contents
from tests.postgresql import PASSWORD, PostgresqlServer, lend, postgresql_server

PRODUCERS = 6
PARTITIONS = [Partition("t", i) for i in range(3)]
BATCH = 3
"""Records in a batch."""
STALL_SECONDS = float(os.environ.get("STALL", "4"))
"""How long a server that hangs does so; `make chaos` takes 20."""
PROOF_SECONDS = 80.0
"""How long to cause trouble until what a test is about has happened: it is a matter of chance."""

pytestmark = [pytest.mark.server, pytest.mark.processes, pytest.mark.timeout(300)]


def batch(name: str, size: int) -> list[Record]:
    return [Record(f"{name}:{i}", None, b"x" * size, timestamp=1) for i in range(BATCH)]


def home(number: int) -> Partition:
    """The partition of a producer."""
    return PARTITIONS[number % len(PARTITIONS)]


class Producers:
    """Producers that retry with their stamps whatever may succeed later, and know what was acknowledged."""

    def __init__(self, log: PostgresqlLog, size: int = 500) -> None:
        """`size`: of a value in bytes."""
        self.log = log
        self.acknowledged = dict.fromkeys(range(PRODUCERS), 0)
        self.errors: list[RetryLater] = []
        self.longest = 0.0
        """Seconds that a call took to succeed or fail."""
        self._size = size
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        self._tasks = [asyncio.create_task(self._produce(number)) for number in self.acknowledged]
        yield
        self._stopping = True
        await asyncio.gather(*self._tasks)

    async def progress(self) -> None:
        """Wait until each producer has got some acknowledgements more."""
        before = dict(self.acknowledged)
        await self.until(lambda: all(self.acknowledged[number] >= before[number] + 5 for number in before))

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(3 * TIMEOUT_SECONDS):
            while not condition():
                await asyncio.sleep(0.01)
                for task in self._tasks:
                    if task.done():
                        task.result()

    @property
    def is_proven(self) -> bool:
        """Whether what the test is about has happened."""
        return True

    async def _produce(self, number: int) -> None:
        while not self._stopping:
            sequence = self.acknowledged[number]
            rows = batch(f"{number}:{sequence}", self._size)
            started = time.monotonic()
            try:
                await self.log.append(home(number), rows, stamp=Stamp(f"p{number}", sequence))
            except RetryLater as error:
                self.errors.append(error)
                await asyncio.sleep(0.05)
            else:
                self.acknowledged[number] += 1
            self.longest = max(self.longest, time.monotonic() - started)

    async def check(self) -> None:
        """Everything that was acknowledged is there once, in order, and nothing by halves."""
        for partition in PARTITIONS:
            ids = [record.id for record in await contents(self.log, partition)]
            for number in self.acknowledged:
                if home(number) == partition:
                    mine = [id_ for id_ in ids if id_.startswith(f"{number}:")]
                    assert mine == [f"{number}:{s}:{i}" for s in range(self.acknowledged[number]) for i in range(BATCH)]
        self.check_errors()

    def check_errors(self) -> None:
        """They name the database, and do not show the password."""
        for error in self.errors:
            assert PASSWORD not in str(error)
            assert "127.0.0.1" in str(error)
            assert "\n" not in str(error)


class ProducersWithoutStamps(Producers):
    """Producers that send each batch once, and know what the log said about it."""

    def __init__(self, log: PostgresqlLog) -> None:
        super().__init__(log)
        self.outcomes: dict[str, type[RetryLater] | None] = {}
        """By the name of a batch; None: it was acknowledged."""

    @property
    def is_proven(self) -> bool:
        return {OutcomeUnknown, DatabaseUnavailable, None} <= set(self.outcomes.values())

    async def _produce(self, number: int) -> None:
        for attempt in count():
            if self._stopping:
                return
            name = f"{number}:{attempt}"
            try:
                await self.log.append(home(number), batch(name, self._size))
            except RetryLater as error:
                self.errors.append(error)
                self.outcomes[name] = type(error)
                await asyncio.sleep(0.05)
            else:
                self.outcomes[name] = None
                self.acknowledged[number] += 1

    async def check(self) -> None:
        """What was acknowledged is there once, what was refused is not, and what is unknown is there once or not."""
        stored: Counter[str] = Counter()
        for partition in PARTITIONS:
            stored.update(record.id for record in await contents(self.log, partition))
        for name, error in self.outcomes.items():
            times = {stored.pop(f"{name}:{i}", 0) for i in range(BATCH)}
            allowed: dict[object, list[set[int]]] = {None: [{1}], OutcomeUnknown: [{0}, {1}]}
            assert times in allowed.get(error, [{0}]), f"{name} is there {times} times, after {error}"
        assert not stored
        self.check_errors()


async def endure(
    server: PostgresqlServer,
    trouble: Callable[[], Awaitable[None]],
    make: Callable[[PostgresqlLog], Producers] = Producers,
) -> Producers:
    """Append through trouble, at least three times."""
    async with PostgresqlLog(server.url("postgres"), maintain_every=0.05) as log:
        await log.create_topic("t", len(PARTITIONS))
        producers = make(log)
        async with producers.running():
            deadline = time.monotonic() + PROOF_SECONDS
            for turn in count():
                if turn >= 3 and (producers.is_proven or time.monotonic() > deadline):
                    break
                await producers.progress()
                await trouble()
            await producers.progress()
        await producers.check()
        return producers


async def kill_and_start(server: PostgresqlServer) -> None:
    server.kill()
    await asyncio.sleep(0.3)
    await asyncio.to_thread(server.start)


def test_what_was_acknowledged_survives_a_server_that_is_killed_under_load(own_postgresql: PostgresqlServer) -> None:
    producers = asyncio.run(endure(own_postgresql, lambda: kill_and_start(own_postgresql)))
    assert producers.errors


def test_an_append_without_a_stamp_is_stored_once_or_not_at_all_and_the_log_knows_or_says_that_it_does_not(
    own_postgresql: PostgresqlServer,
) -> None:
    producers = asyncio.run(endure(own_postgresql, lambda: kill_and_start(own_postgresql), ProducersWithoutStamps))
    assert producers.is_proven, "no commit was interrupted, or none was refused"


def test_nothing_is_lost_or_doubled_when_connections_are_cut_under_load(own_postgresql: PostgresqlServer) -> None:
    async def trouble() -> None:
        for _ in range(10):
            await asyncio.to_thread(own_postgresql.cut_connections)
            await asyncio.sleep(0.02)

    asyncio.run(endure(own_postgresql, trouble))


def test_a_server_that_hangs_gives_clear_errors_in_bounded_time_and_is_used_again_when_it_continues(
    own_postgresql: PostgresqlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "RESPONSE_SECONDS", min(RESPONSE_SECONDS, STALL_SECONDS / 2))

    async def trouble() -> None:
        own_postgresql.stall()
        await asyncio.sleep(STALL_SECONDS)
        own_postgresql.resume()

    producers = asyncio.run(endure(own_postgresql, trouble))
    assert any("no response" in str(error) or "unavailable" in str(error) for error in producers.errors)
    assert producers.longest < TIMEOUT_SECONDS


@awaited
async def test_an_append_is_not_acknowledged_before_a_synchronous_standby_has_it(
    own_postgresql: PostgresqlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "RESPONSE_SECONDS", 1.0)
    monkeypatch.setattr(sessions, "BUSY_SECONDS", 1.0)
    acknowledged: list[str] = []

    def require_standby(name: str) -> None:
        own_postgresql.execute(f"ALTER SYSTEM SET synchronous_standby_names = '{name}'")
        own_postgresql.execute("SELECT pg_reload_conf()")

    async def append(name: str) -> bool:
        """Whether it was acknowledged."""
        try:
            await log.append(PARTITIONS[0], batch(name, 10))
        except (OutcomeUnknown, Busy):  # busy: a commit that waits for the standby has locked the partition
            return False
        acknowledged.append(name)
        return True

    def waits_for_standby() -> bool:
        with psycopg.connect(own_postgresql.url("postgres")) as connection:
            waiting = connection.execute("SELECT 1 FROM pg_stat_activity WHERE wait_event = 'SyncRep'")
            return waiting.fetchone() is not None

    async with PostgresqlLog(own_postgresql.url("postgres"), maintain_every=None) as log:
        await log.create_topic("t", len(PARTITIONS))
        require_standby("gone")
        attempts = count()
        while not waits_for_standby():
            await append(f"before {next(attempts)}")
        assert not await append("without it")
        require_standby("")
        while not await append(f"after {next(attempts)}"):
            pass
        stored = Counter(record.id for record in await contents(log, PARTITIONS[0]))
    assert set(stored.values()) == {1}
    assert {f"{name}:{i}" for name in acknowledged for i in range(BATCH)} <= stored.keys()


# A disk that is full -------------------------------------------------------------------------------------------------


async def fill_up(url: str, make_room: Callable[[], None]) -> list[RetryLater]:
    """Append until the disk is full, then make room, and append again. Returns the errors that there were."""
    async with PostgresqlLog(url, maintain_every=None) as log:
        await log.create_topic("t", len(PARTITIONS))
        producers = Producers(log, size=20_000)
        async with producers.running():
            await producers.until(lambda: len(producers.errors) > 2 * PRODUCERS)
            await asyncio.to_thread(make_room)
            await producers.progress()
        await producers.check()
        return producers.errors


def test_a_disk_that_is_full_of_records_is_reported_and_appends_continue_when_there_is_room() -> None:
    with small_disk(48) as disk, postgresql_server() as server:
        ballast = Ballast(disk, megabytes=16)
        (disk / "tables").mkdir()
        lend(disk / "tables")
        server.execute(f"CREATE TABLESPACE small LOCATION '{disk / 'tables'}'")
        server.execute("CREATE DATABASE yard TABLESPACE small")
        errors = asyncio.run(fill_up(server.url("yard"), ballast.drop))
        server.execute("DROP DATABASE yard WITH (FORCE)")
    assert {type(error) for error in errors} == {NoRoom}
    assert "no space left on the disk for postgresql://***@127.0.0.1" in str(errors[0])


def test_what_was_acknowledged_survives_a_server_that_stops_because_its_wal_does_not_fit_on_the_disk() -> None:
    with small_disk(64) as disk, postgresql_server(max_wal_size="1GB") as server:
        move_wal(server, disk)
        ballast = Ballast(disk, megabytes=20)

        def make_room() -> None:
            ballast.drop()
            server.recover()

        errors = asyncio.run(fill_up(server.url("postgres"), make_room))
        assert "PANIC" in (server.folder / "server.log").read_text()
    assert {DatabaseUnavailable} <= {type(error) for error in errors} <= {DatabaseUnavailable, OutcomeUnknown}


def move_wal(server: PostgresqlServer, disk: Path) -> None:
    """Let the server write its WAL to this disk."""
    server.stop()
    wal = server.folder / "data" / "pg_wal"
    subprocess.run(["cp", "--archive", wal, disk], check=True)
    shutil.rmtree(wal)
    wal.symlink_to(disk / "pg_wal")
    server.start()
