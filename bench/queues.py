"""Work queues on one broker compared with RabbitMQ and Redis streams: 2 cores, records of 256 random bytes.

Run it with `make bench` or `python -m bench.queues`; `bench/README.md` explains how each figure is measured.
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
from bench.figures import filesystem, milliseconds, percentile, pin_to_cores, rate, sync_seconds, table
from bench.queue_systems import BATCH_RECORDS, PARTITIONS, PREFETCH, RECORD_BYTES, VALUES, Endpoint, System
from bench.servers import find_rabbitmq, find_redis, rabbitmq_server, redis_server, shardyard_broker

ROUNDS = 3
ROUND_SECONDS = 2.0
ROUND_RECORDS = 300_000
"""A round of publishing ends early once it has sent this many records."""
BATCHES_IN_FLIGHT = 8
PUBLISHERS = 64
"""Concurrent publishers of single records."""
PACED_RECORDS_PER_SECOND = 5_000
PACED_RECORDS = 5 * PACED_RECORDS_PER_SECOND
TICK_SECONDS = 0.002
WARM_UP_RECORDS = PACED_RECORDS_PER_SECOND
"""Records of the first second, which the latencies leave out."""
RESULT_TIMEOUT_SECONDS = 60.0

_STAMP = struct.Struct("<q")  # time in ns of the monotonic clock, which all processes share


@dataclass(slots=True)
class Figures:
    """The measurements of one system, in records per second and in seconds."""

    publish: float = 0.0
    consume: float = 0.0
    singles: float = 0.0
    single_latencies: list[float] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)
    """From `send` to delivery, at a fixed rate."""


# What the worker processes run


async def publish(system: System) -> tuple[int, float]:
    """Publish batches, several in flight, until all are durable: the number of records, and records per second."""
    sent = 0
    start = time.perf_counter()

    async def work() -> None:
        nonlocal sent
        while time.perf_counter() - start < ROUND_SECONDS and sent < ROUND_RECORDS:
            sent += BATCH_RECORDS
            await system.publish(VALUES)

    await asyncio.gather(*(work() for _ in range(BATCHES_IN_FLIGHT)))
    return sent, sent / (time.perf_counter() - start)


async def publish_singles(system: System) -> tuple[int, float, list[float]]:
    """Publishers that each wait for a record to be durable before posting the next: records, records/s, latencies."""
    latencies: list[float] = []
    start = time.perf_counter()

    async def work() -> None:
        while (posted_at := time.perf_counter()) - start < ROUND_SECONDS:
            await system.post(random.choice(VALUES))
            latencies.append(time.perf_counter() - posted_at)

    await asyncio.gather(*(work() for _ in range(PUBLISHERS)))
    return len(latencies), len(latencies) / (time.perf_counter() - start), latencies


async def publish_paced(system: System) -> None:
    """Send records at a fixed rate, whether or not earlier ones are done; each carries the time it was sent."""
    start, sent = time.monotonic(), 0
    in_flight: set[asyncio.Task[None]] = set()
    while sent < PACED_RECORDS:
        due = min(int((time.monotonic() - start) * PACED_RECORDS_PER_SECOND), PACED_RECORDS) - sent
        if due > 0:
            sent += due
            now = _STAMP.pack(time.monotonic_ns())
            values = [now + value[len(now) :] for value in itertools.islice(itertools.cycle(VALUES), due)]
            task = asyncio.create_task(system.send(values))
            in_flight.add(task)
            task.add_done_callback(in_flight.discard)
        await asyncio.sleep(TICK_SECONDS)
    await asyncio.gather(*in_flight)


async def consume(system: System, count: int) -> float:
    """Records per second, from the first delivery to the last commit."""
    first = 0.0

    def deliver(_: Sequence[bytes]) -> None:
        nonlocal first
        first = first or time.perf_counter()

    await system.consume(count, deliver)
    return count / (time.perf_counter() - first)


async def measure_delivery(system: System, count: int) -> list[float]:
    """The age of each record when it is delivered."""
    ages: list[float] = []

    def deliver(values: Sequence[bytes]) -> None:
        now = time.monotonic_ns()
        ages.extend((now - _STAMP.unpack_from(value)[0]) / 1e9 for value in values)

    await system.consume(count, deliver)
    return ages[WARM_UP_RECORDS:]


WORK: dict[str, Callable[..., Awaitable[Any]]] = {
    work.__name__: work for work in (publish, publish_singles, publish_paced, consume, measure_delivery)
}


def run_worker(connection: Connection, endpoint: Endpoint) -> None:
    """Run the requested functions one after the other, until the request is None."""

    async def run() -> None:
        async with endpoint.open() as system:
            while (request := await asyncio.to_thread(connection.recv)) is not None:
                name, *options = request
                connection.send(await WORK[name](system, *options))

    uvloop.run(run())  # the event loop one would choose for any of these clients


class Worker:
    """The benchmark's handle on a process that publishes or consumes."""

    def __init__(self, endpoint: Endpoint) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._connection, worker_connection = spawn.Pipe()
        self._process = spawn.Process(target=run_worker, args=(worker_connection, endpoint), daemon=True)
        self._process.start()

    def start(self, name: str, *options: object) -> None:
        """Start a function of `WORK`; `result` waits for it."""
        self._connection.send((name, *options))

    def result(self) -> Any:
        """Wait for the result of the function that was started; raises if the process ends or takes too long."""
        deadline = time.monotonic() + RESULT_TIMEOUT_SECONDS
        while not self._connection.poll(0.1):
            if not self._process.is_alive():
                raise RuntimeError(f"a worker process ended with exit code {self._process.exitcode}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"a worker process sent no result within {RESULT_TIMEOUT_SECONDS:g} s")
        return self._connection.recv()

    def call(self, name: str, *options: object) -> Any:
        """Start a function and wait for its result."""
        self.start(name, *options)
        return self.result()

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.send(None)
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


# All measurements of one system


def measure(endpoint: Endpoint, rounds: int) -> Figures:
    asyncio.run(_create(endpoint))
    figures = Figures()
    with contextlib.ExitStack() as stack:
        publisher, consumer = Worker(endpoint), Worker(endpoint)
        stack.callback(publisher.stop)
        stack.callback(consumer.stop)
        for _ in range(rounds):
            sent, per_second = publisher.call("publish")
            figures.publish = max(figures.publish, per_second)
            figures.consume = max(figures.consume, consumer.call("consume", sent))
        for _ in range(rounds):
            sent, per_second, latencies = publisher.call("publish_singles")
            figures.singles = max(figures.singles, per_second)
            figures.single_latencies += latencies
            consumer.call("consume", sent)
        consumer.start("measure_delivery", PACED_RECORDS)
        time.sleep(1)  # until the consumer has joined
        publisher.call("publish_paced")
        figures.latencies = consumer.result()
    return figures


async def _create(endpoint: Endpoint) -> None:
    async with endpoint.open() as system:
        await system.create()


@contextlib.contextmanager
def running_system(name: str, folder: Path) -> Iterator[Endpoint | None]:
    """Run the named system while the block runs; yields None if its server is not available."""
    with contextlib.ExitStack() as stack:
        match name:
            case "Shardyard":
                yield Endpoint("shardyard", stack.enter_context(shardyard_broker(folder)))
            case "RabbitMQ" if rabbitmq := find_rabbitmq():
                yield Endpoint("rabbitmq", str(stack.enter_context(rabbitmq_server(rabbitmq, folder))))
            case "Redis" if server := find_redis():
                yield Endpoint("redis", str(stack.enter_context(redis_server(server, folder, "always"))))
            case _:
                yield None


SYSTEMS = ("Shardyard", "RabbitMQ", "Redis")

Cell = Callable[[Figures], str]
Value = Callable[[Figures], float]
ROWS: tuple[tuple[str, Cell, Value, str], ...] = (
    ("published durably in batches of 500, records/s", lambda f: rate(f.publish), lambda f: f.publish, "100 k"),
    ("consumed with commits, records/s", lambda f: rate(f.consume), lambda f: f.consume, "100 k"),
    (f"single records, {PUBLISHERS} in flight, records/s", lambda f: rate(f.singles), lambda f: f.singles, "2 k"),
    (
        "  latency, p50 / p99 ms",
        lambda f: milliseconds(f.single_latencies, 50, 99),
        lambda f: 1 / percentile(f.single_latencies, 99),
        "",
    ),
    (
        f"sent -> delivered at {PACED_RECORDS_PER_SECOND:,} records/s, p50 / p99 ms",
        lambda f: milliseconds(f.latencies, 50, 99),
        lambda f: 1 / percentile(f.latencies, 99),
        "p99 < 20",
    ),
)


def report(measured: dict[str, Figures]) -> None:
    rows = [[what, *(cell(figures) for figures in measured.values()), target] for what, cell, _, target in ROWS]
    table(["", *measured, "target"], rows)
    others = [name for name in measured if name != "Shardyard"]
    if "Shardyard" in measured and others:
        print("\nShardyard compared with the others: above 1, Shardyard is better (latencies by p99)")
        ours = measured["Shardyard"]
        rows = [
            [what, *(f"{value(ours) / value(measured[name]):.1f}" for name in others)] for what, _, value, _ in ROWS
        ]
        table(["", *others], rows)


def main(rounds: int, only: str | None) -> None:
    print(
        f"queues: {pin_to_cores()}, records of {RECORD_BYTES} random bytes; one broker with {PARTITIONS} partitions,"
        f" RabbitMQ with a prefetch of {PREFETCH}, Redis with `appendfsync always`; all survive a power cut"
    )
    parser = "hiredis" if importlib.util.find_spec("hiredis") else "its Python parser (hiredis is not installed)"
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
            with running_system(name, folder) as endpoint:
                if endpoint is not None:
                    measured[name] = measure(endpoint, rounds)
    report(measured)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="rounds of each measurement")
    parser.add_argument("--only", help="measure only systems whose name contains this: Shardyard, RabbitMQ, Redis")
    options = parser.parse_args()
    main(options.rounds, options.only)
