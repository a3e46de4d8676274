"""Fan-out with real processes that fail: messaging servers, coordinators and workers are killed (SIGKILL), stalled
(SIGSTOP) and stopped (SIGTERM) at random, and the mode is migrated back and forth, while users' clients post to
channels, join them, go away and come back; on PostgreSQL its connections are cut, too.

    python -m tests.fanout.chaos run --seconds 60 --seed 1 --engine postgresql

Clients keep a ledger of what they posted and received; `Ledger.problems` says what is checked. At the end `audit`
compares the same ledgers, and the posts of all channels are paged through.
"""

import argparse
import asyncio
import contextlib
import logging
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from shardyard.fanout.topics import open_all, open_presence
from shardyard.log import open_log
from tests.fanout.posting_client import PostingClient
from tests.messaging.chaos import audit
from tests.messaging.ledger import Ledger
from tests.postgresql import PostgresqlServer, postgresql_server
from tests.server_process import ServerProcess

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MESSENGERS, COORDINATORS, WORKERS = 2, 2, 2
USERS = 16
CHANNELS = 8
CHANNELS_PER_USER = 3
PARTITIONS = 6
"""Of `inbox`."""
SESSION_SECONDS = 5.0
LEAST_FAULTS = 2
QUIET_SECONDS = 90.0
"""How long it may take at the end until every client has everything."""
MIGRATE_SECONDS = 30.0
"""How long a migration is tried again that was refused because all workers, or all coordinators, were down."""
NONE_RUNS = "is running, and without one nothing would be delivered"
MOST_PRINTED = 5
"""Problems."""


@dataclass
class Report:
    kills: int = 0
    stalls: int = 0
    stops: int = 0
    migrations: int = 0
    database_faults: int = 0
    away: int = 0
    """How often a client broke its connection."""
    joins: int = 0
    """While the load was on."""
    posted: int = 0
    acknowledged: int = 0
    received: int = 0
    paged: int = 0
    """Posts of the history."""
    problems: list[str] = field(default_factory=list)

    @property
    def faults(self) -> int:
        """Of processes."""
        return self.kills + self.stalls + self.stops

    def __str__(self) -> str:
        figures = ", ".join(f"{value} {name}" for name, value in vars(self).items() if name != "problems")
        return f"{figures}; {len(self.problems)} problems"


