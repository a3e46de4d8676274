"""How long producers wait when a topic is resharded: for `bench.pipeline`, which explains it.

Run as a program, it is the producers: `python -m bench.reshard_switch LOG RECORDS_PER_SECOND`. They send to `orders`
until their standard input is closed, and print the time of each send.
"""

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

from bench.figures import milliseconds
from pyspark.sql import SparkSession

from shardyard.groups import Node, Reader
from shardyard.log import Log, Sender, open_log
from shardyard.log.router import current_topic
from shardyard.model import Record, Topic
from shardyard.pipeline.blocking import blocking
from shardyard.pipeline.reshard.reshard import Resharded, reshard
from shardyard.registry import open_registry

SENDERS = 10
VALUE = bytes(256)
START_SECONDS = 3.0
BETWEEN_SECONDS = 0.5
"""How long producers write to the topic between two reshards."""


async def produce(log: str, rate: int) -> None:
    """Senders that each send a few records at a time, and all together `rate` records per second."""
    times: list[tuple[float, float]] = []
    async with open_log(log) as opened:
        stop = asyncio.Event()
        senders = [asyncio.create_task(_send(opened, n, rate / SENDERS, stop, times)) for n in range(SENDERS)]
        await asyncio.to_thread(sys.stdin.read)
        stop.set()
        await asyncio.gather(*senders)
    json.dump(times, sys.stdout)


async def _send(log: Log, number: int, rate: float, stop: asyncio.Event, times: list[tuple[float, float]]) -> None:
    sender = Sender(log, "orders")
    start = time.monotonic()
    sent = 0
    while not stop.is_set():
        due = int((time.monotonic() - start) * rate)
        if due > sent:
            records = [Record.new(VALUE, b"customer-%d-%d" % (number, n % 500)) for n in range(sent, due)]
            began = time.monotonic()
            await sender.send(records)
            times.append((time.time(), time.monotonic() - began))
            sent = due
        await asyncio.sleep(0.01)


class Producers:
    """Producers in a process of their own. `sends`: when each send ended, and how long it took, in seconds."""

    def __init__(self) -> None:
        self.sends: list[tuple[float, float]] = []


@contextlib.contextmanager
def producers(log: str, rate: int) -> Iterator[Producers]:
    found = Producers()
    command = [sys.executable, "-m", "bench.reshard_switch", log, str(rate)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield found
        output, _ = process.communicate()
        found.sends = [(at, took) for at, took in json.loads(output)]


def bench_switch(spark: SparkSession, log: str, registry: str, rate: int, switches: int) -> None:
    """Reshard the whole topic under load, and then what has arrived since, again and again."""
    asyncio.run(_commit_positions(log, registry))
    done: list[Resharded] = []
    ends: list[float] = []
    with producers(log, rate) as load:
        time.sleep(START_SECONDS)
        started = time.time()
        for _ in range(1 + switches):
            topic = _current(log)
            partitions = 24 if topic.partitions == 16 else 16
            done.append(reshard(spark, log, topic.name, partitions=partitions, registry=registry))
            time.sleep(BETWEEN_SECONDS)
            ends.append(time.time())
            _trim(log, _current(log))
    print(f"producers send {rate:,} records/s, {started - load.sends[0][0]:.0f} s before the first reshard")
    _report(f"reshard of {done[0].records:,} records", done[:1], load, started, ends[0])
    _report(f"{switches} reshards of what came since", done[1:], load, ends[0], ends[-1])


def _report(what: str, done: Sequence[Resharded], load: Producers, start: float, end: float) -> None:
    sends = [took for at, took in load.sends if start <= at <= end]
    sealed = [one.sealed_seconds for one in done]
    longest, worst = max(sealed) * 1e3, max(sends) * 1e3
    print(f"{what}, {end - start:.0f} s:")
    print(f"  topic sealed, p50 / p99 / longest   {milliseconds(sealed, 50, 99)} / {longest:.1f} ms")
    print(f"  {len(sends):,} sends, p50 / p99 / worst   {milliseconds(sends, 50, 99)} / {worst:.1f} ms")


async def _commit_positions(log: str, registry: str) -> None:
    """Let a group process a part of the topic, so that it has positions to transfer."""
    with open_registry(registry) as rows:
        async with (
            open_log(log) as opened,
            Node(opened, rows) as node,
            Reader("billing", ["orders"], node=node) as group,
        ):
            async for batch in group:
                await batch.commit()
                return


def _current(log: str) -> Topic:
    """What `orders` has moved to by now."""
    with blocking(log) as opened:
        return opened.wait(current_topic(opened.log, "orders"))


def _trim(log: str, topic: Topic) -> None:
    """Drop what the topic holds, so that the next reshard has only new records to copy."""
    with blocking(log) as opened:
        for partition in topic:
            opened.wait(opened.log.trim(partition, opened.wait(opened.log.span(partition)).end))


if __name__ == "__main__":
    asyncio.run(produce(sys.argv[1], int(sys.argv[2])))
