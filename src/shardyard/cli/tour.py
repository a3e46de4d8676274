"""`shardyard tour`: what `make run` shows."""

import shlex
import sys

from rich.console import Console

STOPS = (
    (
        "Where does a channel live? (jump hash, as a fan-out uses it)",
        "place ch_general ch_dev ch_random dm_alice_bob --partitioner jump --partitions 256",
    ),
    (
        "Where does a user live? (FNV-1a modulo, as a chat server uses it)",
        "place alice bob carol --partitions 12",
    ),
    (
        "How evenly? Ids 1 to 100 million over 1000 partitions:",
        "check --hash fnv1a32 --keys 100000000 --partitions 1000",
    ),
    ("From 12 to 13 partitions, what moves?", "compare --partitions 12 --to 13"),
    ("From 16 to 17 workers, what moves?", "compare --partitions 256 --members 16 --to-members 17"),
    ("Three members share a durable log; one joins, one leaves, records flow:", "demo --partitions 12 --members 3"),
    (
        "And all of the data, on Spark, while orders flow:",
        "pipeline demo --report shardyard-plan.html",
    ),
)


def tour() -> None:
    """Show where a key lives, how evenly keys spread, what moves, a group that shares a log, and the pipeline."""
    from shardyard.cli import app  # noqa: PLC0415 the app is made of the commands

    console = Console(highlight=False)
    for question, command in STOPS:
        console.print(f"\n[bold]{question}[/]\n[dim]$ shardyard {command}[/]", soft_wrap=True)
        sys.stdout.flush()
        app(shlex.split(command), standalone_mode=False)
    console.print("\nNext: [bold]shardyard --help[/], and README.md.")