class Chaos:
    """One run."""

    def __init__(
        self,
        messengers: Sequence[ServerProcess],
        others: Sequence[ServerProcess],
        stores: Sequence[str],
        rng: random.Random,
        database: PostgresqlServer | None,
    ) -> None:
        """`others`: coordinators and workers."""
        self.ledger = Ledger()
        self.report = Report()
        self._processes = [*messengers, *others]
        self._urls = [messenger.url for messenger in messengers]
        self._stores = stores
        self._rng = rng
        self._database = database
        self._channels = [f"channel-{i}" for i in range(CHANNELS)]
        self._clients: list[PostingClient] = []
        self._until = 0.0

    async def run(self, seconds: float, migrations: Sequence[str]) -> Report:
        """Cause trouble for that long. `migrations`: the modes to migrate to meanwhile, one after the other."""
        await asyncio.gather(*(process.ready() for process in self._processes))
        for number in range(USERS):
            for device in range(self._rng.choice([1, 1, 2])):
                notes = self.ledger.new_client(f"user-{number}", f"d{device}")
                self._clients.append(PostingClient(self.ledger, notes, self._urls))
        await asyncio.gather(*(client.start() for client in self._clients))
        await asyncio.gather(*(self._join_some(client) for client in self._clients))
        try:
            await self._cause_trouble(seconds, migrations)
        finally:
            await asyncio.gather(*(client.stop() for client in self._clients))
        await asyncio.gather(*(self._stop(process) for process in self._processes))
        return self._finish()

    async def _cause_trouble(self, seconds: float, migrations: Sequence[str]) -> None:
        self._until = time.monotonic() + seconds
        async with asyncio.TaskGroup() as group:
            for client in self._clients:
                group.create_task(self._use(client))
            group.create_task(self._cause_faults())
            group.create_task(self._migrate(seconds, migrations))
        await self._become_quiet()
        if not self.report.problems:
            await self._page_through_posts()

    # Load

    async def _join_some(self, client: PostingClient) -> None:
        for channel in self._rng.sample(self._channels, CHANNELS_PER_USER):
            await client.join(channel)

    async def _use(self, client: PostingClient) -> None:
        """Post bursts to its channels, join another one at times, go away at times."""
        while time.monotonic() < self._until:
            await asyncio.sleep(self._rng.expovariate(1.5))
            chance = self._rng.random()
            joined = [channel for channel in self._channels if client.notes.user in self.ledger.members[channel]]
            if chance < 0.05:
                self.report.away += 1
                await client.restart(self._rng.choice([0.0, 0.0, 0.3, 2.0, 7.0]))
            elif chance < 0.07 and len(joined) < CHANNELS:
                self.report.joins += 1
                await client.join(self._rng.choice([each for each in self._channels if each not in joined]))
            else:
                channels = [self._rng.choice(joined) for _ in range(self._rng.choice([1, 2, 5, 20]))]
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._until - time.monotonic()):
                        await client.post(channels, "." * self._rng.choice([0, 0, 100, 3000]))

    # Faults

    async def _cause_faults(self) -> None:
        """One after another. On a slow machine it takes longer until there were a few."""
        while self.report.faults < LEAST_FAULTS or time.monotonic() < self._until:
            await asyncio.sleep(self._rng.uniform(0.2, 1.5))
            if self._database is not None and self._rng.random() < 0.2:
                self.report.database_faults += 1
                self.ledger.note("connections to the database are cut")
                await asyncio.to_thread(self._database.cut_connections)
            else:
                await self._harm(self._rng.choice(self._processes))

    async def _harm(self, process: ServerProcess) -> None:
        kind = self._rng.choices(["kill", "stall", "stop"], [4, 3, 2])[0]
        if kind == "stall":
            self.report.stalls += 1
            self.ledger.note(f"{process.name} is stalled")
            process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(self._rng.choice([0.3, 2.0, SESSION_SECONDS + 1.5]))
            process.send_signal(signal.SIGCONT)
            self.ledger.note(f"{process.name} goes on")
            return
        if kind == "kill":
            self.report.kills += 1
            self.ledger.note(f"{process.name} is killed")
            await process.end()
        else:
            self.report.stops += 1
            self.ledger.note(f"{process.name} is stopped")
            await self._stop(process)
        await asyncio.sleep(self._rng.choice([0.0, 0.0, SESSION_SECONDS + 1]))
        process.start()
        self.ledger.note(f"{process.name} starts")
        if self._rng.random() < 0.7:
            with contextlib.suppress(TimeoutError):
                await process.ready(10.0)

    async def _stop(self, process: ServerProcess) -> None:
        try:
            await process.end(signal.SIGTERM)
        except subprocess.TimeoutExpired:
            self.report.problems.append(f"{process.name} does not stop: {process.output.read_text()[-500:]}")
            await process.end()

    async def _migrate(self, seconds: float, modes: Sequence[str]) -> None:
        for mode in modes:
            await asyncio.sleep(seconds / (len(modes) + 1))
            self.ledger.note(f"migration to {mode}")
            command = [sys.executable, "-m", "shardyard.cli", "fanout", "migrate", "--to", mode, *self._stores]
            give_up = time.monotonic() + MIGRATE_SECONDS
            while True:
                done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False)
                if NONE_RUNS not in done.stderr or time.monotonic() > give_up:
                    break
                await asyncio.sleep(0.5)  # all of them were killed, and none has joined again yet
            self.ledger.note(f"migrated to {mode}")
            self.report.migrations += 1
            if done.returncode:
                self.report.problems.append(f"migrating to {mode} failed: {done.stderr[-1000:]}")

    # The end

    async def _become_quiet(self) -> None:
        """Wait until every client is connected and has everything; then a moment longer, for what comes twice."""
        for process in self._processes:
            if process.handle.poll() is not None:
                process.start()
        await asyncio.gather(*(process.ready() for process in self._processes))
        self.ledger.note("all processes run")
        until = time.monotonic() + QUIET_SECONDS
        while time.monotonic() < until:
            if all(client.is_caught_up and not client.unanswered for client in self._clients) and not any(
                True for _ in self.ledger.missing()
            ):
                break
            await asyncio.sleep(0.3)
        else:
            self.report.problems += [
                f"{client.notes.name} is not at rest: {client.unanswered} unanswered, {client.notes.events[-10:]}"
                for client in self._clients
                if client.unanswered or not client.is_caught_up
            ]
        self.ledger.note("quiet")
        await asyncio.sleep(1.5)

    async def _page_through_posts(self) -> None:
        """Each stored post is in its channel once."""
        by_channel: defaultdict[str, set[str]] = defaultdict(set)
        for each in self.ledger.stored().values():
            by_channel[each.recipient].add(each.text)
        for channel, expected in by_channel.items():
            reader = next(client for client in self._clients if client.notes.user in self.ledger.members[channel])
            found: list[tuple[int, str]] = []
            for _ in range(50):
                found = await reader.page_through(channel, self._rng.choice([7, 50, 200]))
                if len(found) >= len(expected):
                    break
                await asyncio.sleep(0.2)
            texts = [text for _, text in found]
            self.report.paged += len(texts)
            if [id_ for id_, _ in found] != sorted({id_ for id_, _ in found}, reverse=True):
                self.report.problems.append(f"the posts of {channel} are not in order, or some are there twice")
            if set(texts) != expected:
                self.report.problems.append(
                    f"the posts of {channel} have {set(texts) - expected} and lack {expected - set(texts)}"
                )

    def _finish(self) -> Report:
        ledger, report = self.ledger, self.report
        report.posted = len(ledger.sendings)
        report.acknowledged = sum(each.id is not None for each in ledger.sendings.values())
        report.received = sum(len(client.receipts) for client in ledger.clients)
        report.problems += ledger.problems()
        for process in self._processes:
            text = process.output.read_text()
            if "Traceback" in text:
                at = text.index("Traceback")
                report.problems.append(f"{process.output} has a traceback: {text[max(at - 300, 0) : at + 3000]}")
        return report


