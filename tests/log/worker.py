"""Another process on the same log. Run as a script: `worker.py follow|produce|reopen|hold FOLDER [ARGUMENTS]`.

It says `ready` when its log is open, and begins with the first line on its standard input.
"""

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from shardyard.log.sqlite import SqliteLog
from shardyard.model import Partition, Record, Stamp

T0 = Partition("t", 0)
IDLE_SECONDS = 1.0


def say(what: Any) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


async def follow(folder: Path, count: int) -> None:
    """Say when each record was seen; then what an idle wait costs, as a share of a core."""
    async with SqliteLog(folder, maintain_every=None) as log:
        offset = (await log.span(T0)).end
        say("ready")
        sys.stdin.readline()
        for _ in range(count):
            say("waiting")
            batch = await log.read(T0, offset, wait=20)
            say([time.monotonic(), [record.id for record in batch.records()]])
            offset = batch.end
        began = time.process_time(), time.monotonic()
        await log.read(T0, offset, wait=IDLE_SECONDS)
        say((time.process_time() - began[0]) / (time.monotonic() - began[1]))


async def produce(folder: Path, name: str, count: int) -> None:
    """Append `count` batches as several tasks of this process, each in its order."""

    async def task(producer: str) -> list[int]:
        return [
            (
                await log.append(
                    T0,
                    [Record(f"{producer}:{n}:{i}", None, b"x" * 50) for i in range(1 + n % 3)],
                    stamp=Stamp(producer, n),
                )
            ).first.offset
            for n in range(count)
        ]

    async with SqliteLog(folder, durability="process", maintain_every=0.05) as log:
        say("ready")
        sys.stdin.readline()
        placed = await asyncio.gather(*(task(f"{name}.{i}") for i in range(3)))
        say({f"{name}.{i}": offsets for i, offsets in enumerate(placed)})


async def reopen(folder: Path, name: str, count: int) -> None:
    """Open the log, use it and close it, `count` times."""
    say("ready")
    sys.stdin.readline()
    for n in range(count):
        async with SqliteLog(folder, durability="process", maintain_every=None) as log:
            found, appended, _ = await asyncio.gather(
                log.read(T0, 0), log.append(T0, [Record(f"{name}:{n}", None, b"")]), log.maintain()
            )
            assert len(found) == found.end
            assert (await log.span(T0)).end > appended.first.offset
    say("done")


async def hold(folder: Path, seconds: int) -> None:
    """Seal the topic, and renew the seal until killed."""
    async with SqliteLog(folder, durability="process", maintain_every=None) as log:
        say("ready")
        sys.stdin.readline()
        while True:
            say((await log.seal_topic("t", "worker", seconds=seconds)).generation)
            await asyncio.sleep(seconds / 10)


if __name__ == "__main__":
    command, where, *rest = sys.argv[1:]
    arguments = [int(word) if word.isdigit() else word for word in rest]
    commands: dict[str, Any] = {"follow": follow, "produce": produce, "reopen": reopen, "hold": hold}
    asyncio.run(commands[command](Path(where), *arguments))
