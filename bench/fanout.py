"""Channel fan-out: coordinator, worker, latency, a 17th worker, and the same with a dictionary and Redis pub/sub.

python -m bench.fanout [--channels 20000] [--events 400000]
"""

import argparse
import asyncio
import contextlib
import logging
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import uvloop
from bench.figures import filesystem, milliseconds, pin_to_cores, rate, sync_seconds, table
from bench.servers import find_redis, redis_server

from shardyard.cli.serving import reduce_stalls
from shardyard.fanout.catch_up import CatchUp
from shardyard.fanout.config import DEFAULT_CONFIG, WORKERS_GROUP
from shardyard.fanout.coordinator import Coordinator
from shardyard.fanout.forwarding import record_batch
from shardyard.fanout.routing import RoutingTable, compile_loops
from shardyard.fanout.topics import open_all
from shardyard.fanout.worker import Worker
from shardyard.groups import Node
from shardyard.log import Log, open_log
from shardyard.log.requests import AppendRequest
from shardyard.model import Appended, Partition, Position, ShardyardError
from shardyard.model.batch import to_records
from shardyard.model.limits import Validated
from shardyard.placement import Jump, Modulus
from shardyard.registry import open_registry
from shardyard.wire.channels import EVENTS, FANOUT, FANOUT_PARTITIONS, MEMBERS, PRESENCE
from shardyard.wire.inbox import TOPIC as INBOX

T = TypeVar("T")

