"""Messaging servers compared with what a Python team would build (Starlette or Socket.IO with Redis) and with ejabberd:
connections, latency, throughput, and what is lost when a server is killed. 2 cores, texts of 100 bytes.

Run it with `make bench` or `python -m bench.messaging`; `bench/README.md` explains how each figure is measured.
"""

import argparse
import resource
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from bench.figures import filesystem, pin_to_cores, sync_seconds, table
from bench.messaging_load import TEXT_BYTES
from bench.messaging_rows import ROWS, Figures, Line, Row, Sizes, load_average
from bench.messengers.ejabberd import EJABBERD, EJABBERD_POSTGRESQL
from bench.messengers.messenger import Messenger
from bench.messengers.shardyard import SHARDYARD_LOCAL, SHARDYARD_LOG
from bench.messengers.socketio import SOCKETIO
from bench.messengers.starlette import STARLETTE

MESSENGERS = (SHARDYARD_LOG, SHARDYARD_LOCAL, STARLETTE, SOCKETIO, EJABBERD, EJABBERD_POSTGRESQL)
SPARE_FILES = 1_500
"""Open files of a server beside its connections."""


def measure(row: Row, messengers: Sequence[Messenger], sizes: Sizes, rounds: int, root: Path) -> None:
    """Measure the systems in turn, round by round; each round begins with another system. Then print the row."""
    systems = [messenger for messenger in messengers if row.systems is None or messenger in row.systems]
    if not systems:
        return
    measured: dict[str, Figures] = {messenger.name: defaultdict(list) for messenger in systems}
    for number in range(rounds):
        for messenger in systems[number % len(systems) :] + systems[: number % len(systems)]:
            folder = root / f"{row.name}-{number}" / messenger.name.replace(", ", "-").replace(" ", "-")
            try:
                row.measure(messenger, folder, sizes, measured[messenger.name])
            except RuntimeError as error:  # the others are measured all the same
                print(f"{row.name}: {messenger.name} failed: {error}", file=sys.stderr)
            print(f"{row.name}: {messenger.name}, round {number + 1} of {rounds}, {load_average()}", flush=True)
    report({name: figures for name, figures in measured.items() if figures}, row)


def report(measured: dict[str, Figures], row: Row) -> None:
    print(f"\n{row.name}")
    cells = [
        [line.title, *(line.show(values) if (values := figures[line.title]) else "" for figures in measured.values())]
        for line in row.lines
    ]
    table(["", *measured], cells)
    ours = measured.get(SHARDYARD_LOG.name)
    others = {name: figures for name, figures in measured.items() if figures is not ours}
    compared = [line for line in row.lines if line.score is not None]
    if ours is not None and others and compared:
        print(f"\n{SHARDYARD_LOG.name} compared with the others: above 1, it is better (latencies by their p99)")
        table(["", *others], [[line.title, *(ratio(line, ours, f) for f in others.values())] for line in compared])
    print(flush=True)


def ratio(line: Line, ours: Figures, others: Figures) -> str:
    values, their_values = ours[line.title], others[line.title]
    if line.score is None or not values or not their_values:
        return ""
    return f"{line.score(values) / line.score(their_values):.2f}"


def main(only: Sequence[str], rows: Sequence[str], rounds: int, sizes: Sizes) -> None:
    print(
        f"messaging: {pin_to_cores()}, texts of {TEXT_BYTES} bytes."
        " Only what Shardyard acknowledges survives a power cut"
    )
    print(
        ", ".join(f"{name} {version(name)}" for name in ("starlette", "uvicorn", "python-socketio", "redis", "picows"))
    )
    messengers = [m for m in MESSENGERS if not only or any(name.lower() in m.name.lower() for name in only)]
    with tempfile.TemporaryDirectory(prefix="shardyard-bench-", ignore_cleanup_errors=True) as temporary:
        root = Path(temporary)
        print(f"in {root}: {filesystem(root)}, a sync of 4 KiB takes {sync_seconds(root) * 1e3:.2f} ms", flush=True)
        for row in ROWS:
            if row.name in rows:
                measure(row, messengers, sizes, rounds, root)


def raise_open_files() -> int:
    """Let this process and those it starts open as many files as they may; how many that is."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


if __name__ == "__main__":
    our_connections = min(18_000, raise_open_files() - SPARE_FILES)
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--rounds", type=int, default=1, help="rounds of each measurement")
    arguments.add_argument(
        "--rows",
        nargs="+",
        choices=[row.name for row in ROWS],
        default=[row.name for row in ROWS if row.is_default],
        metavar="ROW",
        help=", ".join(row.name for row in ROWS),
    )
    arguments.add_argument(
        "--only", nargs="+", default=[], metavar="NAME", help="measure only systems whose name contains one of these"
    )
    arguments.add_argument(
        "--connections",
        type=int,
        metavar="N",
        help=f"clients in the row connections; by default {our_connections:,} of Shardyard and 2,000 of the others",
    )
    arguments.add_argument("--users", type=int, default=1_000, help="that exchange messages")
    arguments.add_argument("--per-second", type=float, default=2_000, help="messages at a fixed rate")
    arguments.add_argument("--seconds", type=float, default=10, help="of each load")
    arguments.add_argument("--devices", type=int, default=20, help="clients of each recipient in the row fan-out")
    arguments.add_argument("--moved", type=int, default=5_000, help="clients of the stopped server in the row moves")
    options = arguments.parse_args()
    main(
        options.only,
        options.rows,
        options.rounds,
        Sizes(
            our_connections=options.connections or our_connections,
            connections=options.connections or 2_000,
            users=options.users,
            per_second=options.per_second,
            seconds=options.seconds,
            devices=options.devices,
            moved=options.moved,
        ),
    )
