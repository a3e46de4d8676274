"""Work queues through one broker, beside RabbitMQ and Redis streams: 2 cores, 256 random bytes a record.

Run by `make bench`, or `python -m bench.queues`; `bench/README.md` says what is measured how.
"""

import argparse
import asyncio
import contextlib
import importlib.util
import itertools
import multiprocessing
import random
import struct
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import uvloop
from bench.figures import filesystem, milliseconds, percentile, rate, sync_seconds, table, use_cores
from bench.queue_systems import BATCH_RECORDS, PARTITIONS, PREFETCH, RECORD_BYTES, VALUES, Host, System
from bench.servers import find_rabbitmq, find_redis, our_broker, rabbitmq_server, redis_server

ROUNDS = 3
SECONDS = 2.0
"""Of one round of publishing."""
ROUND_RECORDS = 300_000
"""At which a round ends before its time."""
UNDER_WAY = 8
"""Batches on their way at once."""
PUBLISHERS = 64
"""Of single records."""
PER_SECOND = 5_000
PACED_RECORDS = 5 * PER_SECOND
TICK_SECONDS = 0.002
WARM_UP_RECORDS = PER_SECOND
"""The first second's, which are in no latency."""
PATIENCE_SECONDS = 60.0
"""For which a process is waited for beyond the time that it should take."""

_STAMP = struct.Struct("<q")  # nanoseconds of the monotonic clock, which all processes share


@dataclass(slots=True)
class Figures:
    """What was measured of one system: records per second, and seconds."""

    publish: float = 0.0
    consume: float = 0.0
    singles: float = 0.0
    single_latencies: list[float] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)
    """From `send` to delivery."""


# What the other processes do


async def publish(system: System) -> tuple[int, float]:
    """Batches, several under way, until all are durable: how many records, and how many a second."""
    sent = 0
    start = time.perf_counter()

    async def work() -> None:
        nonlocal sent
        while time.perf_counter() - start < SECONDS and sent < ROUND_RECORDS:
            sent += BATCH_RECORDS
            await system.publish(VALUES)

    await asyncio.gather(*(work() for _ in range(UNDER_WAY)))
    return sent, sent / (time.perf_counter() - start)


async def singles(system: System) -> tuple[int, float, list[float]]:
    """Many publishers, each of which waits for its record before it posts the next; also each one's latency."""
    latencies: list[float] = []
    start = time.perf_counter()

    async def work() -> None:
        while (began := time.perf_counter()) - start < SECONDS:
            await system.post(random.choice(VALUES))
            latencies.append(time.perf_counter() - began)

    await asyncio.gather(*(work() for _ in range(PUBLISHERS)))
    return len(latencies), len(latencies) / (time.perf_counter() - start), latencies


async def paced(system: System) -> None:
    """So many records a second, each with the time at which it came up, whether or not earlier ones are through."""
    start, sent = time.monotonic(), 0
    under_way: set[asyncio.Task[None]] = set()
    while sent < PACED_RECORDS:
        due = min(int((time.monotonic() - start) * PER_SECOND), PACED_RECORDS) - sent
        if due > 0:
            sent += due
            now = _STAMP.pack(time.monotonic_ns())
            values = [now + value[len(now) :] for value in itertools.islice(itertools.cycle(VALUES), due)]
            task = asyncio.create_task(system.send(values))
            under_way.add(task)
            task.add_done_callback(under_way.discard)
        await asyncio.sleep(TICK_SECONDS)
    await asyncio.gather(*under_way)


async def consume(system: System, count: int) -> float:
    """Records a second, from the first delivery to the last commit."""
    first = 0.0

    def deliver(_: Sequence[bytes]) -> None:
        nonlocal first
        first = first or time.perf_counter()

    await system.consume(count, deliver)
    return count / (time.perf_counter() - first)


async def follow(system: System, count: int) -> list[float]:
    """How old each record is when it is delivered."""
    ages: list[float] = []

    def deliver(values: Sequence[bytes]) -> None:
        now = time.monotonic_ns()
        ages.extend((now - _STAMP.unpack_from(value)[0]) / 1e9 for value in values)

    await system.consume(count, deliver)
    return ages[WARM_UP_RECORDS:]


WORK: dict[str, Callable[..., Awaitable[Any]]] = {
    work.__name__: work for work in (publish, singles, paced, consume, follow)
}


def worker(connection: Connection, place: Host) -> None:
    """Do what is asked for, one after the other, until told to stop; then the system is closed."""

    async def run() -> None:
        async with place.open() as system:
            while (order := await asyncio.to_thread(connection.recv)) is not None:
                name, *options = order
                connection.send(await WORK[name](system, *options))

    uvloop.run(run())  # what one would use, with any of them


