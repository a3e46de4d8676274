"""Commits of groups: how many a second a registry stores, from one process and from five.

Part of `python -m bench.groups`; alone: `python -m bench.group_commits`.
"""

import asyncio
import contextlib
import multiprocessing
import time
from collections.abc import Iterable
from multiprocessing.connection import Connection
from pathlib import Path

from bench.figures import rate
from bench.given_registry import run_alone

from shardyard.groups import JoinRequest, Membership, MembershipListener, Node, Reader
from shardyard.log import Log
from shardyard.log.memory import MemoryLog
from shardyard.log.sqlite import SqliteLog
from shardyard.model import Partition, Position, Record
from shardyard.model.batch import from_records
from shardyard.registry import Registry, open_registry

TOPIC, GROUP = "commits", "commits"
UNDER_WAY = 64
"""Partitions of a process, each with a commit under way."""
PROCESSES = 5
ROUND_SECONDS = 3.0
SETTLE_SECONDS = 30.0
BATCH_RECORDS = 100
READ_BATCHES = 100
"""For each partition."""


class Committer:
    """A member that owns `UNDER_WAY` partitions and commits them as fast as the registry allows."""

    def __init__(self, node: Node, name: str, partitions: Iterable[Partition]) -> None:
        request = JoinRequest(GROUP, name, [TOPIC], partitions=sorted(partitions))
        self._membership = Membership(node, request, MembershipListener())
        self._offsets: dict[Partition, int] = {}

    async def __aenter__(self) -> "Committer":
        await self._membership.__aenter__()
        deadline = time.monotonic() + SETTLE_SECONDS
        while len(self._membership.owned) < UNDER_WAY:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{len(self._membership.owned)} of {UNDER_WAY} partitions are assigned")
            await asyncio.sleep(0.01)
        self._offsets = dict.fromkeys(self._membership.owned, 0)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._membership.__aexit__(None, None, None)

    async def run(self, under_way: int, seconds: float) -> float:
        """Keep that many commits under way; returns commits a second."""
        until = time.monotonic() + seconds

        async def commit(partition: Partition, epoch: int) -> int:
            count = 0
            while time.monotonic() < until:
                self._offsets[partition] += BATCH_RECORDS
                await self._membership.commit({partition: (epoch, Position(1, self._offsets[partition]))})
                count += 1
            return count

        owned = list(self._membership.owned.items())[:under_way]
        started = time.monotonic()
        counts = await asyncio.gather(*(commit(partition, grant.epoch) for partition, grant in owned))
        return sum(counts) / (time.monotonic() - started)


async def bench_one_process(name: str, log: Log, registry: Registry) -> None:
    await log.create_topic(TOPIC, UNDER_WAY)
    async with Node(log, registry) as node, Committer(node, "m", await log.topic(TOPIC)) as member:
        one = [await member.run(1, ROUND_SECONDS) for _ in range(3)]
        many = [await member.run(UNDER_WAY, ROUND_SECONDS) for _ in range(3)]
    print(
        f"commits in one process, {name}: {rate(max(one))}/s one by one,"
        f" {rate(max(many))}/s with {UNDER_WAY} under way (target 10 k)"
    )


async def bench_reading(log: Log, registry: Registry) -> None:
    """Read batches and commit each, all partitions at once."""
    await log.create_topic(TOPIC, UNDER_WAY)
    records = from_records([Record.new(bytes(100)) for _ in range(BATCH_RECORDS)], 0)
    for partition in await log.topic(TOPIC):
        await asyncio.gather(*(log.append(partition, records) for _ in range(READ_BATCHES)))
    total = UNDER_WAY * READ_BATCHES
    async with (
        Node(log, registry) as node,
        Reader(GROUP, [TOPIC], node=node, max_records=BATCH_RECORDS) as reader,
    ):
        started = 0.0
        async with asyncio.TaskGroup() as commits:
            batches = aiter(reader)
            for _ in range(total):
                batch = await anext(batches)
                started = started or time.monotonic()
                commits.create_task(batch.commit())
        seconds = time.monotonic() - started
    print(
        f"batches of {BATCH_RECORDS} records read and committed, one process, {UNDER_WAY} partitions at once:"
        f" {rate(total / seconds)} commits/s, {rate(total * BATCH_RECORDS / seconds)} records/s"
    )


# Five processes


def run_process(connection: Connection, folder: Path, url: str, number: int) -> None:
    asyncio.run(_run_process(connection, folder, url, number))


async def _run_process(connection: Connection, folder: Path, url: str, number: int) -> None:
    partitions = [Partition(TOPIC, number * UNDER_WAY + i) for i in range(UNDER_WAY)]
    async with SqliteLog(folder / "log") as log:
        with open_registry(url) as registry:
            async with Node(log, registry) as node, Committer(node, f"m{number}", partitions) as member:
                connection.send("ready")
                while (await asyncio.to_thread(connection.recv)) == "run":
                    connection.send(await member.run(UNDER_WAY, ROUND_SECONDS))
            connection.send("left")


async def bench_processes(folder: Path, url: str) -> None:
    spawn = multiprocessing.get_context("spawn")
    async with SqliteLog(folder / "log") as log:
        await log.create_topic(TOPIC, PROCESSES * UNDER_WAY)
    with contextlib.ExitStack() as stack:
        connections = []
        for number in range(PROCESSES):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=run_process, args=(theirs, folder, url, number), daemon=True)
            process.start()
            stack.callback(process.join)
            connections.append(ours)
        for connection in connections:
            connection.recv()
        rounds = []
        for _ in range(3):
            for connection in connections:
                connection.send("run")
            rounds.append([connection.recv() for connection in connections])
        for connection in connections:
            connection.send("stop")
            connection.recv()
    best = max(rounds, key=sum)
    print(
        f"commits over {PROCESSES} processes, {UNDER_WAY} under way in each: {rate(sum(best))}/s (target 5 k);"
        f" the slowest process {rate(min(best))}/s, the fastest {rate(max(best))}/s"
    )


async def bench(root: Path, registry_url: str | None) -> None:
    """`registry_url`: a registry that does not exist yet; None: the embedded one in `root`."""
    if registry_url is None:
        with open_registry("memory://") as registry:
            await bench_one_process("memory", MemoryLog(), registry)
    with open_registry(registry_url or f"sqlite:///{root}/one.db") as registry:
        await bench_one_process("sqlite" if registry_url is None else "the given registry", MemoryLog(), registry)
        registry.run(lambda tx: tx.delete_group(GROUP))
    with open_registry(registry_url or f"sqlite:///{root}/reading.db") as registry:
        async with SqliteLog(root / "reading") as log:
            await bench_reading(log, registry)
        registry.run(lambda tx: tx.delete_group(GROUP))
    await bench_processes(root, registry_url or f"sqlite:///{root}/five.db")


if __name__ == "__main__":
    run_alone(bench, "commits", __doc__)
