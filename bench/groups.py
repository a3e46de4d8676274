"""Groups on the embedded engines: commits, groups that are idle, and rebalancing: a 17th member joins 16 on 256
partitions; then a member is killed.

Run it with `make bench` or `python -m bench.groups`; `bench/README.md` explains how each figure is measured.
"""

import argparse
import asyncio
import contextlib
import itertools
import multiprocessing
import os
import signal
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from bench import group_commits, group_idle
from bench.figures import filesystem, milliseconds, pin_to_cores, sync_seconds

from shardyard.groups import Node, OwnedBatch, Reader
from shardyard.groups.rebalancer import LEASE
from shardyard.log import Log
from shardyard.log.sqlite import SqliteLog
from shardyard.model import Fenced, Partition, Record
from shardyard.registry import Registry, open_registry

PARTITIONS = 256
MEMBERS = 16
PROCESSES = 4
"""Processes that host the 16 members; the 17th member, or the one to be killed, has its own."""
TOPIC, GROUP = "bench", "bench"
VALUE = os.urandom(256)
SESSION_SECONDS = 10.0
BEFORE_SECONDS = 2.0
AFTER_SECONDS = 1.0
SETTLE_SECONDS = 30.0
CRASH_SECONDS = 2.5
POLL_SECONDS = 0.2
"""Polling takes the registry's lock, so it is done rarely."""
BACKLOG_RECORDS = 20
SLICES = 16
"""The producer spreads each interval's appends over this many slices of the partitions."""


class Event(NamedTuple):
    """Something that happened to a record; times are nanoseconds of the monotonic clock, which all processes share."""

    what: str
    """`delivered` or `committed`."""
    member: str
    partition: int
    at: int
    requested_at: int = 0
    """When the commit was requested."""


# Members, in worker processes


def run_worker(connection: Connection, folder: Path, names: list[str], session: float, interval: float) -> None:
    """Run these members between the commands `join` and `leave`, until `stop`; then send the events back."""
    asyncio.run(_run_worker(connection, folder, names, session, interval))


async def _run_worker(connection: Connection, folder: Path, names: list[str], session: float, interval: float) -> None:
    events: list[Event] = []
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(1) as receiver:
        async with open_engines(folder) as (log, registry), Node(log, registry, name=f"node of {names[0]}") as node:
            connection.send("ready")
            while (command := await loop.run_in_executor(receiver, connection.recv)) == "join":
                async with contextlib.AsyncExitStack() as stack:
                    for name in names:
                        member = Reader(
                            GROUP, [TOPIC], node=node, name=name, session_timeout=session, drain=10, max_records=1
                        )
                        await stack.enter_async_context(member)
                        stack.push_async_callback(_cancel, asyncio.create_task(consume(member, interval, events)))
                    connection.send("joined")
                    command = await loop.run_in_executor(receiver, connection.recv)
                connection.send("left")
                if command == "stop":
                    break
    connection.send(events)


async def consume(member: Reader, interval: float, events: list[Event]) -> None:
    """Handle one record per partition at a time, all partitions concurrently; each record takes `interval` seconds."""

    async def handle(batch: OwnedBatch) -> None:
        await asyncio.sleep(interval)
        requested_at = time.monotonic_ns()
        with contextlib.suppress(Fenced):
            await batch.commit()
            events.append(Event("committed", member.name, batch.partition.index, time.monotonic_ns(), requested_at))

    async with asyncio.TaskGroup() as tasks:
        async for batch in member:
            events.append(Event("delivered", member.name, batch.partition.index, time.monotonic_ns()))
            tasks.create_task(handle(batch))


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


@contextlib.asynccontextmanager
async def open_engines(folder: Path) -> AsyncIterator[tuple[Log, Registry]]:
    async with SqliteLog(folder / "log") as log:
        with open_registry(f"sqlite:///{folder}/registry.db") as registry:
            yield log, registry


