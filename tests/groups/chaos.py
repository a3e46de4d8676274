"""Real processes under fire: producers and members are killed (SIGKILL) and stalled (SIGSTOP) at random.

    python -m tests.groups.chaos run --seconds 60 --seed 1

Each producer notes what it is about to append and what was acknowledged; each member notes what it was given. At the
end the notes are held against the log: nothing acknowledged is lost or stored twice, keys are in order, every partition
was worked through without a gap, and whatever was delivered twice was delivered under two ownerships.
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
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from shardyard.groups import Member, Node, status
from shardyard.log import SqliteLog, Stamp
from shardyard.model import Fenced, Partition, Record, RetryLater
from shardyard.placement import Modulus
from shardyard.registry import open_registry

TOPIC = "orders"
GROUP = "billing"
PARTITIONS = 8
KEYS = 5
SESSION_SECONDS = 1.5
PRODUCERS = 3
MEMBERS = 4
CATCH_UP_SECONDS = 60.0


def _log(folder: Path) -> SqliteLog:
    return SqliteLog(folder / "log")


def _registry_url(folder: Path) -> str:
    return f"sqlite:///{folder / 'registry.db'}"


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
    async with _log(folder) as log:
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
    registry = open_registry(_registry_url(folder))
    async with (
        _log(folder) as log,
        Node(log, registry, name=name) as node,
        Member(GROUP, [TOPIC], node=node, name=name, session_timeout=SESSION_SECONDS, max_records=50) as member,
    ):
        async for batch in member:
            for offset, record in enumerate(batch.records(), batch.first):
                notes.write(f"{batch.partition.index} {batch.epoch} {offset} {record.id}\n")
            await asyncio.sleep(random.uniform(0, 0.01))
            try:
                await batch.commit()
            except Fenced:
                notes.write("fenced\n")


# The fire


class Process:
    """A producer or member that can be killed and started again."""

    def __init__(self, folder: Path, role: str, name: str) -> None:
        self.folder, self.role, self.name = folder, role, name
        self.lives = itertools.count(1)
        self.start()

    def start(self) -> None:
        self.current = self.name if self.role == "produce" else f"{self.name}.{next(self.lives)}"
        command = [sys.executable, "-m", "tests.groups.chaos", self.role]
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
    acknowledged: int = 0
    stored: int = 0
    delivered: int = 0
    twice: int = 0
    fenced: int = 0
    problems: list[str] = field(default_factory=list)


def run(folder: Path, seconds: float, seed: int) -> Report:
    """Let producers and members work under fire for that long, then check."""
    rng = random.Random(seed)
    report = Report()
    asyncio.run(_prepare(folder))
    producers = [Process(folder, "produce", f"p{i}") for i in range(PRODUCERS)]
    members = [Process(folder, "consume", f"m{i}") for i in range(MEMBERS)]
    try:
        _fire([*producers, *members], rng, seconds, report)
        for producer in producers:
            producer.end()
        asyncio.run(_catch_up(folder, members))
    finally:
        for process in [*producers, *members]:
            process.signal(signal.SIGCONT)
            process.kill()
    _check(folder, asyncio.run(_stored(folder)), report)
    return report


async def _prepare(folder: Path) -> None:
    async with _log(folder) as log:
        await log.create_topic(TOPIC, PARTITIONS)


def _fire(processes: list[Process], rng: random.Random, seconds: float, report: Report) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(rng.uniform(0.1, 0.6))
        victim = rng.choice(processes)
        if rng.random() < 0.5:
            victim.kill()
            report.kills += 1
            victim.start()
        else:
            victim.signal(signal.SIGSTOP)
            report.stalls += 1
            time.sleep(rng.choice([0.1, 0.5, SESSION_SECONDS + 1.0]))
            victim.signal(signal.SIGCONT)


async def _catch_up(folder: Path, members: list[Process]) -> None:
    until = time.monotonic() + CATCH_UP_SECONDS
    registry = open_registry(_registry_url(folder))
    async with _log(folder) as log:
        while any(row.lag for row in await status(log, registry, GROUP)):
            dead = [m.name for m in members if m.handle.poll() is not None]
            assert not dead, f"members ended by themselves: {dead}"
            assert time.monotonic() < until, f"not caught up: {await status(log, registry, GROUP)}"
            await asyncio.sleep(0.1)
        alive = {m.current for m in members}
        while {row.owner for row in await status(log, registry, GROUP)} != alive:  # nobody was left out for good
            assert time.monotonic() < until, f"{alive} are there: {await status(log, registry, GROUP)}"
            await asyncio.sleep(0.1)
    registry.close()


# The check


def _check(folder: Path, stored: dict[int, list[str]], report: Report) -> None:
    report.stored = sum(map(len, stored.values()))
    acknowledged = set(_acknowledged(folder))
    report.acknowledged = len(acknowledged)
    everything = [record for records in stored.values() for record in records]
    if lost := acknowledged - set(everything):
        report.problems.append(f"{len(lost)} acknowledged records are not in the log, such as {min(lost)}")
    if len(everything) != len(set(everything)):
        report.problems.append("records are in the log twice")
    for partition, ids in stored.items():
        _check_key_order(partition, ids, report)
        _check_deliveries(partition, ids, _deliveries(folder, partition), report)
    report.fenced = sum(path.read_text().count("fenced\n") for path in folder.glob("*.got"))
    report.problems.extend(
        f"{path.name} has a traceback: {text[-600:]}"
        for path in folder.glob("*.err")
        if "Traceback" in (text := path.read_text())
    )


async def _stored(folder: Path) -> dict[int, list[str]]:
    stored: dict[int, list[str]] = {}
    async with _log(folder) as log:
        for index in range(PARTITIONS):
            ids, offset = list[str](), 0
            while len(batch := await log.read(Partition(TOPIC, index), offset)):
                ids += batch.data["id"].to_pylist()
                offset = batch.end
            stored[index] = ids
    return stored


def _acknowledged(folder: Path) -> Iterator[str]:
    for path in folder.glob("*.sent"):
        intention: list[str] = []
        for line in path.read_text().splitlines():
            if line.startswith("I "):
                _, _, _, key, first, count = line.split()
                intention = [f"{key}:{n}" for n in range(int(first), int(first) + int(count))]
            else:
                yield from intention


def _deliveries(folder: Path, partition: int) -> dict[int, list[tuple[int, str]]]:
    """By the owner's epoch: what it was given, in order."""
    given: defaultdict[int, list[tuple[int, str]]] = defaultdict(list)
    for path in folder.glob("*.got"):
        for line in path.read_text().splitlines():
            parts = line.split()
            if len(parts) == 4 and int(parts[0]) == partition:
                given[int(parts[1])].append((int(parts[2]), parts[3]))
    return dict(sorted(given.items()))