MEMBERS_PER_CHANNEL = 10
CHANNELS_PER_USER = 40
VALUE_BYTES = 100
SHARE = 16
"""Partitions of a worker, of 256."""
TICK_SECONDS = 0.01
RATE_17TH = 100
"""Events per second while a 17th worker joins. The other 16 share one process, which more would keep busy."""
ROUNDS_17TH = 4
"""How often it joins: the events of one time are too few for a p99."""
NEW_WORKER = "worker-17"
LATENCY_SECONDS = 15.0


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run it as the servers of Shardyard run: on uvloop, without stalls of the garbage collector and of huge pages."""
    reduce_stalls()
    return uvloop.run(work)


def channel_names(count: int) -> pa.Array:
    return pa.array([b"channel-%d" % i for i in range(count)], pa.binary())


class World:
    """Channels, users, and who is a member."""

    def __init__(self, channels: int) -> None:
        random = np.random.default_rng(1)
        self.channels = channel_names(channels)
        users = channels * MEMBERS_PER_CHANNEL // CHANNELS_PER_USER
        self.users = pa.array([b"user-%d" % i for i in range(users)], pa.binary())
        self.member_channels = random.integers(0, channels, channels * MEMBERS_PER_CHANNEL)
        self.member_users = random.integers(0, users, channels * MEMBERS_PER_CHANNEL)
        self.places = np.asarray(Jump("xxh64", FANOUT_PARTITIONS).place_array(self.channels))
        self.inboxes = np.asarray(Modulus("fnv1a32", 16).place_array(self.users))

    def members(self) -> pa.RecordBatch:
        names = [b"+" + name for name in self.users.to_pylist()]
        values = pa.array(names, pa.binary()).take(pa.array(self.member_users))
        return plain(self.channels.take(pa.array(self.member_channels)), values)

    def events(self, rows: npt.NDArray[np.int64], first: int = 0) -> pa.RecordBatch:
        """Events of these channels; the value begins with a number."""
        padding = b"." * (VALUE_BYTES - 8)
        values = [int(n).to_bytes(8, "big") + padding for n in range(first, first + len(rows))]
        return plain(self.channels.take(pa.array(rows)), pa.array(values, pa.binary()))


def plain(keys: pa.Array, values: pa.Array) -> pa.RecordBatch:
    return record_batch(pa.array(["x"] * len(keys)), keys, values)


async def append_split(log: Log, topic: str, records: pa.RecordBatch, places: npt.NDArray[np.int32]) -> None:
    """Append records to the partitions of a topic."""
    order = np.argsort(places, kind="stable")
    records = records.take(pa.array(order))
    bounds = np.searchsorted(places[order], np.arange(int(places.max()) + 2))
    for index, (start, stop) in enumerate(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)):
        for at in range(start, stop, 20_000):
            await log.append(Partition(topic, index), records.slice(at, min(20_000, stop - at)))


@contextlib.asynccontextmanager
async def opened(folder: str) -> AsyncIterator[tuple[Log, Node]]:
    log = open_log(f"sqlite:///{folder}/log")
    registry = open_registry(f"sqlite:///{folder}/registry.db")
    async with log, Node(log, registry) as node:
        await open_all(log)
        yield log, node
    registry.close()


async def populate(log: Log, world: World) -> None:
    members = world.members()
    await append_split(log, MEMBERS, members, world.places[world.member_channels])
    online = plain(world.users, pa.array([b"+phone"] * len(world.users), pa.binary()))
    await append_split(log, PRESENCE, online, world.inboxes)


async def total(log: Log, topic: str) -> int:
    return sum(span.end for span in (await log.ends(topic)).values())


async def until(condition: Callable[[], bool], seconds: float) -> None:
    """Look every so often until the condition holds."""
    while True:
        if condition():
            return
        await asyncio.sleep(seconds)


async def until_total(log: Log, topic: str, count: int) -> None:
    while True:
        if await total(log, topic) >= count:
            return
        await asyncio.sleep(0.005)


class Stopwatch:
    """Measures time, and processor time of this process: on a machine that does other work, too, only the latter says
    how fast it is."""

    def __init__(self) -> None:
        self._started = time.perf_counter(), time.process_time()

    def rates(self, count: int) -> str:
        """Per second, and per second of processor time."""
        wall, busy = time.perf_counter() - self._started[0], time.process_time() - self._started[1]
        return f"{rate(count / wall)} ({rate(count / busy)})"


async def coordinate(log: Log, node: Node, world: World, events: int) -> str:
    """Events per second of one coordinator."""
    rows = np.random.default_rng(2).integers(0, len(world.channels), events)
    records = world.events(rows)
    await append_split(log, EVENTS, records, (rows % 16).astype(np.int32))
    async with Coordinator(node):
        await until_total(log, FANOUT, 1)
        first, started = await total(log, FANOUT), Stopwatch()
        await until_total(log, FANOUT, events)
        return started.rates(events - first)


class WaitingWorker(Worker):
    """A worker that routes nothing before it is let go."""

    go: asyncio.Event

    async def _may_step(self) -> None:
        await self.go.wait()

    @property
    def is_loaded(self) -> bool:
        return len(self.owned) == FANOUT_PARTITIONS and not self.preparing


async def route(log: Log, node: Node, events: int) -> tuple[str, str]:
    """Events and posts per second of one worker over what the coordinator has forwarded, once its table is loaded."""
    worker = WaitingWorker(node)
    worker.go = asyncio.Event()
    async with worker:
        await until(lambda: bool(worker.is_loaded), 0.05)
        started = Stopwatch()
        worker.go.set()
        await until(lambda: not (sum(at.offset for at in worker.done.values()) < events), 0.005)
        return started.rates(events), started.rates(await total(log, INBOX))


def lookups(world: World) -> tuple[float, int]:
    """Lookups per second of the table alone, and its bytes."""
    routing = RoutingTable(16)
    members = world.members()
    online = pa.array([b"+phone"] * len(world.users), pa.binary())
    for q in range(16):
        mine = pa.array(np.flatnonzero(world.inboxes == q))
        routing.apply_presence(q, world.users.take(mine), online.take(mine), Position(1, 1))
    places = world.places[world.member_channels]
    for p in range(SHARE):
        mine = pa.array(np.flatnonzero(places == p))
        routing.add(p)
        routing.apply_members(p, members["key"].take(mine), members["value"].take(mine), Position(1, 1))
    rows = np.flatnonzero(world.places < SHARE)
    batches = [(p, world.channels.take(pa.array(rows[world.places[rows] == p]))) for p in range(SHARE)]
    started, looked_up = time.perf_counter(), 0
    while time.perf_counter() - started < 1.0:
        for p, batch in batches:
            routing.route(p, batch)
            looked_up += len(batch)
    return looked_up / (time.perf_counter() - started), routing.size().bytes


# Latency


class Times:
    """When events became durable, by number: in `fanout`, and in `inbox`. In files, for several processes."""

    def __init__(self, folder: str, count: int) -> None:
        self.sent, self.stored = (
            np.memmap(Path(folder) / name, np.float64, "r+" if (Path(folder) / name).exists() else "w+", shape=(count,))
            for name in ("sent", "stored")
        )


class MeasuringLog:
    """A log that notes when posts are durable in `inbox`. Which posts these are is found out by `note`, when nothing is
    measured any more: it takes a tenth of the worker's time. With `at_once` it is found out when they are stored."""

    def __init__(self, log: Log, times: Times, *, at_once: bool = False) -> None:
        self._log = log
        self._times = times
        self._at_once = at_once
        self._stored: list[tuple[float, Sequence[AppendRequest]]] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self._log, name)

    async def append_many(self, requests: Sequence[AppendRequest]) -> list[Appended | ShardyardError]:
        outcomes = await self._log.append_many(requests)
        self._stored.append((time.time(), requests))
        if self._at_once:
            self.note()
        return outcomes

    def note(self) -> None:
        """Note the times in the files."""
        for at, requests in self._stored:
            for request in requests:
                if request.partition.topic == INBOX and isinstance(request.records, Validated):
                    self._times.stored[numbers(request.records)] = at
        self._stored.clear()


