"""The embedded log compared with that on PostgreSQL, Redis streams and NATS JetStream: 2 cores, 16 partitions, records
of 256 random bytes.

Run it with `make bench` or `python -m bench.log`; `bench/README.md` explains how each figure is measured.
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

from bench.figures import filesystem, milliseconds, percentile, pin_to_cores, rate, sync_seconds, table
from bench.servers import find_nats, find_redis, has_postgresql, nats_server, postgresql_database, redis_server
from bench.systems import BATCH_RECORDS, PARTITIONS, RECORD_BYTES, VALUES, Endpoint, System

ROUNDS = 3
ROUND_SECONDS = 2.0
ROUND_RECORDS = 600_000
"""A round ends early once it has sent this many records."""
BATCHES_IN_FLIGHT = 32
"""Two per partition."""
WAITING_PRODUCERS = 4
"""Of batches, each of which waits for its batch before it sends the next."""
PRODUCERS = 64
"""Of single records."""
FOLLOWED_RECORDS = 300
IDLE_SECONDS = 3.0

_STAMP = struct.Struct("<qq")  # time in ns of the monotonic clock, which all processes share; number of the record


@dataclass(slots=True)
class Figures:
    """The measurements of one system, in records per second and in seconds."""

    append: float = 0.0
    append_waiting: float = 0.0
    append_records: float = 0.0
    read: float = 0.0
    read_records: float = 0.0
    singles: float = 0.0
    """Single records, in the best round."""
    sustained_singles: float = 0.0
    """Single records, over all rounds, so that occasional background work is included."""
    latencies: list[float] = field(default_factory=list)
    """Of single records, in all rounds."""
    seen_after_send: list[float] = field(default_factory=list)
    seen_after_acknowledgement: list[float] = field(default_factory=list)
    idle: float = 0.0
    """The fraction of a core that a waiting reader uses while nothing arrives."""


async def append(system: System, in_flight: int = BATCHES_IN_FLIGHT) -> float:
    """Append batches, so many at a time, until the last one is acknowledged: records per second."""
    sent = 0
    start = time.perf_counter()

    async def send(partition: int) -> None:
        nonlocal sent
        while time.perf_counter() - start < ROUND_SECONDS and sent < ROUND_RECORDS:
            sent += BATCH_RECORDS
            await system.send_batch(partition)

    await asyncio.gather(*(send(i % PARTITIONS) for i in range(in_flight)))
    return sent / (time.perf_counter() - start)


async def read(system: System) -> float:
    """Read all partitions concurrently, to their end or until the round is over: records per second."""
    count = 0
    start = time.perf_counter()

    async def consume(partition: int) -> None:
        nonlocal count
        async with contextlib.aclosing(system.read(partition)) as responses:  # type: ignore[type-var]
            async for records in responses:
                count += records
                if time.perf_counter() - start > ROUND_SECONDS:
                    return

    await asyncio.gather(*(consume(partition) for partition in range(PARTITIONS)))
    return count / (time.perf_counter() - start)


async def append_singles(system: System) -> tuple[float, list[float]]:
    """64 producers that each wait for an acknowledgement before sending the next record: records/s, and latencies."""
    latencies: list[float] = []
    start = time.perf_counter()

    async def produce(number: int) -> None:
        while (sent_at := time.perf_counter()) - start < ROUND_SECONDS:
            await system.send(number % PARTITIONS, random.choice(VALUES))
            latencies.append(time.perf_counter() - sent_at)

    await asyncio.gather(*(produce(number) for number in range(PRODUCERS)))
    return len(latencies) / (time.perf_counter() - start), latencies


# A reader in another process


def run_reader(connection: Connection, endpoint: Endpoint) -> None:
    """Follow the log; send back the CPU use while nothing arrives, then the time at which each record was seen."""

    async def run() -> None:
        seen: dict[int, int] = {}

        def record_arrival(value: bytes) -> None:
            seen[_STAMP.unpack_from(value)[1]] = time.monotonic_ns()

        async with endpoint.open() as system:
            following = asyncio.create_task(system.follow(record_arrival))
            await asyncio.sleep(0.5)
            cpu, wall = time.process_time(), time.monotonic()
            await asyncio.sleep(IDLE_SECONDS)
            idle = (time.process_time() - cpu) / (time.monotonic() - wall)
            connection.send(idle)
            await asyncio.to_thread(connection.recv)  # until all records have been sent
            connection.send(seen)
            following.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await following

    asyncio.run(run())


async def measure_reader(system: System, endpoint: Endpoint, figures: Figures) -> None:
    """Send records at random intervals while another process reads them."""
    spawn = multiprocessing.get_context("spawn")
    connection, reader_connection = spawn.Pipe()
    process = spawn.Process(target=run_reader, args=(reader_connection, endpoint), daemon=True)
    process.start()
    with ThreadPoolExecutor(1) as threads:
        loop = asyncio.get_running_loop()
        figures.idle = await loop.run_in_executor(threads, _receive, connection, process)
        sent: dict[int, int] = {}
        acknowledged: dict[int, int] = {}
        for number in range(FOLLOWED_RECORDS):
            await asyncio.sleep(random.uniform(0.003, 0.013))
            sent[number] = time.monotonic_ns()
            stamp = _STAMP.pack(sent[number], number)
            await system.send(number % PARTITIONS, stamp + VALUES[0][len(stamp) :])
            acknowledged[number] = time.monotonic_ns()
        await asyncio.sleep(0.5)
        connection.send("all sent")
        seen = await loop.run_in_executor(threads, _receive, connection, process)
    process.join()
    if len(seen) < FOLLOWED_RECORDS:
        raise RuntimeError(f"the reader of {endpoint} saw only {len(seen)} of {FOLLOWED_RECORDS} records")
    figures.seen_after_send = [(seen[n] - sent[n]) / 1e9 for n in seen]
    figures.seen_after_acknowledgement = [(seen[n] - acknowledged[n]) / 1e9 for n in seen]


def _receive(connection: Connection, process: Any) -> Any:
    """Wait for the next message of the reader; raises if the reader ends first."""
    while not connection.poll(0.1):
        if not process.is_alive():
            raise RuntimeError(f"the reader ended with exit code {process.exitcode}")
    return connection.recv()


# All measurements of one system


async def best(rounds: int, work: Callable[[], Awaitable[float]]) -> float:
    """The best of several rounds, because other work on the machine can only slow a round down."""
    return max([await work() for _ in range(rounds)])


async def measure(endpoint: Endpoint, rounds: int) -> Figures:
    figures = Figures()
    async with endpoint.open() as system:
        figures.append = await best(rounds, lambda: append(system))
        figures.append_waiting = await best(rounds, lambda: append(system, WAITING_PRODUCERS))
        figures.read = await best(rounds, lambda: read(system))
    figures.append_records, figures.read_records = figures.append, figures.read
    async with endpoint.open(arrow=False) as system:
        if endpoint.kind == "shardyard":
            figures.append_records = await best(rounds, lambda: append(system))
            figures.read_records = await best(rounds, lambda: read(system))
        for _ in range(rounds):
            per_second, latencies = await append_singles(system)
            figures.singles = max(figures.singles, per_second)
            figures.sustained_singles += per_second / rounds
            figures.latencies += latencies
        await system.settle()  # the reader's process would take part in it, and is to be measured while it only waits
        await measure_reader(system, endpoint, figures)
    return figures


@contextlib.contextmanager
def running_system(name: str, folder: Path, redis: Path | None, nats: Path | None) -> Iterator[Endpoint | None]:
    """Run the named system while the block runs; yields None if its server is not available."""
    with contextlib.ExitStack() as stack:
        match name.split():
            case ["Shardyard", "process"]:
                yield Endpoint("shardyard", f"sqlite:///{folder}", "process")
            case ["Shardyard", "power"]:
                yield Endpoint("shardyard", f"sqlite:///{folder}", "power")
            case ["Shardyard", "postgresql"] if has_postgresql():
                yield Endpoint("shardyard", stack.enter_context(postgresql_database()))
            case ["Redis", policy] if redis:
                yield Endpoint("redis", str(stack.enter_context(redis_server(redis, folder, policy))))
            case ["NATS", policy] if nats:
                interval = None if policy == "default" else policy
                yield Endpoint("nats", str(stack.enter_context(nats_server(nats, folder, interval))))
            case _:
                yield None


PROCESS = ("Shardyard process", "Redis everysec", "NATS default")
"""Settings under which an acknowledged record survives a killed process."""
POWER = ("Shardyard power", "Shardyard postgresql", "Redis always", "NATS always")
"""Settings under which it also survives a power cut."""

DURABILITY = """\
an acknowledged record survives
  Shardyard process, Redis everysec, NATS default: a killed process, but not a power cut, which loses what the kernel
    has not written yet (Shardyard), about the last second (Redis), up to two minutes (NATS)
  Shardyard power, Shardyard postgresql, Redis always, NATS always: a power cut too, because a record is synced to disk
    before it is acknowledged
