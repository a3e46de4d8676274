"""Publishing and serving within one process, without a network: CPU time and rate for each message of 256 bytes.

`python -m bench.sharding_queue`. Messages are published to 4 queues of an embedded log, then those of one queue are
delivered, in order, and acknowledged.
"""

import asyncio
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.figures import pin_to_cores, rate, table

from shardyard.groups.fence import ownership_fence
from shardyard.log import Log, open_log
from shardyard.model.sharding import (
    NODES_GROUP,
    SHARDS_TOPIC,
    STATES_TOPIC,
    Binding,
    Exchange,
    ExchangeType,
    OutgoingMessage,
    Queue,
)
from shardyard.runtime.clock import SystemClock
from shardyard.sharding.config import DEFAULT_CONFIG
from shardyard.sharding.dead_letters import DeadLetter
from shardyard.sharding.delivery import Deliveries
from shardyard.sharding.publishing import Publisher
from shardyard.sharding.queue import ShardQueue
from shardyard.sharding.state_store import StateStore
from shardyard.sharding.topology import Topology
from shardyard.sharding.topology_cache import TopologyCache

MESSAGES = 200_000
BATCH = 1_000
QUEUES = 4
PREFETCH = 1_000
BODY = b"x" * 256


@dataclass
class Timer:
    """Measures a part of this process's work."""

    messages: int
    started: float = 0.0
    cpu: float = 0.0

    def start(self) -> None:
        self.started, self.cpu = time.perf_counter(), time.process_time()

    def row(self, what: str) -> list[str]:
        seconds, cpu = time.perf_counter() - self.started, time.process_time() - self.cpu
        return [what, f"{rate(self.messages / seconds)}/s", f"{cpu / self.messages * 1e6:.1f} µs"]


class FixedTopology(TopologyCache):
    """A topology that does not change."""

    def __init__(self, topology: Topology) -> None:
        self.current = topology


class NoLetters:
    """There are no dead letters here."""

    async def store(self, queue: Queue, letters: Sequence[DeadLetter]) -> None:
        raise AssertionError(queue, letters)


def topology() -> Topology:
    queues = {f"q{index}": Queue(f"q{index}", index, 1) for index in range(QUEUES)}
    exchanges = {"images": Exchange("images", ExchangeType.MODULUS_HASH)}
    bindings = frozenset(Binding("images", name) for name in queues)
    return Topology(version=1, exchanges=exchanges, queues=queues, declared_bindings=bindings)


async def publish(log: Log, known: Topology) -> list[str]:
    publisher = Publisher(log, FixedTopology(known), SystemClock())
    messages = [OutgoingMessage(BODY, f"picture-{number}.png") for number in range(MESSAGES)]
    await publisher.publish("images", messages[:BATCH])
    timer = Timer(MESSAGES)
    timer.start()
    for first in range(0, MESSAGES, BATCH):
        await publisher.publish("images", messages[first : first + BATCH])
    return timer.row(f"published, {BATCH} at a time to {QUEUES} queues")


async def consume(log: Log, queue: Queue, how: str) -> list[str]:
    states = StateStore(log, SystemClock(), seconds=DEFAULT_CONFIG.store_seconds)
    fence = ownership_fence(NODES_GROUP, queue.partition, queue.slot + 1)
    served = ShardQueue(queue, fence, log, states, NoLetters())
    await served.open()
    timer = Timer((await served.status()).ready)
    left = timer.messages
    done = asyncio.Event()

    def receive(deliveries: Deliveries) -> None:
        nonlocal left
        last = deliveries.first_tag + len(deliveries) - 1
        if how == "multiple":
            subscription.ack(last, multiple=True)
        else:
            for tag in range(deliveries.first_tag, last + 1):
                subscription.ack(tag)
        left -= len(deliveries)
        if not left:
            done.set()

    timer.start()
    subscription = served.subscribe(receive, prefetch=PREFETCH)
    await done.wait()
    await served.close()
    await states.close()
    return timer.row(f"delivered and acknowledged, {how}")


async def measure(folder: Path) -> list[list[str]]:
    known = topology()
    url = f"sqlite:///{folder / 'log'}"
    async with open_log(url) as log:
        for name in (SHARDS_TOPIC, STATES_TOPIC):
            await log.create_topic(name, QUEUES)
        rows = [await publish(log, known)]
    async with open_log(url) as log:  # nothing of it is in memory
        rows.append(await consume(log, known.queues["q0"], "multiple"))
        rows.append(await consume(log, known.queues["q1"], "one by one"))
    return rows


def main() -> None:
    print(f"256-byte messages in SQLite, one process, {pin_to_cores()}")
    with tempfile.TemporaryDirectory() as folder:
        table(["", "rate", "CPU for each"], asyncio.run(measure(Path(folder))))


if __name__ == "__main__":
    main()