def numbers(records: Validated) -> npt.NDArray[np.int64]:
    """The numbers of events, with which their values begin."""
    rows = records.rows
    values = rows["value"].to_pylist() if isinstance(rows, pa.RecordBatch) else [row.value for row in rows]
    return np.frombuffer(b"".join([value[:8] for value in values]), ">i8").astype(np.int64)


def feed(folder: str, channels: int, share: int, per_second: int, count: int) -> None:
    """A process that appends events to the first partitions of `fanout` at a steady rate, as coordinators do."""

    async def feed_all() -> None:
        world, times = World(channels), Times(folder, count)
        rows = np.random.default_rng(3).choice(np.flatnonzero(world.places < share), count)
        rows_of, places = to_records(world.events(rows)), world.places[rows]
        async with open_log(f"sqlite:///{folder}/log") as log:

            async def send(parts: list[tuple[int, npt.NDArray[np.int64]]]) -> None:
                await log.append_many(
                    [AppendRequest(Partition(FANOUT, index), [rows_of[i] for i in which]) for index, which in parts]
                )
                for _, which in parts:
                    times.sent[which] = time.time()

            started, sent = time.perf_counter(), 0
            pending: set[asyncio.Task[None]] = set()
            while sent < count:
                due = min(int((time.perf_counter() - started) * per_second), count)
                if due > sent:
                    chosen = places[sent:due]
                    parts = [(int(p), sent + np.flatnonzero(chosen == p)) for p in np.unique(chosen)]
                    task = asyncio.create_task(send(parts))
                    pending.add(task)
                    task.add_done_callback(pending.discard)
                    sent = due
                await asyncio.sleep(TICK_SECONDS)
            while pending:
                await asyncio.wait(pending)

    run(feed_all())


