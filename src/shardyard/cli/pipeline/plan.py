"""`shardyard pipeline plan`: what-if, and a report that stands alone."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from shardyard.cli.output import Count, Json, print_json, print_table
from shardyard.cli.pipeline.options import (
    BytesColumn,
    KeyColumn,
    Master,
    MaybeLogUrl,
    Memory,
    Parquet,
    PartitionColumn,
    check_source,
    loads,
    names,
    need_spark,
    numbers,
    partition_counts,
    spark_session,
)
from shardyard.model import InvalidCall, InvalidValue

if TYPE_CHECKING:
    from shardyard.pipeline.plan.report import PlanReport

SAMPLED_KEYS = 100_000


def plan(
    log: MaybeLogUrl = None,
    topic: Annotated[str | None, typer.Option("--topic", help="A topic of the log: its load is measured.")] = None,
    parquet: Parquet = None,
    key: KeyColumn = "key",
    size: BytesColumn = None,
    partition: PartitionColumn = None,
    records: Annotated[int | None, Count("--assume-records", help="Instead of measuring: so many records ...")] = None,
    total_bytes: Annotated[int | None, Count("--assume-bytes", help="... of so many bytes together.")] = None,
    partitions: Annotated[str, typer.Option("--partitions", "-p", help="Counts to try, such as 12,64,256.")] = "64,256",
    members: Annotated[str, typer.Option("--members", help="Numbers of members, today's first, such as 4,16.")] = "16",
    assignor: Annotated[
        str, typer.Option("--assignor", help="Those to compare.")
    ] = "sticky,even,contiguous,least_loaded",
    report: Annotated[Path | None, typer.Option("--report", help="Write the report into this HTML file.")] = None,
    master: Master = None,
    memory: Memory = None,
    json: Json = False,
) -> None:
    """Say what other numbers of partitions and members would mean: load, moves and bytes moved, memory per worker.

    The report is one HTML file with plots that needs nothing else. Only a measured load needs Spark.

    Examples:

      shardyard pipeline plan --assume-records 1000000000 --assume-bytes 256000000000 --partitions 64,256 --members 16

      shardyard pipeline plan --log sqlite:///data/log --topic orders --members 4,8 --report plan.html
    """
    counts, member_counts = numbers("--partitions", partitions), numbers("--members", members)
    if report is not None and not report.absolute().parent.is_dir():
        raise InvalidValue("--report", str(report), "a file in a folder that exists")
    need_spark()
    from shardyard.pipeline.plan.html_report import render  # noqa: PLC0415
    from shardyard.pipeline.plan.load import Load, load_of  # noqa: PLC0415 Spark is slow to import
    from shardyard.pipeline.plan.report import make_plan  # noqa: PLC0415

    topics = [topic] if topic is not None else None
    load: Load
    if records is not None or total_bytes is not None:
        if log is not None or topic is not None or parquet is not None or records is None or total_bytes is None:
            raise InvalidCall("expected --assume-records and --assume-bytes alone, or something to measure")
        load, title = Load(records, total_bytes), "an assumed load"
    else:
        check_source(log, topics, parquet)
        if parquet is not None and size is None:
            raise InvalidCall("plan moves bytes: name a column with sizes, or whose length is the size, by --bytes")
        with spark_session("plan", master, memory) as spark:
            frame = loads(spark, log, topics, parquet, key, size, None, partition)
            there = partition_counts(log, topics or []).get(str(topic)) if log is not None else None
            load, title = load_of(frame, SAMPLED_KEYS, partitions=there), str(topic or parquet)
        if load.partition_bytes and len(load.partition_bytes) not in counts:
            counts = [len(load.partition_bytes), *counts]
    made = make_plan(load, partitions=counts, members=member_counts, assignors=names(assignor))
    if report is not None:
        report.write_text(render(made, f"Plan for {title}"))
    if json:
        print_json(made.to_json())
    else:
        show(made)
        if report is not None:
            Console(stderr=True).print(f"report: {report}", highlight=False, soft_wrap=True)


def show(made: "PlanReport") -> None:
    """The figures as tables, and the recommendation under them."""
    print_table([_without_lists(asdict(count)) for count in made.partition_counts], "Partitions")
    print_table([_without_lists(asdict(step)) for step in made.member_steps], "When members are added")
    print_table([_without_lists(asdict(step)) for step in made.partition_steps], "When partitions are added")
    print_table([_without_lists(asdict(row)) for row in made.worker_memory], "Memory per fan-out worker")
    sys.stdout.write(f"{made.recommendation}\n")


def _without_lists(row: dict[str, object]) -> dict[str, object]:
    return {
        name: "" if value is None else value
        for name, value in row.items()
        if not isinstance(value, tuple | list | dict)
    }
