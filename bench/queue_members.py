"""Many consumers of one broker over the network: how long they take to settle, and what they cost when idle.

The rows `idle` and `growth` of `python -m bench.queues`.
"""

import asyncio
import contextlib
import logging
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
IDLE = 2_000
"""Consumers of many groups."""
IDLE_MEMBERS = 8
"""Of each of these groups."""
GROWTH = (20, 100, 200)
"""Members of one group."""
PROCESSES = 2
"""That host the consumers. Each consumer has its own connections."""
MAX_CONNECTIONS = 15_000
SETTLE_SECONDS = 120.0
QUIET_SECONDS = 5.0
"""Without a change, after which the groups have settled."""
IDLE_SECONDS = 10.0
POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class State:
    """What the consumers of a process own."""

    partitions: int
    """Of the topic, over all consumers."""
    without: int
    """Consumers that own nothing. In the end, none does: there are as many partitions as members."""
    changed_at: float
    """When an owner of any partition last changed, by the monotonic clock."""
    warnings: int
    """That the clients have logged, such as for a heartbeat that was retried."""


class WarningCount(logging.Handler):
    """Counts what is logged instead of printing it: an overloaded broker makes thousands of consumers warn."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.count = 0

    def emit(self, record: logging.LogRecord) -> None:  # noqa: ARG002 only that there was one
        self.count += 1


def run_members(connection: Connection, url: str, groups: Sequence[str]) -> None:
    """On the first request, one consumer for each of the groups joins, all at once. Each further request is answered
    with the `State`."""

    warnings = WarningCount()
    logging.getLogger("shardyard").addHandler(warnings)

    async def run() -> None:
        connection.send(None)
        await asyncio.to_thread(connection.recv)
        consumers = [Consumer(url, group, [TOPIC]) for group in groups]
        consuming = [asyncio.create_task(consume(consumer)) for consumer in consumers]
        owned = [consumer.owned for consumer in consumers]
        changed_at = 0.0
        request = asyncio.create_task(asyncio.to_thread(connection.recv))
        while True:
            before, owned = owned, [consumer.owned for consumer in consumers]
            if owned != before:
                changed_at = time.monotonic()
            for task in consuming:
                if task.done():
                    task.result()  # raises
            if request.done():
                of_topic = sum(partition.topic == TOPIC for partitions in owned for partition in partitions)
                connection.send(State(of_topic, owned.count(set()), changed_at, warnings.count))
                request = asyncio.create_task(asyncio.to_thread(connection.recv))
            await asyncio.sleep(POLL_SECONDS)

    async def consume(consumer: Consumer) -> None:
        async with consumer:
            async for batch in consumer:
                await batch.commit()

    uvloop.run(run())


@dataclass(frozen=True, slots=True)
class Settled:
    """The groups have their final owners."""

    at: float
    """When the last owner changed, by the monotonic clock."""
    cpu_seconds: float
    """The CPU time of the broker until then."""
    warnings: int


HEAD = ["", "settled after, s", "broker's CPU time, s", "clients' warnings", "idle, % of a core", "broker's KiB each"]


def measure_idle(root: Path, size: int) -> None:
    groups = [f"group-{i // IDLE_MEMBERS:03}" for i in range(size)]
    cells = measure(root / "idle", groups, IDLE_MEMBERS)
    print()
    table(HEAD, [[f"{size:,} consumers in groups of {IDLE_MEMBERS}", *cells]])


def measure_growth(root: Path, sizes: Sequence[int]) -> None:
    rows = [
        [f"{size:,} consumers of one group", *measure(root / f"growth-{size}", ["group"] * size, size)]
        for size in sizes
    ]
    print()
    table(HEAD, rows)


def measure(folder: Path, groups: Sequence[str], partitions: int) -> list[str]:
    """Let a consumer join each of the groups, which may repeat; `partitions` of the topic is the size of a group.
    Returns the cells of a row."""
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
        settled = _wait_until_settled(workers, len(groups), broker.pid, started + SETTLE_SECONDS)
        if settled is None:
            busy = (_cpu_seconds(broker.pid) - cpu) / (time.monotonic() - started)
            return [f"not within {SETTLE_SECONDS:g}", f"{busy:.0%} of a core", "", "", ""]
        idle_cpu, idle_from = _cpu_seconds(broker.pid), time.monotonic()
        time.sleep(IDLE_SECONDS)
        idle = (_cpu_seconds(broker.pid) - idle_cpu) / (time.monotonic() - idle_from)
        return [
            f"{settled.at - started:.1f}",
            f"{settled.cpu_seconds - cpu:.1f}",
            str(settled.warnings),
            f"{idle:.1%}",
            f"{(_memory_kib(broker.pid) - memory) / len(groups):.0f}",
        ]


def _wait_until_settled(workers: Sequence[Worker], partitions: int, pid: int, deadline: float) -> Settled | None:
    """Wait until all partitions have owners that do not change any more; None if the deadline comes first."""
    samples: list[tuple[float, float]] = []
    while time.monotonic() < deadline:
        samples.append((time.monotonic(), _cpu_seconds(pid)))
        states: list[State] = [worker.call("state") for worker in workers]
        changed_at = max(state.changed_at for state in states)
        is_complete = sum(state.partitions for state in states) == partitions and not any(s.without for s in states)
        if is_complete and time.monotonic() - changed_at > QUIET_SECONDS:
            cpu = next(cpu for at, cpu in samples if at >= changed_at)
            return Settled(changed_at, cpu, sum(state.warnings for state in states))
        time.sleep(POLL_SECONDS)
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
