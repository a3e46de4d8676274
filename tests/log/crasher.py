"""A process that appends, trims and maintains as fast as it can, made to be killed. Run as a script, it forks one for
each line on its standard input, once all imports are paid for.

What a child has done it says on standard output, one line each: `P pid` when it lives, `O` when its log is open,
`A producer sequence offset` for each acknowledged append, `T partition before` for each trim,
`S name` for each step of maintenance that found something to do.
When it is dead the line `D status` follows.
"""

import asyncio
import json
import os
import random
import sqlite3
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa

from shardyard.log import merging
from shardyard.log.sqlite import SqliteLog, checkpoints, maintenance
from shardyard.model import Partition, Record, Stamp
from shardyard.model.batch import SCHEMA
from shardyard.runtime import group_commit

PRODUCERS = [f"p{i}" for i in range(6)]
PARTITIONS = 3
LIFE_SECONDS = 10.0
"""How long a child lives that nobody kills."""


def home(producer: str) -> Partition:
    return Partition("t", PRODUCERS.index(producer) % PARTITIONS)


def batch(producer: str, sequence: int) -> list[Record]:
    """What this producer sends under this sequence: each record tells its place in the batch, and of how many."""
    dice = random.Random(f"{producer}:{sequence}")
    count = dice.randint(1, 8)
    names = [f"{producer}:{sequence}:{i}:{count}" for i in range(count)]
    return [Record(name, None, name.encode() * dice.randint(1, 60), timestamp=1 + sequence) for name in names]


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())  # at once, and whole: a pipe takes a short line so


async def produce(log: SqliteLog, producer: str, sequence: int) -> None:
    while True:
        rows = batch(producer, sequence)
        data = pa.RecordBatch.from_pylist(
            [{"id": r.id, "value": r.value, "timestamp": r.timestamp} for r in rows], schema=SCHEMA
        )
        arrow = PRODUCERS.index(producer) % 2
        appended = await log.append(home(producer), data if arrow else rows, stamp=Stamp(producer, sequence))
        say("A", producer, sequence, appended.first.offset)
        sequence += 1


async def trim(log: SqliteLog, dice: random.Random) -> None:
    while True:
        for index in range(PARTITIONS):
            has = await log.span(Partition("t", index))
            before = max(has.first, has.end - dice.randint(30, 300))
            await log.trim(Partition("t", index), before)
            say("T", index, before)


async def maintain(log: SqliteLog) -> None:
    while True:
        await log.maintain()


def reporting(name: str, step: maintenance.Step) -> maintenance.Step:
    def reported(db: sqlite3.Connection, now: int) -> bool:
        worked = step(db, now)
        if worked:
            say("S", name)
        return worked

    return reported


class ReportingMerger(maintenance.Merger):
    def __call__(self, db: sqlite3.Connection, now: int) -> bool:
        worked = super().__call__(db, now)
        if worked:
            say("S", "merge")
        return worked


async def live(order: dict[str, Any]) -> None:
    merging.MERGE_BATCHES = 4  # all that is rare happens all the time
    maintenance.VACUUM_PAGES = maintenance.VACUUM_STEP_PAGES = 2
    checkpoints.CHECKPOINT_BYTES = 256 * 1024
    dice = random.Random(order["seed"])
    group_commit.SHORT_SECONDS = dice.choice([0.0, 1.0])  # who commits: the thread, or the event loop
    steps = maintenance.steps

    def shuffled(forgetter: maintenance.Forgetter) -> dict[str, maintenance.Step]:  # few live to see the end of one
        reported = [
            (name, ReportingMerger() if name == "merge" else reporting(name, step))
            for name, step in steps(forgetter).items()
        ]
        return dict(dice.sample(reported, len(reported)))

    maintenance.steps = shuffled
    log = SqliteLog(Path(order["folder"]), durability=order["durability"], maintain_every=None)
    say("O")
    async with asyncio.timeout(LIFE_SECONDS), asyncio.TaskGroup() as tasks:
        for producer, sequence in order["next"].items():
            tasks.create_task(produce(log, producer, sequence))
        tasks.create_task(trim(log, dice))
        tasks.create_task(maintain(log))


def main() -> None:
    pa.array([0])  # imports pandas, where there is one: a quarter of a second that no child should have to spend
    for line in sys.stdin:
        child = os.fork()
        if not child:
            say("P", os.getpid())
            try:
                asyncio.run(live(json.loads(line)))
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        say("D", status)


if __name__ == "__main__":
    main()