class Worker:
    """The benchmark's handle on a process that runs members."""

    def __init__(self, folder: Path, names: list[str], session: float, interval: float) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.names = names
        self._connection, worker_connection = spawn.Pipe()
        arguments = (worker_connection, folder, names, session, interval)
        self.process = spawn.Process(target=run_worker, args=arguments, daemon=True)
        self.process.start()

    async def request(self, command: str, expected: str) -> None:
        """Send a command and wait for the expected reply."""
        self._connection.send(command)
        await self.receive(expected)

    async def receive(self, expected: str | None = None) -> Any:
        """Wait for the next reply; raises if it is not the expected one, or the process ends."""
        reply = await asyncio.to_thread(self._receive)
        if expected is not None and reply != expected:
            raise RuntimeError(f"the process of {self.names} replied {reply!r} instead of {expected!r}")
        return reply

    def _receive(self) -> Any:
        while not self._connection.poll(0.1):
            if not self.process.is_alive():
                raise RuntimeError(f"the process of {self.names} ended with exit code {self.process.exitcode}")
        return self._connection.recv()

    async def stop(self, *, joined: bool = True) -> list[Event]:
        """End the process and return its events."""
        self._connection.send("stop")
        if joined:
            await self.receive("left")
        events: list[Event] = await self.receive()
        await asyncio.to_thread(self.process.join)
        return events

    def kill(self) -> int:
        """Kill the process with SIGKILL; returns the time (ns)."""
        if self.process.pid is None:
            raise RuntimeError("the process was not started")
        os.kill(self.process.pid, signal.SIGKILL)
        return time.monotonic_ns()


# The producer and the measurements, in the main process


class Producer:
    """Appends a record to every partition every `interval` seconds; a backlog ensures that one is always waiting."""

    def __init__(self, log: Log, interval: float) -> None:
        self._log = log
        self._interval = interval
        self.max_delay = 0.0
        """The most by which an append was late, in seconds."""

    async def fill_backlog(self) -> None:
        await asyncio.gather(*(self._send(i, BACKLOG_RECORDS) for i in range(PARTITIONS)))

    async def run(self) -> None:
        start = time.monotonic()
        for tick in itertools.count():
            due = start + tick * self._interval / SLICES
            self.max_delay = max(self.max_delay, time.monotonic() - due)
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            await asyncio.gather(*(self._send(i, 1) for i in range(tick % SLICES, PARTITIONS, SLICES)))

    async def _send(self, index: int, count: int) -> None:
        await self._log.append(Partition(TOPIC, index), [Record.new(VALUE) for _ in range(count)])


def owners(registry: Registry) -> dict[int, str]:
    """The owner of each partition that is not being moved."""
    rows = registry.read(lambda tx: tx.ownerships(GROUP))
    return {row.partition.index: row.owner for row in rows if row.owner is not None and row.owner == row.target}