@contextlib.contextmanager
def _processes(folder: Path, stores: list[str]) -> Iterator[tuple[list[ServerProcess], list[ServerProcess]]]:
    """Messaging servers, and coordinators and workers."""
    history = [] if "postgresql" in stores[1] else ["--history", f"sqlite:///{folder / 'history.db'}"]
    serving = ["messenger", *stores, *history, "--partitions", str(PARTITIONS), "--rate", "1000"]
    started: list[ServerProcess] = []

    def start(count: int, name: str, arguments: list[str]) -> list[ServerProcess]:
        new = [ServerProcess(folder, f"{name}-{i}", arguments) for i in range(count)]
        started.extend(new)
        return new

    try:
        messengers = start(MESSENGERS, "messenger", serving)
        others = start(COORDINATORS, "coordinator", ["coordinator", *stores])
        others += start(WORKERS, "worker", ["fanout-worker", *stores])
        yield messengers, others
    finally:
        for process in started:
            process.discard()


async def _create_topics(url: str) -> None:
    """So that channels are on when a messaging server starts. A server that finds the topics later tells the clients of
    its channels' members that they may have missed posts."""
    async with open_log(url) as log:
        await open_presence(log, PARTITIONS)
        await open_all(log)


def run(
    folder: Path,
    seconds: float,
    seed: int,
    *,
    migrations: Sequence[str] = ("replicated", "partitioned"),
    database: PostgresqlServer | None = None,
    spark: "SparkSession | None" = None,
) -> Report:
    """Cause faults for that long, then check. With `spark`, the audit job checks as well."""
    with contextlib.ExitStack() as stack:
        if database is None:
            stores = ["--log", f"sqlite:///{folder / 'log'}", "--registry", f"sqlite:///{folder / 'registry.db'}"]
        else:
            stores = ["--log", stack.enter_context(database.new_database())]
        asyncio.run(_create_topics(stores[1]))
        messengers, others = stack.enter_context(_processes(folder, stores))
        chaos = Chaos(messengers, others, stores, random.Random(seed), database)
        report = asyncio.run(chaos.run(seconds, migrations))
    if spark is not None:
        report.problems += audit(chaos.ledger, spark)
    return report


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=["run"])
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--engine", choices=["sqlite", "postgresql"], default="sqlite")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--audit", action="store_true", help="let the audit job check, too")
    options = parser.parse_args()
    logging.getLogger("shardyard.client").setLevel(logging.ERROR)  # that connections are lost is no news here
    folder = options.folder or Path(tempfile.mkdtemp(prefix="shardyard-chaos-"))
    print(f"seed {options.seed}, {options.seconds:g} s, {options.engine}, in {folder}")
    spark: SparkSession | None = None
    if options.audit:
        from shardyard.pipeline.session import session  # noqa: PLC0415 Spark: not every run needs it

        spark = session("chaos", master="local[2]", memory="1g", settings={"spark.sql.shuffle.partitions": "2"})
    with contextlib.ExitStack() as stack:
        database = stack.enter_context(postgresql_server()) if options.engine == "postgresql" else None
        report = run(folder, options.seconds, options.seed, database=database, spark=spark)
    print(f"seed {options.seed}: {report}")
    for problem in report.problems[:MOST_PRINTED]:
        print(problem)
    if report.problems:
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
