"""The rows of the comparison of messaging systems: what each measures, and how it is shown."""

import asyncio
import contextlib
import math
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

from bench.figures import milliseconds, percentile, rate
from bench.messaging_load import Audit, Exchanged, Moved, run_load, user_names
from bench.messengers.messenger import Messenger, Service
from bench.messengers.shardyard import SHARDYARD_LOCAL, SHARDYARD_LOG
from bench.queue_workers import Worker

from shardyard.log import open_log
from shardyard.model import Partition
from shardyard.wire.inbox import TOPIC

OURS = (SHARDYARD_LOG, SHARDYARD_LOCAL)
PROCESSES = 2
"""That host the clients."""
MEMORY_SETTLE_SECONDS = 2.0
TIMED_CONNECTIONS = 10_000
MOVE_SECONDS = 60.0
"""The longest wait for clients that have moved."""
RESTART_SECONDS = 1.0
"""From a kill to the start of the same server."""
KILLS_AT = (0.25, 0.6)
"""When the first server is killed, as parts of the time of the load."""
WINDOWS = (1, 2, 4, 8, 16, 32)
"""Texts of each sender in flight. They are raised until it is no longer worth it."""
WORTH = 1.03

Values = list[float]
Figures = defaultdict[str, Values]
"""The measurements of one system over all rounds, by the title of the line that shows them."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much load there is."""

    our_connections: int
    """Clients of Shardyard in the row `connections`."""
    connections: int
    """Of the others."""
    users: int
    """That exchange messages."""
    per_second: float
    """Messages at a fixed rate."""
    seconds: float
    """How long each load lasts."""
    devices: int
    """Clients of each recipient, in the row `fan-out`."""
    moved: int
    """Clients of the server that is stopped, in the row `moves`."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the table. A system without values has an empty cell."""

    title: str
    show: Callable[[Values], str]
    score: Callable[[Values], float] | None = None
    """The higher the better. None if it is not compared."""


def fastest(title: str) -> Line:
    """Rates, of which the best round counts."""
    return Line(title, lambda values: rate(max(values)), max)


def latency(title: str) -> Line:
    """Seconds, shown as milliseconds."""
    return Line(title, lambda values: milliseconds(values, 50, 99), lambda values: 1 / percentile(values, 99))


def seconds(title: str) -> Line:
    def show(values: Values) -> str:
        return " / ".join(f"{percentile(values, percent):.2f}" for percent in (50, 99))

    return Line(title, show, lambda values: 1 / percentile(values, 99))


def least(title: str, digits: int = 1) -> Line:
    return Line(
        title, lambda values: f"{min(values):,.{digits}f}", lambda values: 1 / min(values) if min(values) else math.inf
    )


def total(title: str) -> Line:
    return Line(title, lambda values: f"{sum(values):,.0f}")


class Loaded:
    """A running system with the processes that load it."""

    def __init__(self, service: Service, workers: Sequence[Worker]) -> None:
        self.service = service
        self._workers = workers

    def call(self, name: str, *arguments: object) -> list[Any]:
        """Call a method of all processes at the same time; their results."""
        self.start(name, *arguments)
        return self.results()

    def start(self, name: str, *arguments: object) -> None:
        for worker in self._workers:
            worker.start(name, *arguments)

    def results(self) -> list[Any]:
        return [worker.result() for worker in self._workers]

    def print_refusals(self, name: str) -> None:
        print_refusals(name, [refusal for process in self.call("refusals") for refusal in process])

    def share(self, count: float) -> float:
        """The part of one process."""
        return count / len(self._workers)

    def connect(self, users: int, devices: int = 1, prefix: str = "u") -> list[int]:
        """Connect the clients of so many users. How long after the first began each was connected, in ns."""
        share = round(self.share(users))
        self.sign_in(share, prefix)
        start = time.monotonic_ns()
        times = self.call("connect", share, devices, prefix)
        return sorted(at - start for process in times for at in process)

    def sign_in(self, share: int, prefix: str) -> None:
        processes = range(len(self._workers))
        self.service.register([user for process in processes for user in user_names(process, share, prefix)])
        self.call("sign_in", share, prefix)


@contextlib.contextmanager
def loaded(messenger: Messenger, folder: Path, servers: int = 1, processes: int = PROCESSES) -> Iterator[Loaded | None]:
    """Run the system in a new folder, as so many servers. None if it can't be run here."""
    folder.mkdir(parents=True)
    with contextlib.ExitStack() as stack:
        service = stack.enter_context(messenger.serve(folder, min(servers, messenger.max_servers)))
        if service is None:
            yield None
            return
        workers = [Worker(run_load, messenger.client, service.addresses, process) for process in range(processes)]
        for worker in workers:
            stack.callback(worker.stop)
        yield Loaded(service, workers)