async def wait_for_owners(registry: Registry, members: int) -> dict[int, str]:
    """Wait until every partition has an owner and every member owns partitions; returns the owners."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        found = await asyncio.to_thread(owners, registry)
        if len(found) == PARTITIONS and len(set(found.values())) == members:
            return found
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"after {SETTLE_SECONDS:g} s, {len(found)} of {PARTITIONS} partitions have a settled owner,"
                f" and {len(set(found.values()))} members own partitions; expected {members}"
            )
        await asyncio.sleep(POLL_SECONDS)


@dataclass(slots=True)
class Window:
    """A time window (ns)."""

    start: int
    end: int


@dataclass(slots=True)
class Rebalance:
    """One rebalance: the owners before and after, and the time windows before and during it."""

    before: dict[int, str]
    after: dict[int, str]
    before_window: Window
    during_window: Window
    moved: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.moved = {i for i in self.before if self.before[i] != self.after[i]}


@contextlib.asynccontextmanager
async def running_producer(log: Log, interval: float) -> AsyncIterator[Producer]:
    producer = Producer(log, interval)
    await producer.fill_backlog()
    task = asyncio.create_task(producer.run())
    try:
        yield producer
    finally:
        await _cancel(task)


def names_by_process(count: int) -> Iterator[list[str]]:
    """The names of the members that each process runs."""
    names = [f"member-{i:02}" for i in range(count)]
    for i in range(PROCESSES):
        yield names[i::PROCESSES]


async def start_workers(folder: Path, count: int, session: float, interval: float) -> list[Worker]:
    workers = [Worker(folder, names, session, interval) for names in names_by_process(count)]
    for worker in workers:
        await worker.receive("ready")
    await asyncio.gather(*(worker.request("join", "joined") for worker in workers))
    return workers


async def bench_rebalances(folder: Path, interval: float, times: int) -> None:
    """With 16 members running, let a 17th join and leave several times."""
    async with open_engines(folder) as (log, registry):
        await log.create_topic(TOPIC, PARTITIONS)
        workers = await start_workers(folder, MEMBERS, SESSION_SECONDS, interval)
        joiner = Worker(folder, ["member-16"], SESSION_SECONDS, interval)
        await joiner.receive("ready")
        rebalances = []
        async with running_producer(log, interval) as producer:
            await wait_for_owners(registry, MEMBERS)
            await asyncio.sleep(BEFORE_SECONDS + interval)
            for _ in range(times):
                before = await wait_for_owners(registry, MEMBERS)
                quiet_from = time.monotonic_ns()
                await asyncio.sleep(BEFORE_SECONDS + 2 * interval)
                joined_at = time.monotonic_ns()
                await joiner.request("join", "joined")
                after = await wait_for_owners(registry, MEMBERS + 1)
                await asyncio.sleep(AFTER_SECONDS + 2 * interval)
                during = Window(joined_at, time.monotonic_ns())
                rebalances.append(Rebalance(before, after, Window(quiet_from, joined_at), during))
                await joiner.request("leave", "left")
                await wait_for_owners(registry, MEMBERS)
                await asyncio.sleep(AFTER_SECONDS + interval)
            events = await joiner.stop(joined=False)
            for worker in workers:
                events += await worker.stop()
    report_rebalances(rebalances, by_partition(events), interval)
    print(f"  the producer was at most {producer.max_delay * 1e3:.0f} ms late")


def by_partition(events: Iterable[Event]) -> dict[int, list[Event]]:
    found: defaultdict[int, list[Event]] = defaultdict(list)
    for event in sorted(events, key=lambda event: event.at):
        found[event.partition].append(event)
    return found


def report_rebalances(rebalances: list[Rebalance], events: dict[int, list[Event]], interval: float) -> None:
    moves = [len(rebalance.moved) for rebalance in rebalances]
    print(f"16 -> 17 members, {len(rebalances)} times: {moves} moves (target 15)")
    pauses, delays = [], []
    for rebalance in rebalances:
        for index in rebalance.moved:
            last, first = hand_over(rebalance, events[index], index)
            pauses.append((first.at - last.at) / 1e9)
            delays.append((first.at - rebalance.during_window.start) / 1e9)
    print(
        "pause of a moved partition, from the old owner's last commit to the new owner's first delivery,"
        f" p50 / p99 / max ms: {milliseconds(pauses, 50, 99, 100)} (target p99 < 100)"
    )
    print(
        "  from the join request to that first delivery, including the records in flight,"
        f" p50 / max ms: {milliseconds(delays, 50, 100)}"
    )
    windows: tuple[tuple[str, Callable[[Rebalance], Window]], ...] = (
        ("before", lambda rebalance: rebalance.before_window),
        ("during", lambda rebalance: rebalance.during_window),
    )
    for name, window in windows:
        gaps = [
            gap - interval for rebalance in rebalances for gap in longest_gaps(rebalance, events, window(rebalance))
        ]
        committed = [e for e in events_within(rebalances, events, window) if e.what == "committed"]
        commits = [(e.at - e.requested_at) / 1e9 for e in committed]
        seconds = sum(window(rebalance).end - window(rebalance).start for rebalance in rebalances) / 1e9
        print(
            f"unmoved partitions {name} the rebalance: longest gap between deliveries, less the work, over partitions"
            f" p50 / p99 / max ms: {milliseconds(gaps, 50, 99, 100)}; {len(commits) / seconds:.0f} commits/s,"
            f" each p50 / p99 / max ms: {milliseconds(commits, 50, 99, 100)}"
        )


def hand_over(rebalance: Rebalance, events: list[Event], index: int) -> tuple[Event, Event]:
    """The old owner's last commit and the new owner's first delivery."""
    old, new = rebalance.before[index], rebalance.after[index]
    start = rebalance.during_window.start
    first = next(e for e in events if e.member == new and e.what == "delivered" and e.at >= start)
    last = [e for e in events if e.member == old and e.what == "committed" and e.at <= first.at][-1]
    return last, first


def longest_gaps(rebalance: Rebalance, events: dict[int, list[Event]], window: Window) -> Iterator[float]:
    """The longest gap between two deliveries, for each partition that stays with its owner."""
    for index in set(range(PARTITIONS)) - rebalance.moved:
        delivered = [e.at for e in events[index] if e.what == "delivered" and window.start <= e.at <= window.end]
        yield max((b - a for a, b in itertools.pairwise(delivered)), default=window.end - window.start) / 1e9


def events_within(
    rebalances: list[Rebalance], events: dict[int, list[Event]], window: Callable[[Rebalance], Window]
) -> Iterator[Event]:
    for of_partition in events.values():
        yield from (e for e in of_partition if any(window(r).start <= e.at <= window(r).end for r in rebalances))


async def bench_crash(folder: Path, interval: float, session: float, *, leader: bool) -> None:
    """Kill one of 16 members, which has its own process and, if `leader` is set, also holds the rebalancer's lease."""
    async with open_engines(folder) as (log, registry):
        await log.create_topic(TOPIC, PARTITIONS)
        workers = [] if leader else await start_workers(folder, MEMBERS - 1, session, interval)
        victim = Worker(folder, ["victim"], session, interval)
        await victim.receive("ready")
        if leader:  # the first node to start acquires the lease and keeps it
            await asyncio.sleep(0.5)
            workers = await start_workers(folder, MEMBERS - 1, session, interval)
        await victim.request("join", "joined")
        async with running_producer(log, interval):
            await wait_for_owners(registry, MEMBERS)
            await asyncio.sleep(BEFORE_SECONDS + interval)
            owned = [index for index, owner in (await wait_for_owners(registry, MEMBERS)).items() if owner == "victim"]
            is_leader = await asyncio.to_thread(leader_of, registry) == "node of victim"
            killed = victim.kill()
            await asyncio.to_thread(victim.process.join)
            await asyncio.sleep(session + CRASH_SECONDS + interval)
            events: list[Event] = []
            for worker in workers:
                events += await worker.stop()
    delivered = by_partition(e for e in events if e.what == "delivered" and e.at > killed)
    outages = [(delivered[index][0].at - killed) / 1e9 if delivered[index] else float("inf") for index in owned]
    print(
        f"crash of a member {'with' if is_leader else 'without'} the rebalancer's lease, session {session:g} s:"
        f" its {len(outages)} partitions are served again after {min(outages):.2f} to {max(outages):.2f} s,"
        f" at most {max(outages) - session:+.2f} s relative to the session timeout (target +0.50)"
    )


