"""The job `routing`: how long Spark takes to build a snapshot of the routing table, and how much memory.

Run it with `python -m bench.fanout_snapshot`. The input is that of `bench.fanout_input`, by default a quarter of
ADR-009's extreme scale: 100 M memberships of 500 000 users in 1.25 M channels. It is read from Parquet files by the
same functions as the topics, because filling a log with 100 M records takes longer than the job.
"""

import argparse
import os
import resource
import tempfile
import threading
import time
from pathlib import Path

from bench.fanout_input import INBOX_PARTITIONS, Scale, write_input
from bench.figures import pin_to_cores, rate, table

from shardyard.fanout.routing import RoutingTable, Snapshot
from shardyard.model import Position
from shardyard.pipeline.routing.routing import write_snapshot
from shardyard.pipeline.session import session
from shardyard.wire.channels import FANOUT_PARTITIONS, MEMBERS, PRESENCE

FRACTION = 0.25
"""Of the extreme scale."""
MEMORY = "4g"
"""Of Spark's driver; its two Python workers take about 1 GB each besides."""
TARGET = "5 minutes for a quarter of the extreme scale"
SAMPLE_SECONDS = 0.5
_SHARE = 16


class Usage:
    """The most memory that this process and its descendants had at once, and their processor time: sampled in a
    thread. On a machine that is busy otherwise, the processor time says more than the clock."""

    def __init__(self) -> None:
        self.bytes = 0
        self._ticks: dict[int, int] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def processor_seconds(self) -> float:
        return sum(self._ticks.values()) / os.sysconf("SC_CLK_TCK")

    def __enter__(self) -> "Usage":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            self._sample()

    def _sample(self) -> None:
        found = {int(path.parent.name): _fields(path) for path in Path("/proc").glob("[0-9]*/stat")}
        parents = {process: int(fields[1]) for process, fields in found.items() if fields}
        mine = {os.getpid()}
        while more := {child for child, parent in parents.items() if parent in mine} - mine:
            mine |= more
        self._ticks |= {process: sum(map(int, found[process][11:13])) for process in mine if process in parents}
        self.bytes = max(self.bytes, sum(map(_proportional_bytes, mine)))


def _fields(stat: Path) -> list[str]:
    """What the kernel says about a process, after its name; nothing if it has ended."""
    try:
        return stat.read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _proportional_bytes(process: int) -> int:
    """The memory of a process. Of pages that several share, each has its part."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fraction", type=float, default=FRACTION, help="of the extreme scale (default: 0.25)")
    parser.add_argument("--input", type=Path, help="keep the generated input here, or use what is there")
    options = parser.parse_args()
    scale = Scale(options.fraction)
    print(f"{pin_to_cores()}; goal: {TARGET}")
    with tempfile.TemporaryDirectory() as scratch:
        records = options.input or Path(scratch) / "input"
        if not (records / PRESENCE).is_dir():
            write_input(records, scale)
        measure(records, scale, Path(scratch) / "snapshot")


def measure(records: Path, scale: Scale, folder: Path) -> None:
    spark = session("bench", master="local[2]", memory=MEMORY)
    ends = {MEMBERS: [Position(1, 1 << 40)] * FANOUT_PARTITIONS, PRESENCE: [Position(1, 1 << 40)] * INBOX_PARTITIONS}
    start = time.perf_counter()

    def step(text: str) -> None:
        print(f"  {time.perf_counter() - start:6.1f} s  {text}", flush=True)

    with Usage() as usage:
        members, presence = (spark.read.parquet(str(records / name)) for name in (MEMBERS, PRESENCE))
        done = write_snapshot(members, presence, ends, folder, on_step=step)
    seconds = time.perf_counter() - start
    spark.stop()
    started = time.perf_counter()
    snapshot = Snapshot.open(folder)
    share = RoutingTable(INBOX_PARTITIONS, snapshot)
    for p in range(0, FANOUT_PARTITIONS, _SHARE):
        share.add(p, snapshot.partition(p))
    loading = time.perf_counter() - started
    table(
        (
            "fraction",
            "records",
            "memberships",
            "users",
            "channels",
            "seconds",
            "processor",
            "records/s",
            "peak memory",
            "files",
        ),
        [
            (
                f"{scale.fraction:g}",
                rate(scale.memberships),
                rate(done.memberships),
                rate(done.users),
                rate(done.channels),
                f"{seconds:.0f}",
                f"{usage.processor_seconds:.0f} s",
                rate(scale.memberships / seconds),
                f"{usage.bytes / 1e9:.1f} GB",
                f"{done.bytes / 1e6:.0f} MB",
            )
        ],
    )
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(f"a 1/{_SHARE} share is loaded in {loading:.2f} s; this process had at most {resident} MB")


if __name__ == "__main__":
    main()
