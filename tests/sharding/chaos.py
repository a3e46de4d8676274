"""Real nodes of sharded queues that fail: nodes with their consumers, and producers, are killed (SIGKILL) and stalled
(SIGSTOP) at random; on PostgreSQL its server, too.

    python -m tests.sharding.chaos run --seconds 60 --seed 1 --engine postgresql

Each producer records what it is about to publish, and what was acknowledged. Each node consumes the queues that it
serves, and records what it got, before it acknowledges it; now and then it rejects or requeues a message, or its
consumer goes away with all that it has. At the end nothing is lost: every message that was acknowledged to a producer
was delivered. Nothing is stuck: all queues are empty. Messages of a key are delivered in order, except when they come
again.
"""

import argparse
import asyncio
import contextlib
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path

from shardyard.groups import Node
from shardyard.log import open_log
from shardyard.model import NotOwner, RetryLater, Stamp
from shardyard.model.sharding import DEAD_PREFIX, Exchange, ExchangeType, OutgoingMessage, Policy, QueueLimits
from shardyard.registry import open_registry
from shardyard.runtime.clock import SystemClock
from shardyard.runtime.retry import retry
from shardyard.sharding.administration import Administration
from shardyard.sharding.config import ShardingConfig
from shardyard.sharding.delivery import Deliveries, Subscription
from shardyard.sharding.node import ShardingNode
from shardyard.sharding.publishing import Publisher
from shardyard.sharding.queue import ShardQueue
from shardyard.sharding.state_store import count_unsettled
from shardyard.sharding.topology_cache import TopologyCache
from tests.groups.chaos import DATABASE, Faults, Process, log_url, opened, registry_url
from tests.postgresql import PostgresqlServer, postgresql_server

EXCHANGE = "images"
NODES = 3
SHARDS_PER_NODE = 2
PRODUCERS = 2
KEYS = 7
SESSION_SECONDS = 1.5
LONGEST_PAUSE = 2.5
"""Between two faults: a node that was killed needs some seconds to join again."""
CATCH_UP_SECONDS = 90.0


# The processes


async def publish(folder: Path, name: str) -> None:
    """Publish batches, and repeat one whose outcome is unknown: also after a kill, under the same stamp."""
    path = folder / f"{name}.sent"
    lines = path.read_text().splitlines() if path.exists() else []
    number = sum(line.startswith("I ") for line in lines)
    is_open = bool(lines) and lines[-1].startswith("I ")
    journal = path.open("a", buffering=1)
    registry = await opened(lambda: open_registry(registry_url(folder)))
    async with await opened(lambda: open_log(log_url(folder))) as log, Node(log, registry, name=name) as node:
        cache = TopologyCache(node)
        await retry(cache.__aenter__, clock=SystemClock())
        publisher = Publisher(log, cache, node.clock)
        while True:
            if not is_open:
                number += 1
                journal.write(f"I {number}\n")
            messages = [OutgoingMessage(f"{name}:{number}:{i}".encode(), f"{name}-{i % KEYS}") for i in range(20)]
            with contextlib.suppress(RetryLater):
                await publisher.publish(EXCHANGE, messages, stamp=Stamp(name, number))
                journal.write("A\n")
                is_open = False
                await asyncio.sleep(random.uniform(0, 0.02))
                continue
            is_open = True


class ChaosConsumer:
    """Consumes one queue as long as this node serves it."""

    def __init__(self, queue: ShardQueue, notes: "Notes") -> None:
        self._queue = queue
        self._notes = notes
        self._subscribe()

    def _subscribe(self) -> None:
        def receive(deliveries: Deliveries) -> None:
            self._notes.write(self._queue, deliveries)
            tags = range(deliveries.first_tag, deliveries.first_tag + len(deliveries))
            delay = random.uniform(0, 0.02)
            asyncio.get_running_loop().call_later(delay, self._settle, subscription, tags)

        with contextlib.suppress(NotOwner):
            subscription = self._queue.subscribe(receive, prefetch=random.randint(1, 60))

    def _settle(self, subscription: Subscription, tags: range) -> None:
        if not subscription.is_active:
            return
        if random.random() < 0.02:
            subscription.cancel()
            self._subscribe()
            return
        for tag in random.sample(tags, len(tags)):
            chance = random.random()
            if self._queue.name.startswith(DEAD_PREFIX) or chance > 0.03:
                subscription.ack(tag)
            else:
                subscription.nack(tag, requeue=chance > 0.005)


