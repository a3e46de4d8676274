"""`shardyard pipeline history`: tables of conversations for fast paging."""

# ruff: noqa: PLC0415 commands start quickly: what is slow to import is imported by those that need it

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from shardyard.cli.options import Json, integer_option
from shardyard.cli.output import Row, print_json, print_message, print_table
from shardyard.cli.pipeline.options import (
    Master,
    Memory,
    OptionalLogUrl,
    partition_counts,
    require_spark,
    spark_session,
    successors,
)
from shardyard.model import InvalidValue
from shardyard.wire.inbox import TOPIC


def history(
    lake: Annotated[Path, typer.Option("--lake", metavar="FOLDER", help="The lake that the topic is ingested into.")],
    out: Annotated[
        Path, typer.Option("--out", metavar="FOLDER", help="The folder of the tables; created if it does not exist.")
    ],
    log: OptionalLogUrl = None,
    topic: Annotated[str, typer.Option("--topic", metavar="TOPIC", help="The topic of messaging servers.")] = TOPIC,
    buckets: Annotated[
        int | None,
        integer_option(
            "--buckets",
            help="How many buckets conversations are hashed to; fixed when the tables are created. Default: 64.",
        ),
    ] = None,
    master: Master = None,
    memory: Memory = None,
    json: Json = False,
) -> None:
    """Bring tables of conversations up to date with a lake, for fast paging.

    With --log, the lake is brought up to date first. Run it again to add what is new. Messages are in the tables once:
    copies for the sender's other clients and duplicates are left out. Messaging servers read pages from the tables.

    Examples:

      shardyard pipeline history --lake data/lake --out data/history

      shardyard pipeline history --log sqlite:///data/log --lake data/lake --out data/history --buckets 256
    """
    require_spark()
    from shardyard.pipeline.history.files import HistoryFiles
    from shardyard.pipeline.history.history import history as run
    from shardyard.pipeline.lake.ingest import ingest
    from shardyard.pipeline.lake.lake import Lake

    source = Lake(lake)
    source.check()
    HistoryFiles(out).check(buckets)
    if log is not None:
        partition_counts(log, [topic])
    elif source.format is None:
        raise InvalidValue("--lake", str(lake), "a lake that exists; give --log to create it")
    elif topic not in source.topics():
        raise InvalidValue("--topic", topic, f"one that is ingested into the lake {lake}; give --log to ingest it")
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    with spark_session("history", master, memory) as spark:
        if log is not None:
            console.print("[dim]bringing the lake up to date[/]")
            ingest(spark, log, [topic], lake)
        done = run(
            spark, lake, out, topic=topic, buckets=buckets, on_step=lambda text: console.print(f"[dim]{text}[/]")
        )
    for name, successor in successors(log, [topic]).items() if log is not None else ():
        print_message(f"{name!r} continues as {successor!r}: ingest that into another lake, and add it to these tables")
    if json:
        print_json(asdict(done))
        return
    row: Row = {name: value for name, value in asdict(done).items() if name != "examples"}
    print_table([row])
    for record in done.examples:
        place = f"record {record.offset} of partition {record.partition}"
        print_message(f"{place} is not a message and was skipped: {record.problem}")