"""

Cell = Callable[[Figures], str]
Value = Callable[[Figures], float]
ROWS: tuple[tuple[str, Cell, Value | None, str], ...] = (
    (
        "append in batches of 500 (Shardyard: Arrow), records/s",
        lambda f: rate(f.append),
        lambda f: f.append,
        "500 k, 300 k",
    ),
    (
        "  4 producers that wait for each batch",
        lambda f: rate(f.append_waiting),
        lambda f: f.append_waiting,
        "postgresql 300 k",
    ),
    (
        "append in batches of 500 (Shardyard: Record objects)",
        lambda f: rate(f.append_records),
        lambda f: f.append_records,
        "",
    ),
    ("read (Shardyard: Arrow), records/s", lambda f: rate(f.read), lambda f: f.read, "4 M; postgresql 1.5 M"),
    ("read (Shardyard: Record objects)", lambda f: rate(f.read_records), lambda f: f.read_records, "800 k"),
    (
        "64 producers of single records, best round, records/s",
        lambda f: rate(f.singles),
        lambda f: f.singles,
        "power and postgresql 15 k",
    ),
    ("  over all rounds, records/s", lambda f: rate(f.sustained_singles), lambda f: f.sustained_singles, ""),
    (
        "  latency in all rounds, p50 / p99 ms",
        lambda f: milliseconds(f.latencies, 50, 99),
        lambda f: 1 / percentile(f.latencies, 99),
        "power p99 < 20",
    ),
    (
        "append started -> seen by another process, p50 / p99 ms",
        lambda f: milliseconds(f.seen_after_send, 50, 99),
        lambda f: 1 / percentile(f.seen_after_send, 50),
        "",
    ),
    (
        "append acknowledged -> seen by another process, p50 / p99 ms",
        lambda f: milliseconds(f.seen_after_acknowledgement, 50, 99),
        None,
        "< 1 / < 2",
    ),
    ("CPU of a reader waiting on 16 idle partitions", lambda f: f"{f.idle:.2%}", None, "< 0.5 %"),
)


def report(measured: dict[str, Figures]) -> None:
    rows = [[what, *(cell(figures) for figures in measured.values()), target] for what, cell, _, target in ROWS]
    table(["", *measured, "target"], rows)
    pairs = [(ours, other) for ours, *others in (PROCESS, POWER) for other in others if {ours, other} <= set(measured)]
    if pairs:
        print("\nShardyard compared with the others: above 1, Shardyard is better (latencies by p99, `seen` by p50)")
        compared = [(what, value) for what, _, value, _ in ROWS if value is not None]
        rows = [
            [what, *(f"{value(measured[a]) / value(measured[b]):.1f}" for a, b in pairs)] for what, value in compared
        ]
        table(["", *(f"{ours.split()[1]} : {other}" for ours, other in pairs)], rows)


async def main(rounds: int, only: str | None) -> None:
    print(f"log: {pin_to_cores()}, {PARTITIONS} partitions or streams, records of {RECORD_BYTES} random bytes")
    parser = "hiredis" if importlib.util.find_spec("hiredis") else "its Python parser (hiredis is not installed)"
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
            with running_system(name, folder, redis, nats) as endpoint:
                if endpoint is not None:
                    measured[name] = await measure(endpoint, rounds)
    print(DURABILITY)
    report(measured)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="rounds of each measurement")
    parser.add_argument(
        "--only", help="measure only systems whose name contains this: Shardyard, postgresql, Redis, NATS, power, ..."
    )
    options = parser.parse_args()
    asyncio.run(main(options.rounds, options.only))
