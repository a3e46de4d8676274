"""Real processes that fail: producers and members are killed (SIGKILL) and stalled (SIGSTOP) at random; on PostgreSQL
its server, too.

    python -m tests.groups.chaos run --seconds 60 --seed 1 --engine postgresql

Each producer records what it is about to append and what was acknowledged; each member records what was delivered to
it. At the end `audit` compares the acknowledged records with the log, and the log with the deliveries: nothing is lost,
nothing is stored twice, keys are in order. Besides, every partition was consumed without a gap, and whatever was
delivered twice was delivered under two ownerships.
"""

import argparse
import asyncio
import contextlib
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from shardyard.groups import Node, Reader, status
from shardyard.log import open_log
from shardyard.model import Fenced, Partition, Record, RetryLater, Stamp
from shardyard.placement import Modulus
from shardyard.registry import open_registry
from shardyard.runtime.clock import SystemClock
from shardyard.runtime.retry import retry
from tests.postgresql import PostgresqlServer, postgresql_server

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from shardyard.pipeline.audit.report import AuditReport

TOPIC = "orders"
GROUP = "billing"
PARTITIONS = 8
KEYS = 5
SESSION_SECONDS = 1.5
PRODUCERS = 3
MEMBERS = 4
CATCH_UP_SECONDS = 60.0
SERVER_FAULT_SECONDS = 2.0
"""Between two faults of the server."""

T = TypeVar("T")


DATABASE = "database.url"
"""The file in the folder with the URL of the PostgreSQL database to use; without it, log and registry are embedded."""


def log_url(folder: Path) -> str:
    return _database(folder) or f"sqlite:///{folder / 'log'}"


def registry_url(folder: Path) -> str:
    return _database(folder) or f"sqlite:///{folder / 'registry.db'}"


def _database(folder: Path) -> str | None:
    return (folder / DATABASE).read_text() if (folder / DATABASE).exists() else None


async def opened(open_it: Callable[[], T]) -> T:
    """Open a log or a registry, as soon as its server is there."""

    async def attempt() -> T:
        return open_it()

    return await retry(attempt, clock=SystemClock())


# The processes


@dataclass
class Journal:
    """What a producer remembers through a SIGKILL: lines in a file, intentions first."""

    path: Path
    numbers: dict[str, int] = field(default_factory=dict)
    sequences: dict[int, int] = field(default_factory=dict)
    open_intention: tuple[int, int, str, int, int] | None = None

    def __post_init__(self) -> None:
        for line in self.path.read_text().splitlines() if self.path.exists() else ():
            if line.startswith("I ") and len(line.split()) == 6:
                _, partition, sequence, key, first, count = line.split()
                self.intend(int(partition), int(sequence), key, int(first), int(count), write=False)
            elif line.startswith("A"):
                self.open_intention = None

    def intend(self, partition: int, sequence: int, key: str, first: int, count: int, *, write: bool = True) -> None:
        self.open_intention = (partition, sequence, key, first, count)
        self.sequences[partition] = sequence
        self.numbers[key] = first + count
        if write:
            self._write(f"I {partition} {sequence} {key} {first} {count}")

    def acknowledged(self) -> None:
        self.open_intention = None
        self._write("A")

    def _write(self, line: str) -> None:
        with self.path.open("a") as file:
            file.write(line + "\n")


async def produce(folder: Path, name: str) -> None:
    journal = Journal(folder / f"{name}.sent")
    rule = Modulus("fnv1a32", PARTITIONS)
    async with await opened(lambda: open_log(log_url(folder))) as log:
        while True:
            if journal.open_intention is None:
                key = f"{name}-{random.randrange(KEYS)}"
                partition = rule.place(key)
                sequence = journal.sequences.get(partition, 0) + 1
                journal.intend(partition, sequence, key, journal.numbers.get(key, 0), random.randint(1, 5))
            assert journal.open_intention is not None
            partition, sequence, key, first, count = journal.open_intention
            records = [Record(f"{key}:{n}", key.encode(), os.urandom(64)) for n in range(first, first + count)]
            with contextlib.suppress(RetryLater):
                await log.append(Partition(TOPIC, partition), records, stamp=Stamp(name, sequence))
                journal.acknowledged()
            await asyncio.sleep(random.uniform(0, 0.005))