def print_refusals(name: str, refusals: Sequence[str]) -> None:
    """What should not happen is said, so that nobody takes the figures at face value."""
    for refusal, count in Counter(refusals).most_common(3):
        print(f"  {name}: {count} x {refusal}", flush=True)


@dataclass(frozen=True, slots=True)
class Row:
    """Lines that are measured together, on a system that is started for them."""

    name: str
    """For `--rows`."""
    lines: tuple[Line, ...]
    measure: Callable[[Messenger, Path, Sizes, Figures], None]
    systems: tuple[Messenger, ...] | None = None
    """Only these; None for all."""
    is_default: bool = True


# Connections

CLIENTS = Line("connected clients", lambda values: f"{values[-1]:,.0f}")
MEMORY = least("memory of the servers per connection, KB")
CONNECTING = least(f"{TIMED_CONNECTIONS:,} connections take, s")


def measure_connections(messenger: Messenger, folder: Path, sizes: Sizes, figures: Figures) -> None:
    count = sizes.our_connections if messenger in OURS else sizes.connections
    connect_many(messenger, folder, count, 1, PROCESSES, figures)


def measure_many_connections(messenger: Messenger, folder: Path, _: Sizes, figures: Figures) -> None:
    connect_many(messenger, folder, MANY_CONNECTIONS, 3, 3, figures)


def connect_many(
    messenger: Messenger, folder: Path, count: int, servers: int, processes: int, figures: Figures
) -> None:
    with loaded(messenger, folder, servers, processes) as system:
        if system is None:
            return
        before = system.service.memory_bytes()
        times = system.connect(count)
        time.sleep(MEMORY_SETTLE_SECONDS)
        figures[CLIENTS.title].append(len(times))
        figures[MEMORY.title].append((system.service.memory_bytes() - before) / len(times) / 1e3)
        timed = times[:TIMED_CONNECTIONS]
        figures[CONNECTING.title].append(timed[-1] / 1e9 * TIMED_CONNECTIONS / len(timed))
        system.print_refusals(messenger.name)


MANY_CONNECTIONS = 50_000

# Latency

RECEIVED = latency("due -> received, p50 / p99 ms")
ACKNOWLEDGED = latency("due -> acknowledged, p50 / p99 ms")
DELIVERED = Line("  received meanwhile, messages/s", lambda values: rate(values[-1]))


def measure_latency(messenger: Messenger, folder: Path, sizes: Sizes, figures: Figures) -> None:
    with loaded(messenger, folder) as system:
        if system is None:
            return
        system.connect(sizes.users)
        results: list[Exchanged] = system.call("exchange", system.share(sizes.per_second), sizes.seconds)
        for result in results:
            figures[RECEIVED.title] += result.received
            figures[ACKNOWLEDGED.title] += result.acknowledged
            print_refusals(messenger.name, result.refusals)
        figures[DELIVERED.title].append(sum(result.per_second for result in results))


# Throughput

MOST = fastest("most messages received, messages/s")
FAN_OUT = fastest("most deliveries to several clients of each recipient, deliveries/s")


def raise_window(system: Loaded, name: str, sizes: Sizes, *arguments: object) -> float:
    """Raise the window until the rate has not grown twice; the best rate."""
    best, has_grown = 0.0, True
    for window in WINDOWS:
        rates: list[float] = system.call("saturate", window, sizes.seconds / 2, *arguments)
        reached = sum(rates)
        print(f"  {name}, {window} of each sender in flight: {rate(reached)}/s", flush=True)
        had_grown, has_grown, best = has_grown, reached > WORTH * best, max(best, reached)
        if not had_grown and not has_grown:
            break
    return best


def measure_throughput(messenger: Messenger, folder: Path, sizes: Sizes, figures: Figures) -> None:
    with loaded(messenger, folder) as system:
        if system is None:
            return
        system.connect(sizes.users)
        figures[MOST.title].append(raise_window(system, messenger.name, sizes))
        system.print_refusals(messenger.name)


