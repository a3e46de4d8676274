"""One measurement of `bench.fanout_table`, in a process of its own: `measure` or `measure_dictionaries`."""

import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
from bench.fanout_data import CHANNELS, INBOXES, MEMBERSHIPS, USERS, memberships
from bench.fanout_dictionary import Dictionaries
from bench.figures import percentile

from shardyard.fanout.routing import RoutingTable, Snapshot, compile_loops
from shardyard.model import Position
from shardyard.placement import Modulus
from shardyard.wire.channels import FANOUT_PARTITIONS

BATCH = 1000
ROUNDS = 3
DICTIONARY_FRACTION = 256
"""The dictionaries hold one of as many users and channels."""


def resident() -> int:
    """The bytes of this process in memory, including pages of mapped files."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no VmRSS in /proc/self/status")


def best(work: Callable[[], object]) -> float:
    """Seconds of the fastest of some rounds."""
    seconds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def measure(folder: Path, partitions: int) -> dict[str, float]:
    """The figures of a table with the first partitions of a snapshot. Called in a process of its own."""
    compile_loops()
    before, start, cpu = resident(), time.perf_counter(), time.process_time()
    snapshot = Snapshot.open(folder)
    table = RoutingTable(INBOXES, snapshot)
    for p in range(partitions):
        table.add(p, snapshot.partition(p))
    figures = {"load": time.perf_counter() - start, "load CPU": time.process_time() - cpu}
    figures["loaded"] = float(resident() - before)
    sizes = np.array([table.online(0, b"ch_%d" % i) for i in range(CHANNELS // FANOUT_PARTITIONS)])
    rng = np.random.default_rng(1)
    for kind, chosen in (("any", np.flatnonzero(sizes < 1000)), ("large", np.flatnonzero(sizes >= 1000))):
        batches = [pa.array([b"ch_%d" % i for i in rng.choice(chosen, BATCH)], pa.binary()) for _ in range(50)]
        seconds = best(lambda batches=batches: [table.route(0, batch) for batch in batches])  # type: ignore[misc]
        figures[f"route {kind}"] = 50 * BATCH / seconds
    figures.update(_presence(table))
    joins = pa.array([b"ch_%d" % i for i in rng.integers(0, CHANNELS // FANOUT_PARTITIONS, BATCH)], pa.binary())
    members = pa.array([b"+user-%d" % i for i in rng.integers(0, USERS, BATCH)], pa.binary())
    start = time.perf_counter()
    table.apply_members(0, joins, members, Position(1, BATCH))
    table.online(0, b"ch_0")
    figures["join"] = (time.perf_counter() - start) / BATCH
    _touch(snapshot, table, partitions)
    figures["touched"] = float(resident() - before)
    figures["memberships"] = table.size().memberships
    figures["counted"] = table.size().bytes
    return figures


def _presence(table: RoutingTable) -> dict[str, float]:
    """Users who go offline and online again, one at a time and many at once."""
    offset, inbox = 0, Modulus("fnv1a32", INBOXES)
    rng, seconds = random.Random(2), []
    for _ in range(2000):
        user = b"user-%d" % rng.randrange(USERS)
        q, key = inbox.place(user), pa.array([user], pa.binary())
        for values in ([b"-phone", b"-laptop"], [b"+phone"]):
            for value in values:
                offset += 1
                column = pa.array([value], pa.binary())
                start = time.perf_counter()
                table.apply_presence(q, key, column, Position(1, offset))
                last = time.perf_counter() - start
            if values[0] == b"+phone":
                seconds.append(last)
    many = pa.array([b"user-%d" % i for i in rng.sample(range(USERS), 50_000)], pa.binary())
    places = inbox.place_array(many).to_numpy()
    spent = 0.0
    for q in range(INBOXES):
        users = many.filter(pa.array(places == q))
        for value in (b"-phone", b"-laptop", b"+phone"):
            offset += 1
            column = pa.array([value] * len(users), pa.binary())
            start = time.perf_counter()
            table.apply_presence(q, users, column, Position(1, offset))
            spent += time.perf_counter() - start
    return {
        "presence p50": percentile(seconds, 50),
        "presence p99": percentile(seconds, 99),
        "presence batch": spent / 2 / len(many),
    }


def _touch(snapshot: Snapshot, table: RoutingTable, partitions: int) -> None:
    """Read every page that lookups and changes may need."""
    users = snapshot.users
    for index in [users.names] + [table._partitions[p]._channels.base for p in range(partitions)]:
        index.hashes.sum()
        for buffer in index.names.buffers()[1:]:
            np.frombuffer(buffer, np.uint8).sum()
    for p in range(partitions):
        base = table._partitions[p]._base
        for values in (base.starts, base.low, base.channels):
            values.sum()


def measure_dictionaries(partitions: int) -> dict[str, float]:
    """The same with plain dictionaries, at a fraction. Called in a process of its own."""
    users, channels = USERS // DICTIONARY_FRACTION, CHANNELS // DICTIONARY_FRACTION * partitions // FANOUT_PARTITIONS
    total = MEMBERSHIPS // DICTIONARY_FRACTION * partitions // FANOUT_PARTITIONS
    of_channel, numbers = memberships(1, channels, users, total)
    pairs = list(zip(of_channel.tolist(), numbers.tolist(), strict=True))
    del of_channel, numbers
    before, start, cpu = resident(), time.perf_counter(), time.process_time()
    dictionaries = Dictionaries(INBOXES, users)
    for channel, user in pairs:
        dictionaries.join(b"ch_%d" % channel, b"user-%d" % user)
    load, cpu = time.perf_counter() - start, time.process_time() - cpu
    loaded = resident() - before
    rng = random.Random(3)
    batch = [b"ch_%d" % rng.randrange(channels) for _ in range(BATCH)]
    seconds = best(lambda: [dictionaries.route(channel) for channel in batch])
    changes = []
    for _ in range(2000):
        user = b"user-%d" % rng.randrange(users)
        dictionaries.disconnect(user, b"phone")
        start = time.perf_counter()
        dictionaries.connect(user, b"phone")
        changes.append(time.perf_counter() - start)
    factor = MEMBERSHIPS * partitions / FANOUT_PARTITIONS / total
    return {
        "load": load * factor,
        "load CPU": cpu * factor,
        "loaded": loaded * factor,
        "touched": loaded * factor,
        "route any": BATCH / seconds,
        "presence p50": percentile(changes, 50),
        "presence p99": percentile(changes, 99),
        "join": load / len(pairs),
    }


def main() -> None:
    """`table FOLDER PARTITIONS` or `dictionaries PARTITIONS`; prints the figures as JSON."""
    what, *arguments, partitions = sys.argv[1:]
    table = what == "table"
    print(json.dumps(measure(Path(arguments[0]), int(partitions)) if table else measure_dictionaries(int(partitions))))
