"""The log, beside Redis streams and NATS JetStream: 2 cores, 16 partitions, 256 random bytes a record.

Run by `make bench`, or `python -m bench.log`; `bench/README.md` says what is measured how.
"""

import argparse
import asyncio
import contextlib
import importlib.util
import multiprocessing
import random
import struct
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench.figures import filesystem, milliseconds, percentile, rate, sync_seconds, table, use_cores
from bench.servers import find_nats, find_redis, nats_server, redis_server
from bench.systems import BATCH_RECORDS, PARTITIONS, RECORD_BYTES, VALUES, Host, System

ROUNDS = 3
SECONDS = 2.0
"""Of one round of anything."""
ROUND_RECORDS = 600_000
"""At which a round ends before its time."""
UNDER_WAY = 2
"""Batches that each partition has on their way at once."""
PRODUCERS = 64
FOLLOWED_RECORDS = 300
IDLE_SECONDS = 3.0

_STAMP = struct.Struct("<qq")  # nanoseconds of the monotonic clock, which all processes share; number


@dataclass(slots=True)
class Figures:
    """What was measured of one system: records per second, and seconds."""

    append: float = 0.0
    append_records: float = 0.0
    read: float = 0.0
    read_records: float = 0.0
    singles: float = 0.0
    sustained: float = 0.0
    """Singles, over all rounds: what is done in the background now and then is in it."""
    latencies: list[float] = field(default_factory=list)
    """Of all rounds."""
    seen_from_start: list[float] = field(default_factory=list)
    seen_from_answer: list[float] = field(default_factory=list)
    idle: float = 0.0
    """Share of a core that a reader takes who waits for nothing."""


async def append(system: System) -> float:
    """Batches to all partitions at once; the time ends when the last one is acknowledged."""
    sent = 0
    start = time.perf_counter()

    async def send(partition: int) -> None:
        nonlocal sent
        while time.perf_counter() - start < SECONDS and sent < ROUND_RECORDS:
            sent += BATCH_RECORDS
            await system.send_batch(partition)

    await asyncio.gather(*(send(i % PARTITIONS) for i in range(PARTITIONS * UNDER_WAY)))
    return sent / (time.perf_counter() - start)


async def read(system: System) -> float:
    """All partitions at once, from the beginning to the end or until the time is over."""
    count = 0
    start = time.perf_counter()

    async def consume(partition: int) -> None:
        nonlocal count
        async with contextlib.aclosing(system.read(partition)) as answers:  # type: ignore[type-var]
            async for records in answers:
                count += records
                if time.perf_counter() - start > SECONDS:
                    return

    await asyncio.gather(*(consume(partition) for partition in range(PARTITIONS)))
    return count / (time.perf_counter() - start)


async def singles(system: System) -> tuple[float, list[float]]:
    """64 producers, each of which waits for its record before it sends the next: records/s, and each one's latency."""
    latencies: list[float] = []
    start = time.perf_counter()

    async def produce(number: int) -> None:
        while (began := time.perf_counter()) - start < SECONDS:
            await system.send(number % PARTITIONS, random.choice(VALUES))
            latencies.append(time.perf_counter() - began)

    await asyncio.gather(*(produce(number) for number in range(PRODUCERS)))
    return len(latencies) / (time.perf_counter() - start), latencies


# A reader in another process


def reader(connection: Connection, place: Host) -> None:
    """Follow the log, and tell when each of our records was seen; then how much it costs to wait for nothing."""

    async def run() -> None:
        seen: dict[int, int] = {}

        def note(value: bytes) -> None:
            seen[_STAMP.unpack_from(value)[1]] = time.monotonic_ns()

        async with place.open() as system:
            following = asyncio.create_task(system.follow(note))
            await asyncio.sleep(0.5)
            cpu, wall = time.process_time(), time.monotonic()
            await asyncio.sleep(IDLE_SECONDS)
            idle = (time.process_time() - cpu) / (time.monotonic() - wall)
            connection.send(idle)
            await asyncio.to_thread(connection.recv)  # until all were sent
            connection.send(seen)
            following.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await following

    asyncio.run(run())