def measure_fan_out(messenger: Messenger, folder: Path, sizes: Sizes, figures: Figures) -> None:
    recipients = max(PROCESSES, sizes.users // sizes.devices)
    with loaded(messenger, folder) as system:
        if system is None:
            return
        system.connect(recipients, sizes.devices, "r")
        system.connect(sizes.users // 4, 1, "s")
        figures[FAN_OUT.title].append(raise_window(system, messenger.name, sizes, sizes.devices, "r"))
        system.print_refusals(messenger.name)


# Kills

SENT = total("sent while a server was killed twice")
LOST = total("  acknowledged and lost")
UNACKNOWLEDGED = total("  not acknowledged in the end")
DOUBLED = total("  received twice")
REORDERED = total("  received out of order")
DISCONNECTED = total("  clients that lost their connection")
MISSING = total("  clients that did not get one again")
AWAY = seconds("  without a connection, p50 / p99 s")


def measure_kills(messenger: Messenger, folder: Path, sizes: Sizes, figures: Figures) -> None:
    with loaded(messenger, folder, servers=2) as system:
        if system is None:
            return
        system.connect(sizes.users // 4)
        seconds_ = 2 * sizes.seconds
        system.start("exchange_and_audit", system.share(sizes.per_second / 4), seconds_)
        start = time.monotonic()
        for part in KILLS_AT:
            time.sleep(max(0, start + part * seconds_ - time.monotonic()))
            system.service.servers[0].kill()
            time.sleep(RESTART_SECONDS)
            system.service.servers[0].start()
        audits: list[Audit] = system.results()
    audit = reduce(add, audits)
    counts = {SENT: audit.sent, LOST: audit.lost, UNACKNOWLEDGED: audit.unacknowledged, DOUBLED: audit.doubled}
    counts |= {REORDERED: audit.reordered, DISCONNECTED: audit.disconnected, MISSING: audit.missing}
    for line, count in counts.items():
        figures[line.title].append(count)
    figures[AWAY.title] += audit.away
    print_refusals(messenger.name, audit.refusals)


# Moves

MOVED = total("clients whose server was stopped")
BACK = seconds("  without a connection, p50 / p99 s, after a stop")
ALL_BACK = least("  stop -> the last is back, s", 2)
NOT_BACK = total("  clients that are not back")


def measure_moves(messenger: Messenger, folder: Path, sizes: Sizes, figures: Figures) -> None:
    with loaded(messenger, folder, servers=2) as system:
        if system is None:
            return
        system.connect(2 * sizes.moved)
        system.start("collect_moves", MOVE_SECONDS)
        stopped_at = time.monotonic_ns()
        system.service.servers[0].terminate()
        results: list[Moved] = system.results()
        for result in results:
            figures[MOVED.title].append(len(result.away))
            figures[BACK.title] += result.away
            figures[NOT_BACK.title].append(result.missing)
            print_refusals(messenger.name, result.refusals)
        last = max(result.last_back_at for result in results)
        figures[ALL_BACK.title].append((last - stopped_at) / 1e9)


# Mirror

COPIED = latency("due -> copy at another client of the sender, p50 / p99 ms")
APPENDED = least("bytes of inbox records per message", 0)
WRITTEN = least("bytes written to disk per message", 0)


def measure_mirror(messenger: Messenger, folder: Path, sizes: Sizes, figures: Figures) -> None:
    with loaded(messenger, folder) as system:
        if system is None:
            return
        system.connect(sizes.users // 2, 2)
        before = system.service.written_bytes()
        per_second = sizes.per_second / 4
        results: list[Exchanged] = system.call("exchange", system.share(per_second), sizes.seconds)
        sent = per_second * sizes.seconds
        figures[WRITTEN.title].append((system.service.written_bytes() - before) / sent)
        for result in results:
            figures[COPIED.title] += result.copied
            print_refusals(messenger.name, result.refusals)
    if messenger in OURS:
        figures[APPENDED.title].append(asyncio.run(inbox_bytes(folder)) / sent)


async def inbox_bytes(folder: Path) -> int:
    """The values, keys and ids of all records in the log."""
    size = 0
    async with open_log(f"sqlite:///{folder}/log") as log:
        topic = await log.topic(TOPIC)
        for index in range(topic.partitions):
            partition = Partition(TOPIC, index)
            offset, end = 0, (await log.span(partition)).end
            while offset < end:
                batch = await log.read(partition, offset)
                size += sum(len(r.value) + len(r.key or "") + len(r.id) for r in batch.records())
                offset = batch.end
    return size


ROWS = (
    Row("connections", (CLIENTS, MEMORY, CONNECTING), measure_connections),
    Row("latency", (RECEIVED, ACKNOWLEDGED, DELIVERED), measure_latency),
    Row("throughput", (MOST,), measure_throughput),
    Row("fan-out", (FAN_OUT,), measure_fan_out),
    Row(
        "kills",
        (SENT, LOST, UNACKNOWLEDGED, DOUBLED, REORDERED, DISCONNECTED, MISSING, AWAY),
        measure_kills,
    ),
    Row("moves", (MOVED, BACK, ALL_BACK, NOT_BACK), measure_moves, OURS),
    Row("mirror", (COPIED, APPENDED, WRITTEN), measure_mirror),
    Row("connections-50k", (CLIENTS, MEMORY, CONNECTING), measure_many_connections, OURS, is_default=False),
)


def load_average() -> str:
    return f"load average {os.getloadavg()[0]:.1f}"
