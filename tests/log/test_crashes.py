"""Killed at any moment, again and again, the embedded log keeps what it acknowledged and nothing by halves."""

import asyncio
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from shardyard.log.sqlite import SqliteLog
from shardyard.model import Partition, Record, Stamp
from tests.log import crasher
from tests.log.crasher import PARTITIONS, PRODUCERS, batch, home

ROUNDS = 200
TOPIC = [Partition("t", index) for index in range(PARTITIONS)]


@contextmanager
def crashers() -> Iterator[subprocess.Popen[str]]:
    script = [sys.executable, str(Path(crasher.__file__))]
    with subprocess.Popen(script, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def crash(process: subprocess.Popen[str], order: dict[str, Any], dice: random.Random) -> list[list[str]]:
    """Let a child live for a few milliseconds, kill it, and return what it said."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(order) + "\n")
    process.stdin.flush()
    start = "O" if dice.random() < 0.85 else "P"  # now and then it has not even opened the log
    said: list[list[str]] = []
    pid = 0
    for line in process.stdout:
        said.append(line.split())
        if said[-1][0] == "P":
            pid = int(said[-1][1])
        if said[-1][0] == start:
            threading.Timer(dice.uniform(0.005, 0.06), os.kill, (pid, signal.SIGKILL)).start()
        if said[-1][0] == "D":
            break
    assert said[-1] == ["D", str(int(signal.SIGKILL))], "the child failed by itself"
    return said


class Witness:
    """What is known of the log from outside, and whether it keeps to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.next = dict.fromkeys(PRODUCERS, 0)
        self.placed: dict[tuple[str, int], int] = {}
        self.first = dict.fromkeys(TOPIC, 0)
        self.seen: dict[Partition, dict[int, Record]] = {partition: {} for partition in TOPIC}
        self.done: Counter[str] = Counter()

    def note(self, lines: list[list[str]]) -> None:
        """Note what a child has printed."""
        for kind, *words in lines:
            if kind == "A":
                producer, sequence, offset = words[0], int(words[1]), int(words[2])
                assert sequence == self.next[producer]
                self.placed[producer, sequence] = offset
                self.next[producer] = sequence + 1
            elif kind == "T":
                partition, before = TOPIC[int(words[0])], int(words[1])
                self.first[partition] = max(self.first[partition], before)
            self.done[words[0] if kind == "S" else kind] += 1

    async def check(self) -> None:
        async with SqliteLog(self.folder, durability="process", maintain_every=None) as log:
            found = {partition: await self.walk(log, partition) for partition in TOPIC}
            await asyncio.gather(*(self.retry(log, producer, found[home(producer)]) for producer in PRODUCERS))
            self.seen = {partition: await self.walk(log, partition) for partition in TOPIC}
        self.placed.clear()

    async def walk(self, log: SqliteLog, partition: Partition) -> dict[int, Record]:
        """Everything in a partition by offset, after a look at whether it may be so."""
        has = await log.span(partition)
        assert has.first >= self.first[partition], "what was trimmed is back"
        self.first[partition] = has.first
        rows: list[Record] = []
        while has.first + len(rows) < has.end:
            rows += (await log.read(partition, has.first + len(rows), max_records=500)).records()
        assert has.first + len(rows) == has.end
        found = dict(enumerate(rows, has.first))
        for offset, row in self.seen[partition].items():
            assert offset < has.first or found[offset] == row, "what was seen once has changed"
        for (producer, sequence), offset in self.placed.items():
            for at, row in enumerate(batch(producer, sequence), offset) if home(producer) == partition else ():
                assert at < has.first or found.get(at) == row, "an acknowledged record is lost or elsewhere"
        check_batches(rows)
        return found

    async def retry(self, log: SqliteLog, producer: str, found: dict[int, Record]) -> None:
        """Send again what was not acknowledged, and once more the last that was."""
        partition, sequence = home(producer), self.next[producer]
        stored = [offset for offset, row in found.items() if row.id.startswith(f"{producer}:{sequence}:")]
        again = await log.append(partition, batch(producer, sequence), stamp=Stamp(producer, sequence))
        if stored:
            assert again.duplicate, "a retried batch was stored twice"
            assert again.first.offset + again.count == stored[-1] + 1
        self.done["stored but not acknowledged"] += again.duplicate
        self.next[producer] = sequence + 1
        if (producer, sequence - 1) in self.placed:
            last = await log.append(partition, batch(producer, sequence - 1), stamp=Stamp(producer, sequence - 1))
            assert (last.duplicate, last.first.offset) == (True, self.placed[producer, sequence - 1])


def check_batches(rows: list[Record]) -> None:
    """Batches are whole (but for the first, which may be trimmed in its middle), as sent, in order, and there once."""
    last: dict[str, int] = {}
    at = 0
    while at < len(rows):
        producer, sequence, start, count = rows[at].id.split(":")
        assert at == 0 or start == "0"
        rest = int(count) - int(start)
        assert rows[at : at + rest] == batch(producer, int(sequence))[int(start) :]
        assert int(sequence) > last.get(producer, -1)
        last[producer] = int(sequence)
        at += rest


@pytest.fixture
def folder() -> Iterator[Path]:
    """In memory where there is such a place: a killed process leaves the same files there, and it dies more busily."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        yield Path(folder)


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_what_was_acknowledged_survives_two_hundred_kills_and_nothing_is_there_by_half_or_twice(folder: Path) -> None:
    dice = random.Random(20_240)
    witness = Witness(folder / "log")

    async def prepare() -> None:
        async with SqliteLog(witness.folder) as log:
            await log.create_topic("t", PARTITIONS)

    asyncio.run(prepare())
    with crashers() as process:
        for number in range(ROUNDS):
            durability = "process" if number % 4 else "power"
            order = {"folder": str(witness.folder), "next": witness.next, "seed": number, "durability": durability}
            witness.note(crash(process, order, dice))
            asyncio.run(witness.check())
    assert witness.done["A"] > ROUNDS
    for rare in ("T", "merge", "clear", "free", "stored but not acknowledged"):
        assert witness.done[rare], f"{rare} was never put to the test"
    with closing(sqlite3.connect(witness.folder / "log.db")) as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    assert sum(file.stat().st_size for file in witness.folder.iterdir()) < 50 * 2**20