def _check_key_order(partition: int, ids: list[str], report: Report) -> None:
    last: dict[str, int] = {}
    for record in ids:
        key, number = record.split(":")
        if int(number) != last.get(key, -1) + 1:
            report.problems.append(f"partition {partition}: {record} follows {key}:{last.get(key)}")
        last[key] = int(number)


def _check_deliveries(partition: int, ids: list[str], given: dict[int, list[tuple[int, str]]], report: Report) -> None:
    reached = 0
    for epoch, records in given.items():
        offsets = [offset for offset, _ in records]
        report.delivered += len(offsets)
        report.twice += sum(offset < reached for offset in offsets)
        if offsets != list(range(offsets[0], offsets[0] + len(offsets))):
            report.problems.append(f"partition {partition}, epoch {epoch}: not each record once and in order")
        if offsets[0] > reached:
            report.problems.append(f"partition {partition}, epoch {epoch}: begins at {offsets[0]}, skipping {reached}")
        if any(ids[offset] != record for offset, record in records):
            report.problems.append(f"partition {partition}, epoch {epoch}: delivered what is not in the log")
        reached = max(reached, offsets[-1] + 1)
    if reached < len(ids):
        report.problems.append(f"partition {partition}: {len(ids) - reached} records were never delivered")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=["run", "produce", "consume"])
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--name", default="")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    options = parser.parse_args()
    if options.role == "run":
        folder = options.folder or Path(tempfile.mkdtemp(prefix="shardyard-chaos-"))
        print(f"seed {options.seed}, {options.seconds:g} s, in {folder}")
        report = run(folder, options.seconds, options.seed)
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
