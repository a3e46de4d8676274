"""Rebalancing on the embedded engines: 256 partitions, 16 members and a 17th; then a member that is killed.

Run by `make bench`, or `python -m bench.groups`; `bench/README.md` says what is measured how.
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

from bench.figures import filesystem, milliseconds, sync_seconds, use_cores

from shardyard.groups import Node, OwnedBatch, Reader
from shardyard.groups.rebalancer import LEASE
from shardyard.log import Log
from shardyard.log.sqlite import SqliteLog
from shardyard.model import Fenced, Partition, Record
from shardyard.registry import Registry, open_registry

PARTITIONS = 256
MEMBERS = 16
PROCESSES = 4
"""That the 16 members share; the 17th, or the one to be killed, has its own."""
TOPIC, GROUP = "bench", "bench"
VALUE = os.urandom(256)
SESSION_SECONDS = 10.0
BEFORE_SECONDS = 2.0
AFTER_SECONDS = 1.0
SETTLE_SECONDS = 30.0
CRASH_SECONDS = 2.5
POLL_SECONDS = 0.2
"""Seldom, as it takes the registry's lock."""
BACKLOG_RECORDS = 20
SLICES = 16
"""The producer sends to so many shares of the partitions in turn, not to all at once."""


class Event(NamedTuple):
    """What happened to a record, in nanoseconds of the clock that all processes share."""

    what: str
    """Delivered, or committed."""
    member: str
    partition: int
    at: int
    began: int = 0
    """When the commit was asked for."""


# Members, in processes of their own


def work(connection: Connection, folder: Path, names: list[str], session: float, interval: float) -> None:
    """Be these members from `join` to `leave` until told to `stop`; then hand over what happened."""
    asyncio.run(_work(connection, folder, names, session, interval))


async def _work(connection: Connection, folder: Path, names: list[str], session: float, interval: float) -> None:
    events: list[Event] = []
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(1) as listening:
        async with opened(folder) as (log, registry), Node(log, registry, name=f"node of {names[0]}") as node:
            connection.send("ready")
            while (command := await loop.run_in_executor(listening, connection.recv)) == "join":
                async with contextlib.AsyncExitStack() as stack:
                    for name in names:
                        member = Reader(
                            GROUP, [TOPIC], node=node, name=name, session_timeout=session, drain=10, max_records=1
                        )
                        await stack.enter_async_context(member)
                        stack.push_async_callback(_end, asyncio.create_task(consume(member, interval, events)))
                    connection.send("joined")
                    command = await loop.run_in_executor(listening, connection.recv)
                connection.send("left")
                if command == "stop":
                    break
    connection.send(events)


async def consume(member: Reader, interval: float, events: list[Event]) -> None:
    """Work on a record of each partition at once, for `interval` seconds each."""

    async def handle(batch: OwnedBatch) -> None:
        await asyncio.sleep(interval)
        began = time.monotonic_ns()
        with contextlib.suppress(Fenced):
            await batch.commit()
            events.append(Event("committed", member.name, batch.partition.index, time.monotonic_ns(), began))

    async with asyncio.TaskGroup() as working:
        async for batch in member:
            events.append(Event("delivered", member.name, batch.partition.index, time.monotonic_ns()))
            working.create_task(handle(batch))


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


@contextlib.asynccontextmanager
async def opened(folder: Path) -> AsyncIterator[tuple[Log, Registry]]:
    async with SqliteLog(folder / "log") as log:
        with open_registry(f"sqlite:///{folder}/registry.db") as registry:
            yield log, registry


class Worker:
    """A process with members in it, as the one who measures sees it."""

    def __init__(self, folder: Path, names: list[str], session: float, interval: float) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.names = names
        self._connection, there = spawn.Pipe()
        self.process = spawn.Process(target=work, args=(there, folder, names, session, interval), daemon=True)
        self.process.start()

    async def tell(self, command: str, answer: str) -> None:
        self._connection.send(command)
        await self.hear(answer)

    async def hear(self, answer: str | None = None) -> Any:
        said = await asyncio.to_thread(self._receive)
        if answer is not None and said != answer:
            raise RuntimeError(f"{self.names} said {said!r} instead of {answer!r}")
        return said

    def _receive(self) -> Any:
        while not self._connection.poll(0.1):
            if not self.process.is_alive():
                raise RuntimeError(f"the process of {self.names} ended with {self.process.exitcode}")
        return self._connection.recv()

    async def stop(self, *, joined: bool = True) -> list[Event]:
        self._connection.send("stop")
        if joined:
            await self.hear("left")
        events: list[Event] = await self.hear()
        await asyncio.to_thread(self.process.join)
        return events

    def kill(self) -> int:
        """Kill it like the kernel would; when (ns)."""
        if self.process.pid is None:
            raise RuntimeError("there is nothing to kill")
        os.kill(self.process.pid, signal.SIGKILL)
        return time.monotonic_ns()


# The one who produces and watches


