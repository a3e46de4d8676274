"""Groups that have nothing to do: how long they take to settle after joining, and what they cost from then on.

Part of `python -m bench.groups`; alone: `python -m bench.group_idle`.
"""

import asyncio
import contextlib
import time
from pathlib import Path

from bench.given_registry import run_alone

from shardyard.groups import Node, Reader
from shardyard.log import Log
from shardyard.log.sqlite import SqliteLog
from shardyard.registry import Registry, open_registry

TOPICS = 1_000
PARTITIONS = 2
"""Of each topic."""
MEMBERS = 2
"""Of each group."""
GROUPS = (20, 100, 300)
IDLE_SECONDS = 10.0
QUIET_SECONDS = 3.0
"""Between settling and measuring."""
SETTLE_SECONDS = 60.0


async def bench_idle(log: Log, registry: Registry, count: int) -> None:
    """`count` groups of two members each, in this process; every group reads a topic of its own."""
    async with Node(log, registry) as node, contextlib.AsyncExitStack() as stack:
        readers = [
            Reader(f"group-{i:03}", [f"topic-{i:04}"], node=node, name=f"member-{i:03}-{j}")
            for i in range(count)
            for j in range(MEMBERS)
        ]
        started, cpu = time.monotonic(), time.process_time()
        await asyncio.gather(*(stack.enter_async_context(reader) for reader in readers))
        joined = time.monotonic() - started
        while not all(len(reader.owned) == PARTITIONS // MEMBERS for reader in readers):
            if time.monotonic() - started > SETTLE_SECONDS:
                raise RuntimeError(f"{count} groups did not settle within {SETTLE_SECONDS:g} s")
            await asyncio.sleep(0.02)
        settled, settling = time.monotonic() - started, time.process_time() - cpu
        await asyncio.sleep(QUIET_SECONDS)
        started, cpu = time.monotonic(), time.process_time()
        await asyncio.sleep(IDLE_SECONDS)
        idle = (time.process_time() - cpu) / (time.monotonic() - started)
    print(
        f"{count} groups of {MEMBERS} members, {TOPICS} topics: settled {settled:.2f} s after the first join"
        f" (target 2; all had joined after {joined:.2f} s; {settling:.2f} s of CPU time);"
        f" idle {idle:.1%} of a core (target 5 %)"
    )


async def bench(root: Path, registry_url: str | None) -> None:
    """`registry_url`: a registry without groups; None: an embedded one in `root`."""
    async with SqliteLog(root / "log") as log:
        for start in range(0, TOPICS, 50):
            await asyncio.gather(*(log.create_topic(f"topic-{i:04}", PARTITIONS) for i in range(start, start + 50)))
        for count in GROUPS:
            with open_registry(registry_url or f"sqlite:///{root}/registry-{count}.db") as registry:
                await bench_idle(log, registry, count)
                for i in range(count):
                    registry.run(lambda tx, i=i: tx.delete_group(f"group-{i:03}"))  # type: ignore[misc]


if __name__ == "__main__":
    run_alone(bench, "idle groups", __doc__)
