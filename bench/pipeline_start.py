"""How long a pipeline command takes before it does anything, by step, with and without the archive of classes.

Run it with `make bench` or `python -m bench.pipeline_start`. Each round is a fresh process that measures a small file;
rounds with and without the archive alternate. CPU time is that of the process and of all that it starts, which depends
less on other work on the machine than the time does.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.balance import process_tree, write_keys
from bench.figures import pin_to_cores, table

STEPS = ("imports", "JVM and session", "schema of the files", "report of 10 000 records", "stop")
_TICKS = os.sysconf("SC_CLK_TCK")


def _cpu_seconds() -> float:
    """CPU time of this process, of its descendants, and of those that have ended."""
    total = 0.0
    for process in process_tree(os.getpid()):
        parts = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        total += sum(int(part) for part in parts[11:15]) / _TICKS
    return total


def child(folder: str, archive: bool) -> None:
    """Run a command's steps, and print the time and the CPU time of each as JSON."""
    marks = [(time.perf_counter(), _cpu_seconds())]

    def mark() -> None:
        marks.append((time.perf_counter(), _cpu_seconds()))

    from shardyard.pipeline.balance.report import Scheme, balance_report, loads_of_table  # noqa: PLC0415 measured
    from shardyard.pipeline.session import session  # noqa: PLC0415 likewise

    mark()
    spark = session("start", master="local[2]", java_options=None if archive else "")
    mark()
    loads = loads_of_table(spark.read.parquet(folder), key="key", bytes="size")
    mark()
    balance_report(loads, [Scheme("modulus", "fnv1a32", 12)])
    mark()
    spark.stop()
    mark()
    print(json.dumps([[b - a for a, b in zip(*pair, strict=True)] for pair in itertools.pairwise(marks)]))


def main(rounds: int) -> None:
    print(f"pipeline_start: {pin_to_cores()}; load {os.getloadavg()[0]:.1f}; medians of {rounds} rounds")
    with tempfile.TemporaryDirectory(prefix="shardyard-bench-") as temporary:
        folder = Path(temporary) / "keys"
        write_keys(folder, "zipf", 10_000)
        environment = os.environ | {"XDG_CACHE_HOME": f"{temporary}/cache"}
        command = [str(Path(sys.executable).with_name("shardyard")), "pipeline", "balance", "--parquet", str(folder)]
        start = time.perf_counter()
        subprocess.run(command, env=environment, check=True, capture_output=True)
        print(f"the first command, which makes the archive: {time.perf_counter() - start:.1f} s")
        found: dict[bool, list[list[list[float]]]] = {False: [], True: []}
        for _ in range(rounds):
            for archive, results in found.items():
                run = [sys.executable, "-m", "bench.pipeline_start", "--child", str(folder), "--archive", str(archive)]
                done = subprocess.run(run, env=environment, check=True, capture_output=True, text=True)
                results.append(json.loads(done.stdout.splitlines()[-1]))
    rows = []
    for step, name in enumerate((*STEPS, "together")):
        row = [name]
        for results in found.values():
            for unit in (0, 1):
                steps = [sum(s[unit] for s in r) if name == "together" else r[step][unit] for r in results]
                row.append(f"{statistics.median(steps):.2f}")
        rows.append(row)
    table(["step", "without archive, s", "CPU s", "with archive, s", "CPU s"], rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", metavar="FOLDER")
    parser.add_argument("--archive", choices=["True", "False"])
    options = parser.parse_args()
    if options.child:
        child(options.child, options.archive == "True")
    else:
        main(options.rounds)