async def follow(system: System, place: Host, figures: Figures) -> None:
    """Send records now and then while another process reads them."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=reader, args=(there, place), daemon=True)
    process.start()
    with ThreadPoolExecutor(1) as threads:
        loop = asyncio.get_running_loop()
        figures.idle = await loop.run_in_executor(threads, _receive, here, process)
        started: dict[int, int] = {}
        answered: dict[int, int] = {}
        for number in range(FOLLOWED_RECORDS):
            await asyncio.sleep(random.uniform(0.003, 0.013))
            started[number] = time.monotonic_ns()
            stamp = _STAMP.pack(started[number], number)
            await system.send(number % PARTITIONS, stamp + VALUES[0][len(stamp) :])
            answered[number] = time.monotonic_ns()
        await asyncio.sleep(0.5)
        here.send("enough")
        seen = await loop.run_in_executor(threads, _receive, here, process)
    process.join()
    if len(seen) < FOLLOWED_RECORDS:
        raise RuntimeError(f"the reader of {place} saw only {len(seen)} of {FOLLOWED_RECORDS} records")
    figures.seen_from_start = [(seen[n] - started[n]) / 1e9 for n in seen]
    figures.seen_from_answer = [(seen[n] - answered[n]) / 1e9 for n in seen]


def _receive(connection: Connection, process: Any) -> Any:
    """What the other process has to say; its death is not waited for in vain."""
    while not connection.poll(0.1):
        if not process.is_alive():
            raise RuntimeError(f"the reader ended with {process.exitcode}")
    return connection.recv()


# All of it for each system


async def best(rounds: int, work: Callable[[], Awaitable[float]]) -> float:
    """The best of several rounds: other work on the machine only ever slows one."""
    return max([await work() for _ in range(rounds)])


async def measure(place: Host, rounds: int) -> Figures:
    figures = Figures()
    async with place.open() as system:
        figures.append = await best(rounds, lambda: append(system))
        figures.read = await best(rounds, lambda: read(system))
    figures.append_records, figures.read_records = figures.append, figures.read
    async with place.open(arrow=False) as system:
        if place.kind == "ours":
            figures.append_records = await best(rounds, lambda: append(system))
            figures.read_records = await best(rounds, lambda: read(system))
        for _ in range(rounds):
            per_second, latencies = await singles(system)
            figures.singles = max(figures.singles, per_second)
            figures.sustained += per_second / rounds
            figures.latencies += latencies
        await follow(system, place, figures)
    return figures


@contextlib.contextmanager
def place_of(name: str, folder: Path, redis: Path | None, nats: Path | None) -> Iterator[Host | None]:
    """Where the named system runs while the block does; None if it is not to be had."""
    with contextlib.ExitStack() as stack:
        match name.split():
            case ["ours", "process"]:
                yield Host("ours", str(folder), "process")
            case ["ours", "power"]:
                yield Host("ours", str(folder), "power")
            case ["Redis", policy] if redis:
                yield Host("redis", str(stack.enter_context(redis_server(redis, folder, policy))))
            case ["NATS", policy] if nats:
                interval = None if policy == "default" else policy
                yield Host("nats", str(stack.enter_context(nats_server(nats, folder, interval))))
            case _:
                yield None


# A killed process loses nothing that these acknowledged ...
PROCESS = ("ours process", "Redis everysec", "NATS default")
# ... and neither does a power cut here.
POWER = ("ours power", "Redis always", "NATS always")

DURABLE = """\
what is acknowledged survives
  ours process, Redis everysec, NATS default: a killed process, but not a power cut, which takes what the kernel has not
    written yet (ours), about the last second (Redis), up to two minutes (NATS)
  ours power, Redis always, NATS always: a power cut too; each is synced to disk before it is acknowledged
"""

Cell = Callable[[Figures], str]
Value = Callable[[Figures], float]
ROWS: tuple[tuple[str, Cell, Value | None, str], ...] = (
    ("append batches of 500 (ours: Arrow), records/s", lambda f: rate(f.append), lambda f: f.append, "500 k, 300 k"),
    ("append batches of 500 (ours: records)", lambda f: rate(f.append_records), lambda f: f.append_records, ""),
    ("read (ours: as Arrow), records/s", lambda f: rate(f.read), lambda f: f.read, "4 M"),
    ("read (ours: as Python records)", lambda f: rate(f.read_records), lambda f: f.read_records, "800 k"),
    (
        "64 producers of single records, best round, records/s",
        lambda f: rate(f.singles),
        lambda f: f.singles,
        "power 15 k",
    ),
    ("  all rounds together, records/s", lambda f: rate(f.sustained), lambda f: f.sustained, ""),
    (
        "  latency in all rounds, p50 / p99 ms",
        lambda f: milliseconds(f.latencies, 50, 99),
        lambda f: 1 / percentile(f.latencies, 99),
        "power p99 < 20",
    ),
    (
        "append begun -> seen by another process, p50 / p99 ms",
        lambda f: milliseconds(f.seen_from_start, 50, 99),
        lambda f: 1 / percentile(f.seen_from_start, 50),
        "",
    ),
    (
        "append answered -> seen there, p50 / p99 ms",
        lambda f: milliseconds(f.seen_from_answer, 50, 99),
        None,
        "p99 < 5",
    ),
    ("reader that waits on 16 partitions, of a core", lambda f: f"{f.idle:.1%}", None, "no spinning"),
)


def report(measured: dict[str, Figures]) -> None:
    rows = [[what, *(cell(figures) for figures in measured.values()), target] for what, cell, _, target in ROWS]
    table(["", *measured, "target"], rows)
    pairs = [(ours, other) for ours, *others in (PROCESS, POWER) for other in others if {ours, other} <= set(measured)]
    if pairs:
        print("\nours compared with the others: above 1 ours is better (of latencies the p99, of `seen` the p50)")
        compared = [(what, value) for what, _, value, _ in ROWS if value is not None]
        rows = [
            [what, *(f"{value(measured[a]) / value(measured[b]):.1f}" for a, b in pairs)] for what, value in compared
        ]
        table(["", *(f"{ours.split()[1]} : {other}" for ours, other in pairs)], rows)


async def main(rounds: int, only: str | None) -> None:
    print(f"log: {use_cores()}, {PARTITIONS} partitions or streams, {RECORD_BYTES} random bytes a record")
    parser = "hiredis" if importlib.util.find_spec("hiredis") else "its Python parser: hiredis is not installed"
    print(f"redis-py {version('redis')} with {parser}; nats-py {version('nats-py')}")
    redis, nats = find_redis(), find_nats()
    measured: dict[str, Figures] = {}
    with tempfile.TemporaryDirectory(prefix="shardyard-bench-") as temporary:
        root = Path(temporary)
        print(f"in {root}: {filesystem(root)}, a sync of 4 KiB takes {sync_seconds(root) * 1e3:.2f} ms")
        for name in (*PROCESS, *POWER):
            if only is not None and only not in name:
                continue
            folder = root / name.replace(" ", "-")
            folder.mkdir()
            with place_of(name, folder, redis, nats) as place:
                if place is not None:
                    measured[name] = await measure(place, rounds)
    print(DURABLE)
    report(measured)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--only", help="only systems whose name has this in it: ours, Redis, NATS, power ...")
    options = parser.parse_args()
    asyncio.run(main(options.rounds, options.only))