class Worker:
    """A process that publishes or consumes, as the one who measures sees it."""

    def __init__(self, place: Host) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._connection, there = spawn.Pipe()
        self._process = spawn.Process(target=worker, args=(there, place), daemon=True)
        self._process.start()

    def begin(self, name: str, *options: object) -> None:
        self._connection.send((name, *options))

    def result(self) -> Any:
        """Of what was begun; the process's death is not waited for in vain."""
        until = time.monotonic() + PATIENCE_SECONDS
        while not self._connection.poll(0.1):
            if not self._process.is_alive():
                raise RuntimeError(f"a process ended with {self._process.exitcode}")
            if time.monotonic() > until:
                raise RuntimeError(f"no result after {PATIENCE_SECONDS:g} s")
        return self._connection.recv()

    def do(self, name: str, *options: object) -> Any:
        self.begin(name, *options)
        return self.result()

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.send(None)
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


# All of it for each system


def measure(place: Host, rounds: int) -> Figures:
    asyncio.run(_create(place))
    figures = Figures()
    with contextlib.ExitStack() as stack:
        publisher, consumer = Worker(place), Worker(place)
        stack.callback(publisher.stop)
        stack.callback(consumer.stop)
        for _ in range(rounds):
            sent, per_second = publisher.do("publish")
            figures.publish = max(figures.publish, per_second)
            figures.consume = max(figures.consume, consumer.do("consume", sent))
        for _ in range(rounds):
            sent, per_second, latencies = publisher.do("singles")
            figures.singles = max(figures.singles, per_second)
            figures.single_latencies += latencies
            consumer.do("consume", sent)
        consumer.begin("follow", PACED_RECORDS)
        time.sleep(1)  # until it has joined
        publisher.do("paced")
        figures.latencies = consumer.result()
    return figures


async def _create(place: Host) -> None:
    async with place.open() as system:
        await system.create()


@contextlib.contextmanager
def place_of(name: str, folder: Path) -> Iterator[Host | None]:
    """Where the named system runs while the block does; None if it is not to be had."""
    with contextlib.ExitStack() as stack:
        match name:
            case "ours":
                yield Host("ours", stack.enter_context(our_broker(folder)))
            case "RabbitMQ" if rabbitmq := find_rabbitmq():
                yield Host("rabbitmq", str(stack.enter_context(rabbitmq_server(rabbitmq, folder))))
            case "Redis" if server := find_redis():
                yield Host("redis", str(stack.enter_context(redis_server(server, folder, "always"))))
            case _:
                yield None


SYSTEMS = ("ours", "RabbitMQ", "Redis")

Cell = Callable[[Figures], str]
Value = Callable[[Figures], float]
ROWS: tuple[tuple[str, Cell, Value, str], ...] = (
    ("published durably in batches of 500, records/s", lambda f: rate(f.publish), lambda f: f.publish, "100 k"),
    ("consumed with commits, records/s", lambda f: rate(f.consume), lambda f: f.consume, "100 k"),
    (f"single records, {PUBLISHERS} under way, records/s", lambda f: rate(f.singles), lambda f: f.singles, "2 k"),
    (
        "  latency, p50 / p99 ms",
        lambda f: milliseconds(f.single_latencies, 50, 99),
        lambda f: 1 / percentile(f.single_latencies, 99),
        "",
    ),
    (
        f"sent -> delivered at {PER_SECOND:,} records/s, p50 / p99 ms",
        lambda f: milliseconds(f.latencies, 50, 99),
        lambda f: 1 / percentile(f.latencies, 99),
        "p99 < 20",
    ),
)


def report(measured: dict[str, Figures]) -> None:
    rows = [[what, *(cell(figures) for figures in measured.values()), target] for what, cell, _, target in ROWS]
    table(["", *measured, "target"], rows)
    others = [name for name in measured if name != "ours"]
    if "ours" in measured and others:
        print("\nours compared with the others: above 1 ours is better (of latencies the p99)")
        ours = measured["ours"]
        rows = [
            [what, *(f"{value(ours) / value(measured[name]):.1f}" for name in others)] for what, _, value, _ in ROWS
        ]
        table(["", *others], rows)


def main(rounds: int, only: str | None) -> None:
    print(
        f"queues: {use_cores()}, {RECORD_BYTES} random bytes a record; one broker with {PARTITIONS} partitions,"
        f" RabbitMQ with a prefetch of {PREFETCH}, Redis with `appendfsync always`; all survive a power cut"
    )
    parser = "hiredis" if importlib.util.find_spec("hiredis") else "its Python parser: hiredis is not installed"
    print(f"aio-pika {version('aio-pika')}; redis-py {version('redis')} with {parser}")
    measured: dict[str, Figures] = {}
    with tempfile.TemporaryDirectory(prefix="shardyard-bench-") as temporary:
        root = Path(temporary)
        print(f"in {root}: {filesystem(root)}, a sync of 4 KiB takes {sync_seconds(root) * 1e3:.2f} ms")
        for name in SYSTEMS:
            if only is not None and only not in name:
                continue
            folder = root / name
            folder.mkdir()
            with place_of(name, folder) as place:
                if place is not None:
                    measured[name] = measure(place, rounds)
    report(measured)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--only", help="only systems whose name has this in it: ours, RabbitMQ, Redis")
    options = parser.parse_args()
    main(options.rounds, options.only)
