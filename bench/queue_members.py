"""Many consumers of one broker over the network: how long they take to settle, and what they cost when idle.

The rows `idle` and `growth` of `python -m bench.queues`.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import uvloop
from bench.figures import table
from bench.queue_workers import Worker
from bench.servers import shardyard_broker

from shardyard.client import Brokers, Consumer

TOPIC = "bench"
IDLE_GROUPS = 250
IDLE_MEMBERS = 8
"""Of each of these groups."""
GROWTH = (20, 100, 200)
"""Members of one group."""
PROCESSES = 2
"""That host the consumers. Each consumer has its own connections."""
MAX_CONNECTIONS = 15_000
SETTLE_SECONDS = 300.0
QUIET_SECONDS = 5.0
"""Between settling and measuring."""
IDLE_SECONDS = 10.0
POLL_SECONDS = 0.1


def run_members(connection: Connection, url: str, groups: Sequence[str]) -> None:
    """On the first request, one consumer for each of the groups joins, all at once. Each further request is answered
    with whether every one owns exactly one partition, and when that was last not so."""

    async def run() -> None:
        connection.send(None)
        await asyncio.to_thread(connection.recv)
        consumers = [Consumer(url, group, [TOPIC]) for group in groups]
        consuming = [asyncio.create_task(consume(consumer)) for consumer in consumers]
        unsettled_at = time.monotonic()
        request = asyncio.create_task(asyncio.to_thread(connection.recv))
        while True:
            if not (is_settled := all(len(consumer.owned) == 1 for consumer in consumers)):
                unsettled_at = time.monotonic()
            for task in consuming:
                if task.done():
                    task.result()  # raises
            if request.done():
                connection.send((is_settled, unsettled_at))
                request = asyncio.create_task(asyncio.to_thread(connection.recv))
            await asyncio.sleep(POLL_SECONDS)

    async def consume(consumer: Consumer) -> None:
        async with consumer:
            async for batch in consumer:
                await batch.commit()

    uvloop.run(run())


@dataclass(frozen=True, slots=True)
class Cost:
    """What a number of consumers cost a broker."""

    settled_seconds: float | None
    """From the start of the first join until each owned its partition; None if that took too long."""
    settling_cpu_seconds: float
    idle_share: float
    """Of a core."""
    memory_kib: float
    """Of each consumer: what the broker has grown by, between its start and the end of the measurement."""

    def cells(self) -> list[str]:
        settled = f"> {SETTLE_SECONDS:g}" if self.settled_seconds is None else f"{self.settled_seconds:.2f}"
        return [settled, f"{self.settling_cpu_seconds:.2f}", f"{self.idle_share:.1%}", f"{self.memory_kib:.0f}"]


HEAD = ["", "settled after, s", "broker's CPU time until then, s", "idle, share of a core", "KiB of the broker each"]


def measure_idle(root: Path) -> None:
    groups = [f"group-{i:03}" for i in range(IDLE_GROUPS) for _ in range(IDLE_MEMBERS)]
    cost = measure(root / "idle", groups, IDLE_MEMBERS)
    print()
    table(HEAD, [[f"{len(groups):,} consumers in {IDLE_GROUPS} groups", *cost.cells()]])


def measure_growth(root: Path, sizes: Sequence[int]) -> None:
    rows = []
    for size in sizes:
        cost = measure(root / f"growth-{size}", ["group"] * size, size)
        rows.append([f"{size:,} consumers of one group", *cost.cells()])
    print()
    table(HEAD, rows)


def measure(folder: Path, groups: Sequence[str], partitions: int) -> Cost:
    """Let a consumer join each of the groups, which may repeat; `partitions` of the topic is the size of a group."""
    folder.mkdir()
    with contextlib.ExitStack() as stack:
        broker = stack.enter_context(shardyard_broker(folder, "--max-connections", str(MAX_CONNECTIONS)))
        asyncio.run(_create_topic(broker.url, partitions))
        workers = [Worker(run_members, broker.url, groups[i::PROCESSES]) for i in range(PROCESSES)]
        for worker in workers:
            stack.callback(worker.kill)
        for worker in workers:
            worker.result()  # it has imported what it needs
        memory, cpu, started = _memory_kib(broker.pid), _cpu_seconds(broker.pid), time.monotonic()
        for worker in workers:
            worker.start("join")
        settled_at = _wait_until_settled(workers, started + SETTLE_SECONDS)
        settling = _cpu_seconds(broker.pid) - cpu
        time.sleep(QUIET_SECONDS)
        cpu, idle_from = _cpu_seconds(broker.pid), time.monotonic()
        time.sleep(IDLE_SECONDS)
        idle = (_cpu_seconds(broker.pid) - cpu) / (time.monotonic() - idle_from)
        return Cost(
            settled_at and settled_at - started, settling, idle, (_memory_kib(broker.pid) - memory) / len(groups)
        )


def _wait_until_settled(workers: Sequence[Worker], deadline: float) -> float | None:
    while time.monotonic() < deadline:
        states: list[tuple[bool, float]] = [worker.call("state") for worker in workers]
        if all(is_settled for is_settled, _ in states):
            return max(unsettled_at for _, unsettled_at in states)
    return None


async def _create_topic(url: str, partitions: int) -> None:
    async with Brokers(url) as brokers:
        await brokers.post("/v1/topics", {"name": TOPIC, "partitions": partitions})


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _memory_kib(pid: int) -> int:
    """The resident set."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") // 1024
