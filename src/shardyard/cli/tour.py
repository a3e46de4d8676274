"""`shardyard tour`: runs examples of placement, groups and the pipeline. `make run` starts it."""

import shlex
import sys

from rich.console import Console

from shardyard.model.extras import require

STEPS = (
    (
        "Where does a channel live? (jump hash, as a fan-out uses it)",
        "place ch_general ch_dev ch_random dm_alice_bob --partitioner jump --partitions 256",
    ),
    (
        "Where does a user live? (FNV-1a modulo, as a chat server uses it)",
        "place alice bob carol --partitions 12",
    ),
    (
        "How evenly are ids spread? 1 to 100 million over 1000 partitions:",
        "check --hash fnv1a32 --keys 100000000 --partitions 1000",
    ),
    ("From 12 to 13 partitions, what moves?", "compare --partitions 12 --to 13"),
    ("From 16 to 17 workers, what moves?", "compare --partitions 256 --members 16 --to-members 17"),
    ("Three members share a topic while records flow; one joins, one leaves:", "demo --partitions 12 --members 3"),
    (
        "And the Spark pipeline, while orders flow:",
        "pipeline demo --report shardyard-plan.html",
    ),
)


def tour() -> None:
    """Run examples: where keys live, how evenly they spread, what moves, a group at work, and the pipeline."""
    require("pipeline", "the tour")
    from shardyard.cli import app  # noqa: PLC0415 the app imports this module

    console = Console(highlight=False)
    for question, command in STEPS:
        console.print(f"\n[bold]{question}[/]\n[dim]$ shardyard {command}[/]", soft_wrap=True)
        sys.stdout.flush()
        app(shlex.split(command), standalone_mode=False)
    console.print("\nNext: [bold]shardyard --help[/], and README.md.")