def leader_of(registry: Registry) -> str | None:
    lease = registry.read(lambda tx: tx.lease(LEASE))
    return None if lease is None else lease.holder


async def main(interval: float, times: int, registry: str | None) -> None:
    print(f"groups: {pin_to_cores()}")
    with tempfile.TemporaryDirectory(prefix="shardyard-bench-") as temporary:
        root = Path(temporary)
        print(f"in {root}: {filesystem(root)}, a sync of 4 KiB takes {sync_seconds(root) * 1e3:.2f} ms")
        await group_commits.bench(_new_folder(root, "commits"), registry)
        await group_idle.bench(_new_folder(root, "idle"), registry)
        if registry is None:
            await bench_rebalancing(root, interval, times)


async def bench_rebalancing(root: Path, interval: float, times: int) -> None:
    print(
        f"{PARTITIONS} partitions, a record for each every {interval * 1e3:g} ms, which takes as long to handle;"
        f" {MEMBERS} members in {PROCESSES} processes, one more in its own process, and the producer in this one"
    )
    await bench_rebalances(_new_folder(root, "rebalances"), interval, times)
    for session in (1.0, 3.0):
        for leader in (False, True):
            await bench_crash(_new_folder(root, f"crash-{session:g}-{leader}"), interval, session, leader=leader)


def _new_folder(root: Path, name: str) -> Path:
    folder = root / name
    folder.mkdir()
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--interval", type=float, default=1.0, help="seconds between two records of a partition, and to handle one"
    )
    parser.add_argument("--times", type=int, default=5, help="how often the 17th member joins")
    parser.add_argument("--registry", help="measure commits and idle groups on the registry of this URL, and no more")
    options = parser.parse_args()
    asyncio.run(main(options.interval, options.times, options.registry))