async def consume(folder: Path, name: str) -> None:
    notes = (folder / f"{name}.got").open("a", buffering=1)
    registry = await opened(lambda: open_registry(registry_url(folder)))
    async with (
        await opened(lambda: open_log(log_url(folder))) as log,
        Node(log, registry, name=name) as node,
        contextlib.AsyncExitStack() as stack,
    ):

        async def join() -> Reader:
            reader = Reader(GROUP, [TOPIC], node=node, name=name, session_timeout=SESSION_SECONDS, max_records=50)
            return await stack.enter_async_context(reader)

        async for batch in await retry(join, clock=SystemClock()):
            for offset, record in enumerate(batch.records(), batch.first):
                notes.write(f"{batch.partition.index} {batch.epoch} {offset} {record.id}\n")
            await asyncio.sleep(random.uniform(0, 0.01))
            try:
                await retry(batch.commit, clock=SystemClock())
            except Fenced:
                notes.write("fenced\n")


# The fire


class Process:
    """A producer or member that can be killed and started again."""

    module = "tests.groups.chaos"
    """What it runs."""

    def __init__(self, folder: Path, role: str, name: str) -> None:
        self.folder, self.role, self.name = folder, role, name
        self.lives = itertools.count(1)
        self.start()

    def start(self) -> None:
        self.current = self.name if self.role == "produce" else f"{self.name}.{next(self.lives)}"
        command = [sys.executable, "-m", self.module, self.role]
        command += ["--folder", str(self.folder), "--name", self.current]
        with (self.folder / f"{self.name}.err").open("a") as errors:
            self.handle = subprocess.Popen(command, stderr=errors, cwd=Path(__file__).parent.parent.parent)

    def signal(self, number: signal.Signals) -> None:
        self.handle.send_signal(number)

    def kill(self) -> None:
        self.handle.kill()
        self.handle.wait()

    def end(self) -> None:
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGTERM)
        self.handle.wait(30)


@dataclass
class Report:
    kills: int = 0
    stalls: int = 0
    server_faults: int = 0
    acknowledged: int = 0
    stored: int = 0
    delivered: int = 0
    twice: int = 0
    fenced: int = 0
    problems: list[str] = field(default_factory=list)


def run(
    folder: Path, seconds: float, seed: int, *, server: PostgresqlServer | None = None, server_stall: float = 20.0
) -> Report:
    """Kill and stall producers and members for that long, then check. With a server, log and registry are in a database
    of it, and it is killed, restarted, stalled for `server_stall` seconds, and its connections are cut."""
    rng = random.Random(seed)
    with contextlib.ExitStack() as stack:
        if server is not None:
            (folder / DATABASE).write_text(stack.enter_context(server.new_database()))
        asyncio.run(_prepare(folder))
        producers = [Process(folder, "produce", f"p{i}") for i in range(PRODUCERS)]
        members = [Process(folder, "consume", f"m{i}") for i in range(MEMBERS)]
        faults = Faults([*producers, *members], rng, server, server_stall)
        try:
            faults.cause(seconds)
            for producer in producers:
                producer.end()
            asyncio.run(_catch_up(folder, members))
        finally:
            for process in [*producers, *members]:
                process.signal(signal.SIGCONT)
                process.kill()
        from shardyard.pipeline.session import session  # noqa: PLC0415 as in `check`

        spark = session("chaos", master="local[2]", memory="1g", settings={"spark.sql.shuffle.partitions": "2"})
        report = check(folder, spark)
    return replace(report, kills=faults.kills, stalls=faults.stalls, server_faults=faults.server_faults)


