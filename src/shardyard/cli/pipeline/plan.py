"""`shardyard pipeline plan`: what other numbers of partitions and members would mean."""

# ruff: noqa: PLC0415 commands start quickly: what is slow to import is imported by those that need it

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardyard.cli.options import Json, integer_option
from shardyard.cli.output import print_json, print_message, print_tables
from shardyard.cli.pipeline.options import (
    BytesColumn,
    KeyColumn,
    Master,
    Memory,
    OptionalLogUrl,
    Parquet,
    PartitionColumn,
    check_source,
    parse_assignors,
    parse_counts,
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
        str | None,
        typer.Option(
            "--partitions",
            "-p",
            metavar="N,...",
            help="Partition counts to try, such as 12,64,256. Default: as many as there are, twice and four times as "
            "many; of an assumed load, 64,256.",
        ),
    ] = None,
    members: Annotated[
        str | None, typer.Option("--members", metavar="N,...", help="Member counts to try, the current one first.")
    ] = None,
    registry: Annotated[
        str | None,
        typer.Option(
            "--registry",
            metavar="URL",
            help="Instead of --members: the registry, such as sqlite:///data/registry.db, with the groups that read "
            "the topic.",
        ),
    ] = None,
    assignors: Annotated[
        str, typer.Option("--assignor", metavar="NAME,...", help="Assignors to compare.")
    ] = "sticky,even,contiguous,least_loaded",
    fan_out_memory: Annotated[
        bool, typer.Option("--fan-out-memory", help="Also show how much memory fan-out workers would need.")
    ] = False,
    report: Annotated[
        Path | None, typer.Option("--report", metavar="FILE", help="Write a report with plots into this HTML file.")
    ] = None,
    master: Master = None,
    memory: Memory = None,
    json: Json = False,
) -> None:
    """Show what other numbers of partitions and members would mean: load, moves, bytes moved.

    The recommendation, on standard error, also says what the load supports: few keys cannot fill many partitions.

    Spark is started only to measure the load of a topic or of Parquet files, not with --assume-records. The report is
    one self-contained HTML file.

    Examples:

      shardyard pipeline plan --assume-records 1000000000 --assume-bytes 256000000000 --partitions 64,256 --members 16

      shardyard pipeline plan --log sqlite:///data/log --topic orders --registry sqlite:///data/registry.db

      shardyard pipeline plan --log sqlite:///data/log --topic orders --members 4,8 --report plan.html
    """
    counts = None if partitions is None else parse_counts("--partitions", partitions)
    if report is not None and not report.absolute().parent.is_dir():
        raise InvalidValue("--report", str(report), "a file in a folder that exists")
    require_spark()
    from shardyard.pipeline.plan.html_report import render
    from shardyard.pipeline.plan.load import Load, load_of
    from shardyard.pipeline.plan.report import make_plan

    assignor_names = parse_assignors(assignors)
    topics = [topic] if topic is not None else None
    load: Load
    if records is not None or total_bytes is not None or (log is None and topic is None and parquet is None):
        if log is not None or topic is not None or parquet is not None or records is None or total_bytes is None:
            raise InvalidCall(
                "expected either --assume-records with --assume-bytes, or something to measure: --log with --topic, "
                "or --parquet"
            )
        load, title = Load(records, total_bytes), "an assumed load"
        member_counts = _member_counts(members, registry, topic)
        counts = counts or [64, 256]
    else:
        check_source(log, topics, parquet)
        member_counts = _member_counts(members, registry, topic)
        if parquet is not None and size is None:
            raise InvalidCall("expected --bytes with --parquet: a column with sizes, or one whose length is the size")
        with spark_session("plan", master, memory) as spark:
            frame = read_loads(spark, log, topics, parquet, key, size, None, partition)
            current = partition_counts(log, topics or []).get(str(topic)) if log is not None else None
            load, title = load_of(frame, SAMPLE_KEYS, partitions=current), str(topic or parquet)
        current = len(load.partition_bytes) or 1
        if counts is None:
            counts = [current * factor for factor in (1, 2, 4)]
        elif load.partition_bytes and current not in counts:
            counts = [current, *counts]
    planned = make_plan(
        load,
        partitions=counts,
        members=member_counts,
        assignors=assignor_names,
        fan_out_memory=fan_out_memory,
    )
    if report is not None:
        report.write_text(render(planned, f"Plan for {title}"))
    if json:
        print_json(planned.to_json())
    else:
        print_plan(planned)
        if report is not None:
            print_message(f"report: {report}")


def print_plan(planned: "PlanReport") -> None:
    """Print the plan's tables, followed by its recommendation on standard error."""
    print_tables(
        {
            "partitions": [_scalars(asdict(count)) for count in planned.partition_counts],
            "when members are added": [_scalars(asdict(step)) for step in planned.member_steps],
            "when partitions are added": [_scalars(asdict(step)) for step in planned.partition_steps],
            "memory per fan-out worker": [_scalars(asdict(row)) for row in planned.worker_memory],
        }
    )
    print_message(planned.recommendation)


def _member_counts(members: str | None, registry: str | None, topic: str | None) -> list[int]:
    """The numbers of members: the given ones, or those of the groups that read the topic."""
    if (members is None) == (registry is None):
        raise InvalidCall(
            "expected either --members, such as --members 4,8, or --registry for the members of the topic's groups"
        )
    if members is not None:
        return parse_counts("--members", members)
    if topic is None:
        raise InvalidCall("expected --topic with --registry; for anything else, --members")
    from shardyard.groups.broadcast import is_member_group
    from shardyard.registry import Snapshot, open_registry, registry_exists

    if not registry_exists(str(registry)):
        raise InvalidValue("--registry", registry, "a registry that exists, such as sqlite:///data/registry.db")

    def group_sizes(tx: Snapshot) -> set[int]:
        groups = [group.name for group in tx.groups() if not is_member_group(group.name)]
        return {sum(topic in member.topics for member in tx.members(name)) for name in groups} - {0}

    with open_registry(str(registry)) as opened:
        found = sorted(opened.read(group_sizes))
    if not found:
        raise InvalidCall(f"no group in the registry has a member that reads {topic!r}: name --members instead")
    return found


def _scalars(row: dict[str, object]) -> dict[str, object]:
    """The row without lists and the like, for which a table has no space."""
    return {
        name: "" if value is None else value
        for name, value in row.items()
        if not isinstance(value, tuple | list | dict)
    }