class Producer:
    """Appends a record to every partition every `interval` seconds, behind some to begin with: there is always one."""

    def __init__(self, log: Log, interval: float) -> None:
        self._log = log
        self._interval = interval
        self.late = 0.0
        """Seconds, at the most."""

    async def begin(self) -> None:
        await asyncio.gather(*(self._send(i, BACKLOG_RECORDS) for i in range(PARTITIONS)))

    async def run(self) -> None:
        start = time.monotonic()
        for turn in itertools.count():
            due = start + turn * self._interval / SLICES
            self.late = max(self.late, time.monotonic() - due)
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            await asyncio.gather(*(self._send(i, 1) for i in range(turn % SLICES, PARTITIONS, SLICES)))

    async def _send(self, index: int, count: int) -> None:
        await self._log.append(Partition(TOPIC, index), [Record.new(VALUE) for _ in range(count)])


def owners(registry: Registry) -> dict[int, str]:
    """Who owns which partition, of those that are not on their way to another."""
    with registry.transaction() as tx:
        rows = tx.ownerships(GROUP)
    return {row.partition.index: row.owner for row in rows if row.owner is not None and row.owner == row.target}


async def settled(registry: Registry, members: int) -> dict[int, str]:
    """The owners, once every partition has one and all members have their share."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        found = await asyncio.to_thread(owners, registry)
        if len(found) == PARTITIONS and len(set(found.values())) == members:
            return found
        if time.monotonic() > deadline:
            raise RuntimeError(f"{len(found)} partitions with {len(set(found.values()))} owners, after a long wait")
        await asyncio.sleep(POLL_SECONDS)


@dataclass(slots=True)
class Window:
    """A stretch of time (ns)."""

    start: int
    end: int


@dataclass(slots=True)
class Change:
    """One member more: who had what before and after, and when it happened."""

    before: dict[int, str]
    after: dict[int, str]
    calm: Window
    change: Window
    moved: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.moved = {i for i in self.before if self.before[i] != self.after[i]}


@contextlib.asynccontextmanager
async def producing(log: Log, interval: float) -> AsyncIterator[Producer]:
    producer = Producer(log, interval)
    await producer.begin()
    task = asyncio.create_task(producer.run())
    try:
        yield producer
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def shares(count: int) -> Iterator[list[str]]:
    """The names of the members of each process."""
    names = [f"member-{i:02}" for i in range(count)]
    for i in range(PROCESSES):
        yield names[i::PROCESSES]


async def start(folder: Path, count: int, session: float, interval: float) -> list[Worker]:
    workers = [Worker(folder, names, session, interval) for names in shares(count)]
    for worker in workers:
        await worker.hear("ready")
    await asyncio.gather(*(worker.tell("join", "joined") for worker in workers))
    return workers


async def rebalances(folder: Path, interval: float, times: int) -> None:
    """16 members, and a 17th that comes and goes a few times."""
    async with opened(folder) as (log, registry):
        await log.create_topic(TOPIC, PARTITIONS)
        workers = await start(folder, MEMBERS, SESSION_SECONDS, interval)
        guest = Worker(folder, ["member-16"], SESSION_SECONDS, interval)
        await guest.hear("ready")
        changes = []
        async with producing(log, interval) as producer:
            await settled(registry, MEMBERS)
            await asyncio.sleep(BEFORE_SECONDS + interval)
            for _ in range(times):
                before = await settled(registry, MEMBERS)
                calm = time.monotonic_ns()
                await asyncio.sleep(BEFORE_SECONDS + 2 * interval)
                began = time.monotonic_ns()
                await guest.tell("join", "joined")
                after = await settled(registry, MEMBERS + 1)
                await asyncio.sleep(AFTER_SECONDS + 2 * interval)
                changes.append(Change(before, after, Window(calm, began), Window(began, time.monotonic_ns())))
                await guest.tell("leave", "left")
                await settled(registry, MEMBERS)
                await asyncio.sleep(AFTER_SECONDS + interval)
            events = await guest.stop(joined=False)
            for worker in workers:
                events += await worker.stop()
    report_rebalances(changes, by_partition(events), interval)
    print(f"  the producer was at most {producer.late * 1e3:.0f} ms late")


def by_partition(events: Iterable[Event]) -> dict[int, list[Event]]:
    found: defaultdict[int, list[Event]] = defaultdict(list)
    for event in sorted(events, key=lambda event: event.at):
        found[event.partition].append(event)
    return found


def report_rebalances(changes: list[Change], events: dict[int, list[Event]], interval: float) -> None:
    print(f"16 -> 17 members, {len(changes)} times: {[len(change.moved) for change in changes]} moves (target 15)")
    pauses, took = [], []
    for change in changes:
        for index in change.moved:
            last, first = handover(change, events[index], index)
            pauses.append((first.at - last.at) / 1e9)
            took.append((first.at - change.change.start) / 1e9)
    print(
        "pause of a moved partition, from the old owner's last commit to the new one's first delivery,"
        f" p50 / p99 / max ms: {milliseconds(pauses, 50, 99, 100)} (target p99 < 100)"
    )
    print(
        f"  from the order to join to that first delivery (has the work in hand in it): {milliseconds(took, 50, 100)}"
    )
    windows: tuple[tuple[str, Callable[[Change], Window]], ...] = (
        ("before", lambda change: change.calm),
        ("during", lambda change: change.change),
    )
    for name, window in windows:
        gaps = [gap - interval for change in changes for gap in stays(change, events, window(change))]
        commits = [(e.at - e.began) / 1e9 for e in within(changes, events, window) if e.what == "committed"]
        seconds = sum(window(change).end - window(change).start for change in changes) / 1e9
        print(
            f"unmoved partitions {name} the rebalance: longest gap between deliveries, beyond the work, over partitions"
            f" p50 / p99 / max ms: {milliseconds(gaps, 50, 99, 100)}; {len(commits) / seconds:.0f} commits/s,"
            f" each {milliseconds(commits, 50, 99, 100)}"
        )


def handover(change: Change, events: list[Event], index: int) -> tuple[Event, Event]:
    """The old owner's last commit and the new one's first delivery."""
    old, new = change.before[index], change.after[index]
    first = next(e for e in events if e.member == new and e.what == "delivered" and e.at >= change.change.start)
    last = [e for e in events if e.member == old and e.what == "committed" and e.at <= first.at][-1]
    return last, first


def stays(change: Change, events: dict[int, list[Event]], window: Window) -> Iterator[float]:
    """The longest gap between two deliveries of each partition that stays with its owner."""
    for index in set(range(PARTITIONS)) - change.moved:
        delivered = [e.at for e in events[index] if e.what == "delivered" and window.start <= e.at <= window.end]
        yield max((b - a for a, b in itertools.pairwise(delivered)), default=window.end - window.start) / 1e9


def within(
    changes: list[Change], events: dict[int, list[Event]], window: Callable[[Change], Window]
) -> Iterator[Event]:
    for found in events.values():
        yield from (e for e in found if any(window(c).start <= e.at <= window(c).end for c in changes))


async def crash(folder: Path, interval: float, session: float, *, leader: bool) -> None:
    """15 members in their processes, and one in its own that is killed; `leader`: it also holds the lease."""
    async with opened(folder) as (log, registry):
        await log.create_topic(TOPIC, PARTITIONS)
        workers = [] if leader else await start(folder, MEMBERS - 1, session, interval)
        victim = Worker(folder, ["victim"], session, interval)
        await victim.hear("ready")
        if leader:  # the first to come takes the lease, and keeps it
            await asyncio.sleep(0.5)
            workers = await start(folder, MEMBERS - 1, session, interval)
        await victim.tell("join", "joined")
        async with producing(log, interval):
            await settled(registry, MEMBERS)
            await asyncio.sleep(BEFORE_SECONDS + interval)
            owned = [index for index, owner in (await settled(registry, MEMBERS)).items() if owner == "victim"]
            leads = await asyncio.to_thread(leader_of, registry) == "node of victim"
            killed = victim.kill()
            await asyncio.to_thread(victim.process.join)
            await asyncio.sleep(session + CRASH_SECONDS + interval)
            events: list[Event] = []
            for worker in workers:
                events += await worker.stop()
    found = by_partition(e for e in events if e.what == "delivered" and e.at > killed)
    again = [(found[index][0].at - killed) / 1e9 if found[index] else float("inf") for index in owned]
    print(
        f"crash of a member {'with' if leads else 'without'} the rebalancer's lease, session {session:g} s:"
        f" its {len(again)} partitions served again after {min(again):.2f} to {max(again):.2f} s,"
        f" {max(again) - session:+.2f} s beyond the session at the most (target +0.50)"
    )


def leader_of(registry: Registry) -> str | None:
    with registry.transaction() as tx:
        lease = tx.lease(LEASE)
    return None if lease is None else lease.holder


async def main(interval: float, times: int) -> None:
    print(
        f"groups: {use_cores()}; {PARTITIONS} partitions, a record to each every {interval * 1e3:g} ms, and as long to"
        f" work on it; {MEMBERS} members in {PROCESSES} processes, one more in its own, the producer in this one"
    )
    with tempfile.TemporaryDirectory(prefix="shardyard-bench-") as temporary:
        root = Path(temporary)
        print(f"in {root}: {filesystem(root)}, a sync of 4 KiB takes {sync_seconds(root) * 1e3:.2f} ms")
        await rebalances(_new(root, "rebalances"), interval, times)
        for session in (1.0, 3.0):
            for leader in (False, True):
                await crash(_new(root, f"crash-{session:g}-{leader}"), interval, session, leader=leader)


def _new(root: Path, name: str) -> Path:
    folder = root / name
    folder.mkdir()
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between two records of a partition")
    parser.add_argument("--times", type=int, default=5, help="how often the 17th member comes")
    options = parser.parse_args()
    asyncio.run(main(options.interval, options.times))
