"""`shardyard pipeline plan`: what other numbers of partitions and members would mean."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardyard.cli.options import Json, integer_option
from shardyard.cli.output import print_json, print_message, print_table
from shardyard.cli.pipeline.options import (
    BytesColumn,
    KeyColumn,
    Master,
    Memory,
    OptionalLogUrl,
    Parquet,
    PartitionColumn,
    check_source,
    parse_counts,
    parse_names,
    partition_counts,
    read_loads,
    require_spark,
    spark_session,
)
from shardyard.model import InvalidCall, InvalidValue

if TYPE_CHECKING:
    from shardyard.pipeline.plan.report import PlanReport

SAMPLE_KEYS = 100_000


def plan(
    log: OptionalLogUrl = None,
    topic: Annotated[
        str | None, typer.Option("--topic", metavar="TOPIC", help="The topic of the log to measure.")
    ] = None,
    parquet: Parquet = None,
    key: KeyColumn = "key",
    size: BytesColumn = None,
    partition: PartitionColumn = None,
    records: Annotated[
        int | None, integer_option("--assume-records", help="Assume this many records, instead of measuring.")
    ] = None,
    total_bytes: Annotated[
        int | None, integer_option("--assume-bytes", help="With --assume-records: their size in bytes, in total.")
    ] = None,
    partitions: Annotated[
        str, typer.Option("--partitions", "-p", metavar="N,...", help="Partition counts to try, such as 12,64,256.")
    ] = "64,256",
    members: Annotated[
        str, typer.Option("--members", metavar="N,...", help="Member counts to try, the current one first.")
    ] = "16",
    assignors: Annotated[
        str, typer.Option("--assignor", metavar="NAME,...", help="Assignors to compare.")
    ] = "sticky,even,contiguous,least_loaded",
    report: Annotated[
        Path | None, typer.Option("--report", metavar="FILE", help="Write a report with plots into this HTML file.")
    ] = None,
    master: Master = None,
    memory: Memory = None,
    json: Json = False,
) -> None:
    """Show what other numbers of partitions and members would mean: load, moves, bytes moved, memory per worker.

    Spark is started only to measure the load of a topic or of Parquet files, not with --assume-records. The report is
    one self-contained HTML file.

    Examples:

      shardyard pipeline plan --assume-records 1000000000 --assume-bytes 256000000000 --partitions 64,256 --members 16

      shardyard pipeline plan --log sqlite:///data/log --topic orders --members 4,8 --report plan.html
    """
    counts, member_counts = parse_counts("--partitions", partitions), parse_counts("--members", members)
    if report is not None and not report.absolute().parent.is_dir():
        raise InvalidValue("--report", str(report), "a file in a folder that exists")
    require_spark()
    from shardyard.pipeline.plan.html_report import render  # noqa: PLC0415
    from shardyard.pipeline.plan.load import Load, load_of  # noqa: PLC0415 Spark is slow to import
    from shardyard.pipeline.plan.report import make_plan  # noqa: PLC0415

    topics = [topic] if topic is not None else None
    load: Load
    if records is not None or total_bytes is not None:
        if log is not None or topic is not None or parquet is not None or records is None or total_bytes is None:
            raise InvalidCall(
                "expected either --assume-records with --assume-bytes, or something to measure: --log with --topic, "
                "or --parquet"
            )
        load, title = Load(records, total_bytes), "an assumed load"
    else:
        check_source(log, topics, parquet)
        if parquet is not None and size is None:
            raise InvalidCall("expected --bytes with --parquet: a column with sizes, or one whose length is the size")
        with spark_session("plan", master, memory) as spark:
            frame = read_loads(spark, log, topics, parquet, key, size, None, partition)
            current = partition_counts(log, topics or []).get(str(topic)) if log is not None else None
            load, title = load_of(frame, SAMPLE_KEYS, partitions=current), str(topic or parquet)
        if load.partition_bytes and len(load.partition_bytes) not in counts:
            counts = [len(load.partition_bytes), *counts]
    planned = make_plan(load, partitions=counts, members=member_counts, assignors=parse_names(assignors))
    if report is not None:
        report.write_text(render(planned, f"Plan for {title}"))
    if json:
        print_json(planned.to_json())
    else:
        print_plan(planned)
        if report is not None:
            print_message(f"report: {report}")


def print_plan(planned: "PlanReport") -> None:
    """Print the plan's tables, followed by its recommendation."""
    print_table([_scalars(asdict(count)) for count in planned.partition_counts], "Partitions")
    print_table([_scalars(asdict(step)) for step in planned.member_steps], "When members are added")
    print_table([_scalars(asdict(step)) for step in planned.partition_steps], "When partitions are added")
    print_table([_scalars(asdict(row)) for row in planned.worker_memory], "Memory per fan-out worker")
    sys.stdout.write(f"{planned.recommendation}\n")


def _scalars(row: dict[str, object]) -> dict[str, object]:
    """The row without lists and the like, for which a table has no space."""
    return {
        name: "" if value is None else value
        for name, value in row.items()
        if not isinstance(value, tuple | list | dict)
    }