async def _prepare(folder: Path) -> None:
    async with open_log(log_url(folder)) as log:
        await log.create_topic(TOPIC, PARTITIONS)


class Faults:
    """Kills and stalls processes, and the server if there is one."""

    def __init__(
        self,
        processes: Sequence[Process],
        rng: random.Random,
        server: PostgresqlServer | None,
        server_stall: float,
        longest_pause: float = 0.6,
    ) -> None:
        """`longest_pause`: seconds between two faults, at the most."""
        self.kills = self.stalls = self.server_faults = 0
        self._processes = processes
        self._rng = rng
        self._server = server
        self._server_stall = server_stall
        self._longest_pause = longest_pause
        self._server_due = time.monotonic() + SERVER_FAULT_SECONDS

    def cause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(self._rng.uniform(0.1, self._longest_pause))
            if self._server is not None and time.monotonic() > self._server_due:
                self._harm_server(self._server)
                self._server_due = time.monotonic() + SERVER_FAULT_SECONDS
            else:
                self._harm(self._rng.choice(self._processes))

    def _harm(self, victim: Process) -> None:
        if self._rng.random() < 0.5:
            victim.kill()
            self.kills += 1
            victim.start()
        else:
            victim.signal(signal.SIGSTOP)
            self.stalls += 1
            time.sleep(self._rng.choice([0.1, 0.5, SESSION_SECONDS + 1.0]))
            victim.signal(signal.SIGCONT)

    def _harm_server(self, server: PostgresqlServer) -> None:
        """Each way in turn."""
        match self.server_faults % 4:
            case 0:
                server.kill()
                server.start()
            case 1:
                server.stall()
                time.sleep(self._server_stall)
                server.resume()
            case 2:
                server.cut_connections()
            case _:
                server.stop()
                server.start()
        self.server_faults += 1


async def _catch_up(folder: Path, members: list[Process]) -> None:
    until = time.monotonic() + CATCH_UP_SECONDS
    registry = open_registry(registry_url(folder))
    async with open_log(log_url(folder)) as log:
        while any(row.lag for row in await status(log, registry, GROUP)):
            dead = [m.name for m in members if m.handle.poll() is not None]
            assert not dead, f"members ended by themselves: {dead}"
            assert time.monotonic() < until, f"not caught up: {await status(log, registry, GROUP)}"
            await asyncio.sleep(0.1)
        alive = {m.current for m in members}
        while {row.owner for row in await status(log, registry, GROUP)} != alive:  # everyone got its share again
            assert time.monotonic() < until, f"{alive} are there: {await status(log, registry, GROUP)}"
            await asyncio.sleep(0.1)
    registry.close()


# The check


def check(folder: Path, spark: "SparkSession") -> Report:
    """Compare what the processes recorded in the folder with its log."""
    from shardyard.pipeline.audit import audit as auditing  # noqa: PLC0415 Spark: the processes that are killed need not load it

    report = Report()
    given = _deliveries(folder)
    topic = spark.read.format("shardyard").options(log=log_url(folder), topics=TOPIC).load().cache()
    acknowledged = spark.createDataFrame(list(_acknowledged(folder)), auditing.SENT)
    stored = auditing.audit(acknowledged, auditing.delivered_from_topic(topic))
    table = spark.createDataFrame(
        [
            (partition, turn, record)
            for partition, by_epoch in given.items()
            for turn, (_, record) in enumerate(itertools.chain.from_iterable(by_epoch.values()))
        ],
        "partition int, turn long, id string",
    )
    delivered = auditing.audit(
        auditing.sent_from_topic(topic),
        auditing.delivered_from_table(table, id="id", partition="partition", order="turn"),
    )
    places = {
        (row["partition"], row["offset"]): row["id"] for row in topic.select("partition", "offset", "id").collect()
    }
    topic.unpersist()

    report.acknowledged, report.stored = stored.sent, delivered.sent
    report.delivered, report.twice = delivered.delivered, delivered.duplicated
    # A record whose acknowledgement was lost with its producer is in the log unexpectedly, and rightly so.
    _add_problems("from producers to the log", stored, ("lost", "duplicated", "out_of_order"), report)
    _add_problems("from the log to members", delivered, ("lost", "unexpected", "out_of_order"), report)
    for partition, by_epoch in given.items():
        _check_ownerships(partition, by_epoch, places, report)
    report.fenced = sum(path.read_text().count("fenced\n") for path in folder.glob("*.got"))
    report.problems.extend(
        f"{path.name} has a traceback: {text[-600:]}"
        for path in folder.glob("*.err")
        if "Traceback" in (text := path.read_text())
    )
    return report


