"""`shardyard pipeline routing`: snapshots of the routing table of channels."""

# ruff: noqa: PLC0415 commands start quickly: what is slow to import is imported by those that need it

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from shardyard.cli.options import Json
from shardyard.cli.output import print_json, print_message, print_table
from shardyard.cli.pipeline.options import LogUrl, Master, Memory, partition_counts, require_spark, spark_session
from shardyard.wire.channels import MEMBERS, PRESENCE


def routing(
    log: LogUrl,
    into: Annotated[
        Path, typer.Option("--into", metavar="FOLDER", help="The folder of the snapshot; created if it does not exist.")
    ],
    master: Master = None,
    memory: Memory = None,
    json: Json = False,
) -> None:
    """Take a snapshot of the routing table of channels, which fan-out workers start from.

    It holds what the topics members and presence say up to where they end when the command starts; workers apply what
    is appended later. Run it again to replace the snapshot, at any time: workers see the old one or the new one.

    Examples:

      shardyard pipeline routing --log sqlite:///data/log --into data/routing

      shardyard pipeline routing --log sqlite:////shared/log --into /shared/routing --memory 4g --json
    """
    require_spark()
    from shardyard.pipeline.routing.routing import check_folder
    from shardyard.pipeline.routing.routing import routing as run

    partition_counts(log, [MEMBERS, PRESENCE])
    check_folder(into)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    with spark_session("routing", master, memory) as spark:
        done = run(spark, log, into, on_step=lambda text: console.print(f"[dim]{text}[/]"))
    if json:
        print_json(asdict(done))
        return
    print_table([asdict(done)])
    if done.malformed:
        print_message(f"{done.malformed} records hold no change of a member or a client, and were left out")
