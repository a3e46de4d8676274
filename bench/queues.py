"""Work queues on one broker compared with RabbitMQ, Redis streams, NATS JetStream and Kafka: 2 cores, records of 256
random bytes. Then what many consumers cost a broker of Shardyard.

Run it with `make bench` or `python -m bench.queues`; `bench/README.md` explains how each figure is measured.
"""

import argparse
import contextlib
import importlib.util
import os
import re
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from bench import queue_members
from bench.contenders.kafka import KAFKA, KAFKA_FLUSHED
from bench.contenders.nats import NATS
from bench.contenders.rabbitmq import RABBITMQ
from bench.contenders.redis import REDIS
from bench.contenders.shardyard import SHARDYARD
from bench.contenders.system import PARTITIONS, PREFETCH, RECORD_BYTES, Contender
from bench.figures import filesystem, pin_to_cores, sync_seconds, table
from bench.queue_rows import ROWS, Figures, Row
from bench.queue_workers import Worker, run_client

ROUNDS = 3
SETTLE_SECONDS = 5.0
"""Between two measurements, so that none meets what another system does in the background after its load."""
CONTENDERS = (SHARDYARD, RABBITMQ, REDIS, NATS, KAFKA, KAFKA_FLUSHED)
MEMBER_ROWS = ("idle", "growth")


@dataclass(frozen=True, slots=True)
class Running:
    """A system whose server runs, with its two client processes."""

    name: str
    publisher: Worker
    consumer: Worker
    figures: Figures = field(default_factory=Figures)


def start(contender: Contender, root: Path, stack: contextlib.ExitStack) -> Running | None:
    """Start a system, until the stack is closed. None if its server is missing."""
    folder = root / re.sub(r"\W+", "-", contender.name)
    folder.mkdir()
    address = stack.enter_context(contender.serve(folder))
    if address is None:
        return None
    publisher, consumer = (Worker(run_client, contender.connect, address) for _ in range(2))
    stack.callback(publisher.stop)
    stack.callback(consumer.stop)
    publisher.call("create")
    return Running(contender.name, publisher, consumer)


def compare(contenders: Sequence[Contender], rows: Sequence[Row], rounds: int, root: Path) -> None:
    """Measure the systems in turn, round by round, so that other work on the machine slows all of them down. Each round
    begins with another system."""
    with contextlib.ExitStack() as stack:
        systems = [system for contender in contenders if (system := start(contender, root, stack)) is not None]
        for row in rows:
            for number in range(1, rounds + 1):
                for system in systems[number - 1 :] + systems[: number - 1]:
                    time.sleep(SETTLE_SECONDS)
                    os.sync()  # so that no system pays for what another one has left in the page cache
                    row.measure(system.publisher, system.consumer, system.figures)
                print(f"{row.name}: round {number} of {rounds}, load average {os.getloadavg()[0]:.1f}", flush=True)
    report({system.name: system.figures for system in systems}, rows)


def report(measured: dict[str, Figures], rows: Sequence[Row]) -> None:
    lines = [line for row in rows for line in row.lines]
    table(["", *measured], [[line.title, *map(line.cell, measured.values())] for line in lines])
    ours = measured.get(SHARDYARD.name)
    others = {name: figures for name, figures in measured.items() if figures is not ours}
    compared = [line for line in lines if not line.is_limited]
    if ours is not None and others:
        print("\nShardyard compared with the others: above 1, Shardyard is better (latencies by their last percentile)")
        table(
            ["", *others],
            [[line.title, *(f"{line.score(ours) / line.score(f):.2f}" for f in others.values())] for line in compared],
        )


def main(only: Sequence[str], rows: Sequence[str], rounds: int, idle: int, growth: Sequence[int]) -> None:
    print(
        f"queues: {pin_to_cores()}, records of {RECORD_BYTES} random bytes; topics of {PARTITIONS} partitions,"
        f" RabbitMQ and NATS with a prefetch of {PREFETCH}. All but Kafka with its defaults survive a power cut"
    )
    parser = "hiredis" if importlib.util.find_spec("hiredis") else "its Python parser (hiredis is not installed)"
    clients = ", ".join(f"{name} {version(name)}" for name in ("aio-pika", "nats-py", "confluent-kafka", "redis"))
    print(f"{clients} with {parser}")
    contenders = [c for c in CONTENDERS if not only or any(name.lower() in c.name.lower() for name in only)]
    with tempfile.TemporaryDirectory(prefix="shardyard-bench-") as temporary:
        root = Path(temporary)
        print(f"in {root}: {filesystem(root)}, a sync of 4 KiB takes {sync_seconds(root) * 1e3:.2f} ms", flush=True)
        if compared := [row for row in ROWS if row.name in rows]:
            compare(contenders, compared, rounds, root)
        if SHARDYARD in contenders and "idle" in rows:
            queue_members.measure_idle(root, idle)
        if SHARDYARD in contenders and "growth" in rows:
            queue_members.measure_growth(root, growth)


if __name__ == "__main__":
    names = [*(row.name for row in ROWS), *MEMBER_ROWS]
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--rounds", type=int, default=ROUNDS, help="rounds of each measurement")
    arguments.add_argument("--rows", nargs="+", choices=names, default=names, metavar="ROW", help=", ".join(names))
    arguments.add_argument(
        "--only", nargs="+", default=[], metavar="NAME", help="measure only systems whose name contains one of these"
    )
    arguments.add_argument(
        "--idle", type=int, default=queue_members.IDLE, metavar="N", help="consumers of the row idle, a multiple of 8"
    )
    arguments.add_argument(
        "--growth", nargs="+", type=int, default=queue_members.GROWTH, metavar="N", help="consumers of the row growth"
    )
    options = arguments.parse_args()
    main(options.only, options.rows, options.rounds, options.idle, options.growth)