def _add_problems(way: str, found: "AuditReport", forbidden: Iterable[str], report: Report) -> None:
    for name in forbidden:
        if count := getattr(found, name):
            report.problems.append(f"{way}: {count} {name}, such as {found.to_json()['examples'][name][0]}")


def _acknowledged(folder: Path) -> Iterator[tuple[str, bytes, int, int, None]]:
    """As rows of `SENT`; the position is the number among those of the key."""
    for path in folder.glob("*.sent"):
        intention: list[tuple[str, bytes, int, int, None]] = []
        for line in path.read_text().splitlines():
            if line.startswith("I "):
                _, partition, _, key, first, count = line.split()
                numbers = range(int(first), int(first) + int(count))
                intention = [(f"{key}:{n}", key.encode(), int(partition), n, None) for n in numbers]
            else:
                yield from intention


def _deliveries(folder: Path) -> dict[int, dict[int, list[tuple[int, str]]]]:
    """By partition and the owner's epoch: the offsets and records it was given, in order."""
    given: defaultdict[int, defaultdict[int, list[tuple[int, str]]]] = defaultdict(lambda: defaultdict(list))
    for path in folder.glob("*.got"):
        for line in path.read_text().splitlines():
            parts = line.split()
            if len(parts) == 4:
                given[int(parts[0])][int(parts[1])].append((int(parts[2]), parts[3]))
    return {partition: dict(sorted(by_epoch.items())) for partition, by_epoch in given.items()}


def _check_ownerships(
    partition: int, by_epoch: dict[int, list[tuple[int, str]]], places: dict[tuple[int, int], str], report: Report
) -> None:
    """What an audit can't know: a record is redelivered only to another owner, each owner continues at or before the
    position that the last one reached, and offsets are those of the log."""
    reached = 0
    for epoch, records in by_epoch.items():
        offsets = [offset for offset, _ in records]
        if offsets != list(range(offsets[0], offsets[0] + len(offsets))):
            report.problems.append(f"partition {partition}, epoch {epoch}: not each record once and in order")
        if offsets[0] > reached:
            report.problems.append(f"partition {partition}, epoch {epoch}: begins at {offsets[0]}, skipping {reached}")
        if any(places.get((partition, offset)) != record for offset, record in records):
            report.problems.append(f"partition {partition}, epoch {epoch}: offsets are not those of the log")
        reached = max(reached, offsets[-1] + 1)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=["run", "produce", "consume"])
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--name", default="")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--engine", choices=["sqlite", "postgresql"], default="sqlite")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    options = parser.parse_args()
    if options.role == "run":
        folder = options.folder or Path(tempfile.mkdtemp(prefix="shardyard-chaos-"))
        print(f"seed {options.seed}, {options.seconds:g} s, in {folder}")
        with contextlib.ExitStack() as stack:
            server = stack.enter_context(postgresql_server()) if options.engine == "postgresql" else None
            report = run(folder, options.seconds, options.seed, server=server)
        print(report)
        if report.problems:
            return 1
        shutil.rmtree(folder)
        return 0
    work = produce if options.role == "produce" else consume

    async def until_told_to_end() -> None:
        task = asyncio.ensure_future(work(options.folder, options.name))
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(until_told_to_end())
    return 0


if __name__ == "__main__":
    sys.exit(main())