async def feed_until_stored(
    folder: str, channels: int, share: int, per_second: int, count: int, times: Times, log: MeasuringLog
) -> None:
    arguments = [str(value) for value in (folder, channels, share, per_second, count)]
    process = subprocess.Popen([sys.executable, "-m", "bench.fanout", "feed", *arguments])  # noqa: ASYNC220 it is short
    await until(lambda: process.poll() is not None, 0.05)
    deadline = time.monotonic() + 10

    def are_stored() -> bool:
        log.note()
        return bool((times.stored == 0).mean() <= 0.01) or time.monotonic() > deadline

    await until(are_stored, 0.05)


def latencies(times: Times, wanted: npt.NDArray[np.bool_] | None = None) -> Sequence[float]:
    both = (times.sent > 0) & (times.stored > 0)
    if wanted is not None:
        both &= wanted
    found: list[float] = np.maximum(times.stored - times.sent, 0.0)[both].tolist()
    return found


async def measure_latency(channels: int, per_second: int, seconds: float) -> Sequence[float]:
    with tempfile.TemporaryDirectory() as folder:
        async with opened(folder) as (log, node):
            world = World(channels)
            await populate(log, world)
            names = [name.decode() for name in world.channels.slice(0, 3000).to_pylist()]
            count = int(per_second * seconds)
            times = Times(folder, count)
            measuring = node.log = MeasuringLog(log, times)  # type: ignore[assignment]
            async with Worker(node) as worker:
                await until(lambda: not (sum(worker.lookup(name) is not None for name in names) < len(names)), 0.05)
                started = time.process_time()
                await feed_until_stored(folder, channels, SHARE, per_second, count, times, measuring)
                print(f"processor time of the worker: {(time.process_time() - started) / seconds:.0%} of a core")
            skip = np.arange(count) >= per_second  # the first second warms up
            return latencies(times, skip)


async def measure_17th(
    channels: int, per_second: int, seconds: float, *, joins: bool
) -> tuple[int, dict[str, Sequence[float]]]:
    """How many partitions move to a 17th worker, and the latencies of their events and of the others: before it joins,
    and from then until one second after it owns its partitions. Its process was started before all of that. Unless it
    `joins`, it only loads the table of as many partitions, which takes processor time from the other workers alike."""
    with tempfile.TemporaryDirectory() as folder:
        async with opened(folder) as (log, node), contextlib.AsyncExitStack() as stack:
            world = World(channels)
            await populate(log, world)
            count = int(per_second * seconds)
            times = Times(folder, count)
            measuring = node.log = MeasuringLog(log, times, at_once=True)  # type: ignore[assignment]
            workers = [await stack.enter_async_context(Worker(node, name=f"worker-{i:02}")) for i in range(16)]
            await until(lambda: not (any(len(worker.owned) != SHARE for worker in workers)), 0.05)
            names = [name.decode() for name in world.channels.slice(0, 3000).to_pylist()]
            await until(lambda: all(any(w.lookup(name) is not None for w in workers) for name in names), 0.2)
            command = [sys.executable, "-m", "bench.fanout", "worker" if joins else "loader", folder, str(count)]
            process = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            stack.push_async_callback(process.wait)
            stack.callback(process.terminate)
            assert process.stdin is not None and process.stdout is not None  # noqa: PT018 they are pipes
            await process.stdout.readline()  # it is ready to join
            feeding = asyncio.create_task(
                feed_until_stored(folder, channels, FANOUT_PARTITIONS, per_second, count, times, measuring)
            )
            await until(lambda: bool(times.sent.any()), 0.05)
            await asyncio.sleep(seconds / 3)
            joined_at = time.time()
            process.stdin.write(b"join\n")
            if not joins:
                await process.stdout.readline()  # it has loaded the table
            while len(moved := await owned_by(node, NEW_WORKER)) < FANOUT_PARTITIONS // 17 and joins:
                if process.returncode is not None:
                    raise RuntimeError(f"the 17th worker has ended with {process.returncode}")
                await asyncio.sleep(0.01)
            moved_at = time.time()
            await feeding
            rows = np.random.default_rng(3).choice(np.flatnonzero(world.places < FANOUT_PARTITIONS), count)
            is_moved = np.isin(world.places[rows], moved)
            print(f"17th worker, {joins=}: ready {moved_at - joined_at:.1f} s after it began")
            before = (times.sent < joined_at) & (np.arange(count) >= per_second)  # the first second warms up
            meanwhile = (times.sent > joined_at) & (times.sent < moved_at + 1.0)
            return len(moved), {
                "their events before it joins": latencies(times, before & is_moved),
                "their events meanwhile": latencies(times, meanwhile & is_moved),
                "events of the others before it joins": latencies(times, before & ~is_moved),
                "events of the others meanwhile": latencies(times, meanwhile & ~is_moved),
            }


