"""The routing table of fan-out at ADR-009's extreme scale: memory, loading, lookups and changes of presence.

Run it with `python -m bench.fanout_table`. It writes a snapshot with 2 M users, who are all online, and 1 562 500
memberships in each of the 256 fan-out partitions: 1 % large channels, 10 % medium and 89 % small ones, 80 members on
average. A fresh process without numba then loads 16 of the partitions, and another one all of them; two more have
numba, as `shardyard fanout-worker` has where it is installed. The files are in the page cache. Memory is what the
process has gained: after loading, and after every page that lookups and changes may need was touched. The plain
dictionaries are measured at a fraction of the users and channels; their memory and load time are extrapolated by the
number of memberships.

Lookups are batches of 1000 channels with less than 1000 members, or more; a change of presence is one record that
brings a user online, in 12.5 channels of a share and in 200 of the whole table. In batches, about 200 users of an inbox
partition change at once. A join is one of 1000, applied together.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.fanout_data import CHANNELS, MEMBERSHIPS, SHARE, USERS, write_snapshot
from bench.figures import filesystem, pin_to_cores, rate, table

from shardyard.wire.channels import FANOUT_PARTITIONS

HEAD = ("", "loaded", "all pages", "load / CPU", "route/s", "large/s", "presence p50 / p99", "in batches", "join")
START = """
from shardyard.cli.serving import without_packages
with without_packages({packages}):
    from bench.fanout_process import main
    main()
"""


def in_fresh_process(*arguments: str, numba: bool = False) -> dict[str, float]:
    """What `bench.fanout_process` measures, without packages that take memory of their own."""
    packages = "'pandas'" if numba else "'numba', 'pandas'"
    command = [sys.executable, "-c", START.format(packages=packages), *arguments]
    found: dict[str, float] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return found


def row(name: str, figures: dict[str, float], mark: str = "") -> list[str]:
    def micro(key: str) -> str:
        return f"{figures[key] * 1e6:.1f}" if key in figures else "-"

    return [
        name,
        f"{figures['loaded'] / 1e6:,.0f} MB{mark}",
        f"{figures['touched'] / 1e6:,.0f} MB{mark}",
        f"{figures['load']:.1f} / {figures['load CPU']:.1f} s{mark}",
        rate(figures["route any"]),
        rate(figures["route large"]) if "route large" in figures else "-",
        f"{micro('presence p50')} / {micro('presence p99')} us",
        f"{micro('presence batch')} us",
        f"{micro('join')} us",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--whole", type=int, default=FANOUT_PARTITIONS, help="fan-out partitions of the large table")
    whole: int = parser.parse_args().whole
    print(f"{pin_to_cores()}; {USERS:,} users online, {CHANNELS:,} channels, {MEMBERSHIPS:,} memberships")
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        write_snapshot(Path(folder), whole, USERS)
        size = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
        seconds = time.perf_counter() - start
        print(f"snapshot: {size / 1e6:,.0f} MB, written in {seconds:.0f} s; {filesystem(Path(folder))}\n", flush=True)
        rows = [
            row(
                f"table, {partitions} partitions{', with numba' if numba else ''}",
                in_fresh_process("table", folder, str(partitions), numba=numba),
            )
            for partitions in dict.fromkeys((SHARE, whole))
            for numba in (False, True)
        ]
    for partitions in (SHARE, FANOUT_PARTITIONS):
        figures = in_fresh_process("dictionaries", str(partitions))
        rows.append(row(f"dictionaries, {partitions} partitions", figures, " *"))
    table(HEAD, rows)
    print("\n* extrapolated from 1/256 of the users and channels")
    print(
        "targets: 16 partitions within 250 MB and 3 s, all within 3000 MB; 200 k/s; a change of presence under 100 us"
    )


if __name__ == "__main__":
    main()
