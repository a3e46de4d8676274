"""Sharded queues on one node compared with RabbitMQ's sharding plugin: 2 cores, persistent messages of 256 random
bytes, publisher confirms, 4 shards. Then how fast many consumers attach, and messages are routed.

Run it with `make bench` or `python -m bench.sharding`; `bench/README.md` explains how each figure is measured.
"""

import argparse
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from bench import sharding_consumers, sharding_routing
from bench.contenders.sharded import PLUGIN, SHARDED, SHARDS
from bench.contenders.system import PREFETCH, RECORD_BYTES, SlowSchedule
from bench.figures import filesystem, pin_to_cores, sync_seconds
from bench.queue_rows import ROWS as QUEUE_ROWS
from bench.queue_rows import schedule_row
from bench.queues import ROUNDS, compare

ROWS = (*(row for row in QUEUE_ROWS if row.name != "schedule"), schedule_row(SlowSchedule))
OWN_ROWS = ("attach", "routing")


def main(rows: Sequence[str], rounds: int) -> None:
    print(
        f"sharding: {pin_to_cores()}, messages of {RECORD_BYTES} random bytes, {SHARDS} shards, prefetch {PREFETCH}, "
        f"aio-pika {version('aio-pika')}. Both survive a power cut"
    )
    with tempfile.TemporaryDirectory(prefix="shardyard-bench-") as temporary:
        root = Path(temporary)
        print(f"in {root}: {filesystem(root)}, a sync of 4 KiB takes {sync_seconds(root) * 1e3:.2f} ms", flush=True)
        if compared := [row for row in ROWS if row.name in rows]:
            compare([SHARDED, PLUGIN], compared, rounds, root)
        if "attach" in rows:
            sharding_consumers.measure(root)
        if "routing" in rows:
            sharding_routing.measure()


if __name__ == "__main__":
    names = [*(row.name for row in ROWS), *OWN_ROWS]
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--rounds", type=int, default=ROUNDS, help="rounds of each measurement")
    arguments.add_argument("--rows", nargs="+", choices=names, default=names, metavar="ROW", help=", ".join(names))
    options = arguments.parse_args()
    main(options.rows, options.rounds)