def rows_of_17th(channels: int) -> list[tuple[str, str]]:
    """In turn, a worker joins, and a process only loads a table."""
    rows = []
    both: dict[bool, list[tuple[int, dict[str, Sequence[float]]]]] = {True: [], False: []}
    for _ in range(ROUNDS_17TH):
        for joins, rounds in both.items():
            rounds.append(run(measure_17th(channels, RATE_17TH, 12.0, joins=joins)))
    for joins, rounds in both.items():
        what = "17th worker" if joins else "a process that loads the same table and does not join"
        rows.append((f"{what}: partitions that move", ", ".join(str(moved) for moved, _ in rounds)))
        found = {name: [one for _, delays in rounds for one in delays[name]] for name in rounds[0][1]}
        rows += [
            (f"   {name} ({len(seconds)}), p50 / p99 / max ms", milliseconds(seconds, 50, 99, 100))
            for name, seconds in found.items()
            if seconds
        ]
    return rows


async def owned_by(node: Node, member: str) -> list[int]:
    """The partitions of `fanout` that a worker owns."""
    rows = await node.transactions.read(lambda tx: tx.ownerships(WORKERS_GROUP))
    return [row.partition.index for row in rows if row.owner == member]


def join_as_worker(folder: str, count: int) -> None:
    """A process with the 17th worker, which joins when it reads a line, until it is terminated."""

    async def work() -> None:
        async with opened(folder) as (log, node):
            node.log = MeasuringLog(log, Times(folder, count), at_once=True)  # type: ignore[assignment]
            await asyncio.to_thread(compile_loops)
            print("ready", flush=True)
            await asyncio.to_thread(sys.stdin.readline)
            await Worker(node, name=NEW_WORKER).run()

    run(work())