class Notes:
    """What this process got."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)

    def write(self, queue: ShardQueue, deliveries: Deliveries) -> None:
        rows = zip(deliveries.records, deliveries.redelivered, strict=True)
        epoch, slot = queue.fence.epoch, queue.queue.slot
        self._file.write("".join(f"{slot} {epoch} {int(again)} {r.value.decode()}\n" for r, again in rows))


async def serve(folder: Path, name: str) -> None:
    notes = Notes(folder / f"{name}.got")
    registry = await opened(lambda: open_registry(registry_url(folder)))
    config = ShardingConfig(session_timeout=SESSION_SECONDS)
    async with await opened(lambda: open_log(log_url(folder))) as log, Node(log, registry, name=name) as host:

        async def joined() -> ShardingNode:
            node = ShardingNode(host, name=name.split(".", maxsplit=1)[0], address=name, config=config)
            return await node.__aenter__()

        node = await retry(joined, clock=SystemClock())
        consumed: set[ShardQueue] = set()
        while True:
            for queue in set(node.queues) - consumed:
                ChaosConsumer(queue, notes)
            consumed = set(node.queues)
            await asyncio.sleep(0.02)


# The fire


class ShardingProcess(Process):
    """A node or a producer."""

    module = "tests.sharding.chaos"


@dataclass
class Report:
    kills: int = 0
    stalls: int = 0
    server_faults: int = 0
    acknowledged: int = 0
    delivered: int = 0
    again: int = 0
    """Deliveries beyond the first of each message."""
    takeovers: int = 0
    """Ownerships under which messages were delivered, beyond the first of each queue."""
    problems: list[str] = field(default_factory=list)


def run(
    folder: Path, seconds: float, seed: int, *, server: PostgresqlServer | None = None, server_stall: float = 5.0
) -> Report:
    """Kill and stall nodes and producers for that long, then check."""
    with contextlib.ExitStack() as stack:
        if server is not None:
            (folder / DATABASE).write_text(stack.enter_context(server.new_database()))
        asyncio.run(_prepare(folder))
        producers = [ShardingProcess(folder, "produce", f"p{i}") for i in range(PRODUCERS)]
        nodes = [ShardingProcess(folder, "serve", f"n{i}") for i in range(NODES)]
        faults = Faults([*producers, *nodes], random.Random(seed), server, server_stall, LONGEST_PAUSE)
        try:
            _wait_for_traffic(folder)
            faults.cause(seconds)
            for producer in producers:
                producer.end()
            stuck = asyncio.run(_catch_up(folder, nodes))
        finally:
            for process in [*producers, *nodes]:
                process.signal(signal.SIGCONT)
                process.kill()
        report = check(folder)
    report.problems += stuck
    return replace(report, kills=faults.kills, stalls=faults.stalls, server_faults=faults.server_faults)


def _wait_for_traffic(folder: Path) -> None:
    """Until every process has done something."""
    until = time.monotonic() + CATCH_UP_SECONDS
    while sum(path.stat().st_size > 0 for path in folder.glob("*.[gs]*t")) < NODES + PRODUCERS:
        if time.monotonic() > until:
            raise AssertionError([path.read_text()[-500:] for path in folder.glob("*.err")])
        time.sleep(0.1)


async def _prepare(folder: Path) -> None:
    with open_registry(registry_url(folder)) as registry:
        async with open_log(log_url(folder)) as log, Node(log, registry, name="administrator") as node:
            administration = Administration(node)
            await administration.declare_exchange(Exchange(EXCHANGE, ExchangeType.MODULUS_HASH), "chaos")
            limits = QueueLimits(delivery_limit=50)
            await administration.set_policy(Policy("all", ".*", SHARDS_PER_NODE, limits=limits), "chaos")
            for number in range(NODES):  # so that messages have queues from the first one on
                await administration.register_node(f"n{number}")


async def _catch_up(folder: Path, nodes: list[ShardingProcess]) -> list[str]:
    """Wait until all queues are empty. Returns those that are not."""
    until = time.monotonic() + CATCH_UP_SECONDS
    with open_registry(registry_url(folder)) as registry:
        async with open_log(log_url(folder)) as log, Node(log, registry, name="auditor") as node:
            administration = Administration(node)
            while True:
                queues = (await administration.topology()).queues.values()
                left = {queue.name: await count_unsettled(log, queue) for queue in queues}
                if not any(left.values()):
                    return []
                if time.monotonic() > until:
                    return [f"{name} has {count} messages left" for name, count in left.items() if count]
                dead = [process.name for process in nodes if process.handle.poll() is not None]
                if dead:
                    return [f"nodes ended by themselves: {dead}"]
                await asyncio.sleep(0.2)


# The check


def check(folder: Path) -> Report:
    """Compare what was acknowledged to producers with what nodes got."""
    report = Report()
    got: defaultdict[str, int] = defaultdict(int)
    epochs: defaultdict[int, set[int]] = defaultdict(set)
    for path in sorted(folder.glob("*.got")):
        for (slot, epoch), bodies in _by_ownership(path).items():
            epochs[slot].add(epoch)
            for body in bodies:
                got[body] += 1
            if slot < NODES * SHARDS_PER_NODE:  # dead letters come in the order in which they were rejected
                report.problems += (f"slot {slot}, epoch {epoch}: {what}" for what in _disorder(bodies))
    acknowledged = _acknowledged(folder)
    lost = sorted(acknowledged - got.keys())
    if lost:
        report.problems.append(f"{len(lost)} messages are lost, such as {lost[0]}")
    report.acknowledged, report.delivered = len(acknowledged), sum(got.values())
    report.again = report.delivered - len(got)
    report.takeovers = sum(len(each) - 1 for each in epochs.values())
    for path in folder.glob("*.err"):
        if "Traceback" in (text := path.read_text()):
            report.problems.append(f"{path.name} has a traceback: {text[-900:]}")
    return report


def _by_ownership(path: Path) -> dict[tuple[int, int], list[str]]:
    """By slot and epoch, the messages in the order in which they were delivered."""
    found: defaultdict[tuple[int, int], list[str]] = defaultdict(list)
    for line in path.read_text().splitlines():
        parts = line.split()
        if len(parts) == 4:  # the last line of a process that was killed may be cut off
            found[int(parts[0]), int(parts[1])].append(parts[3])
    return found


def _disorder(bodies: list[str]) -> list[str]:
    """Messages of a key that came before an earlier one, leaving out repetitions."""
    last: dict[tuple[str, int], tuple[int, int]] = {}
    found = []
    for body in dict.fromkeys(bodies):
        producer, number, index = body.split(":")
        key, place = (producer, int(index) % KEYS), (int(number), int(index))
        if place < last.get(key, (-1, -1)):
            found.append(f"{body} came after {last[key]}")
        last[key] = max(place, last.get(key, place))
    return found


def _acknowledged(folder: Path) -> set[str]:
    found = set()
    for path in folder.glob("*.sent"):
        number = ""
        for line in path.read_text().splitlines():
            if line.startswith("I "):
                number = line.removeprefix("I ")
            elif line == "A":
                found |= {f"{path.stem}:{number}:{i}" for i in range(20)}
    return found


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=["run", "produce", "serve"])
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--name", default="")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--engine", choices=["sqlite", "postgresql"], default="sqlite")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    options = parser.parse_args()
    if options.role == "run":
        folder = options.folder or Path(tempfile.mkdtemp(prefix="shardyard-chaos-"))
        print(f"seed {options.seed}, {options.seconds:g} s, in {folder}")
        with contextlib.ExitStack() as stack:
            server = stack.enter_context(postgresql_server()) if options.engine == "postgresql" else None
            report = run(folder, options.seconds, options.seed, server=server)
        print(report)
        if report.problems:
            return 1
        shutil.rmtree(folder)
        return 0
    asyncio.run((publish if options.role == "produce" else serve)(options.folder, options.name))
    return 0


if __name__ == "__main__":
    sys.exit(main())