def load_as_worker(folder: str) -> None:
    """A process that loads what the 17th worker would load when it reads a line, and joins nothing."""

    async def work() -> None:
        async with opened(folder) as (log, _):
            await asyncio.to_thread(compile_loops)
            print("ready", flush=True)
            await asyncio.to_thread(sys.stdin.readline)
            catch_up = CatchUp(log, lambda inbox: RoutingTable(inbox.receiving), DEFAULT_CONFIG)
            await catch_up.open()
            await asyncio.gather(*(catch_up.load(p, _no_snapshot) for p in range(FANOUT_PARTITIONS // 17)))
            print("loaded", flush=True)
            await asyncio.to_thread(sys.stdin.readline)

    run(work())


async def _no_snapshot(_: int) -> None:
    return None


# The same with a dictionary and Redis


def dictionary_and_redis(world: World, events: int) -> tuple[float, float, int] | None:
    """Events per second, publishes per second, and the resident bytes of a dictionary of sets."""
    server = find_redis()
    if server is None:
        return None
    import redis  # noqa: PLC0415 it is optional

    before = resident()
    routes: defaultdict[bytes, set[int]] = defaultdict(set)
    members: defaultdict[bytes, set[bytes]] = defaultdict(set)
    names, users = world.channels.to_pylist(), world.users.to_pylist()
    share = world.places < SHARE
    for channel, user in zip(world.member_channels.tolist(), world.member_users.tolist(), strict=True):
        if share[channel]:
            routes[names[channel]].add(int(world.inboxes[user]))
            members[names[channel]].add(users[user])
    size = resident() - before
    rows = np.random.default_rng(2).choice(np.flatnonzero(share), events)
    batch = world.events(rows)
    with tempfile.TemporaryDirectory() as folder, redis_server(server, Path(folder), "no") as port:
        client: Any = redis.Redis(port=port)
        subscriber = client.pubsub()
        subscriber.subscribe(*(f"server-{q}" for q in range(16)))
        done = threading.Event()

        def drain() -> None:
            while not done.is_set():
                subscriber.get_message(timeout=0.1)

        draining = threading.Thread(target=drain)
        draining.start()
        started, published = time.perf_counter(), 0
        pipeline = client.pipeline(transaction=False)
        for channel, value in zip(batch["key"].to_pylist(), batch["value"].to_pylist(), strict=True):
            for q in routes[channel]:
                pipeline.publish(f"server-{q}", channel + b"\0" + value)
            if len(pipeline) > 1000:
                published += len(pipeline)
                pipeline.execute()
        published += len(pipeline)
        pipeline.execute()
        seconds = time.perf_counter() - started
        done.set()
        draining.join()
        client.close()
    return events / seconds, published / seconds, size


def resident() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    logging.basicConfig(level=logging.ERROR)
    if sys.argv[1:2] == ["feed"]:
        feed(sys.argv[2], *map(int, sys.argv[3:]))
        return
    if sys.argv[1:2] == ["worker"]:
        join_as_worker(sys.argv[2], int(sys.argv[3]))
        return
    if sys.argv[1:2] == ["loader"]:
        load_as_worker(sys.argv[2])
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--channels", type=int, default=20_000)
    parser.add_argument("--events", type=int, default=400_000)
    parser.add_argument(
        "--rate", type=int, nargs="+", default=[10_000, 1_000], help="events per second for the latency"
    )
    parser.add_argument("--only", default="all", help="all, throughput, latency, 17th or redis")
    options = parser.parse_args()
    print(pin_to_cores())
    world = World(options.channels)
    rows = []
    if options.only in ("all", "throughput"):
        with tempfile.TemporaryDirectory() as folder:
            print(f"{filesystem(Path(folder))}, a sync takes {sync_seconds(Path(folder)) * 1e3:.2f} ms")
            coordinated, routed, posts = run(_throughput(folder, world, options.events))
        looked_up, size = lookups(world)
        rows += [
            ("coordinator, events/s (per second of processor time)", coordinated),
            ("worker with 256 partitions, events/s", routed),
            ("   posts stored in 16 inbox partitions/s", posts),
            ("routing table alone, lookups/s", rate(looked_up)),
            (f"   bytes of a share of {SHARE} partitions", rate(size) + "B"),
        ]
    if options.only in ("all", "latency"):
        for per_second in options.rate:
            found = run(measure_latency(options.channels, per_second, LATENCY_SECONDS))
            name = f"fanout to inbox at {per_second} events/s, p50 / p99 / p99.9 ms"
            rows.append((name, milliseconds(found, 50, 99, 99.9)))
    if options.only in ("all", "17th"):
        rows += rows_of_17th(options.channels)
    if options.only in ("all", "redis") and (found_redis := dictionary_and_redis(world, options.events // 10)):
        per_second, published, size = found_redis
        rows += [
            ("dictionary of sets and Redis pub/sub (stores nothing), events/s", rate(per_second)),
            ("   publishes/s", rate(published)),
            (f"   resident bytes of a share of {SHARE} partitions", rate(size) + "B"),
        ]
    table(("what", "figure"), rows)


async def _throughput(folder: str, world: World, events: int) -> tuple[str, str, str]:
    async with opened(folder) as (log, node):
        await populate(log, world)
        coordinated = await coordinate(log, node, world, events)
        return coordinated, *(await route(log, node, events))


if __name__ == "__main__":
    main()
