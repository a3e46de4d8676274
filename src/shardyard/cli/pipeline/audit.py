"""`shardyard pipeline audit`: compare what was sent with what was delivered."""

# ruff: noqa: PLC0415 commands start quickly: what is slow to import is imported by those that need it

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from shardyard.cli.options import Json, integer_option
from shardyard.cli.output import Row, print_json, print_message, print_tables
from shardyard.cli.pipeline.options import (
    LogUrl,
    Master,
    Memory,
    Parquet,
    check_parquet,
    partition_counts,
    spark_session,
)
from shardyard.model import InvalidCall, InvalidValue
from shardyard.wire.channels import EVENTS, FANOUT
from shardyard.wire.inbox import TOPIC

if TYPE_CHECKING:
    from shardyard.pipeline.audit.report import AuditReport


def audit(
    log: LogUrl,
    sent: Annotated[
        str | None, typer.Option("--sent", metavar="TOPIC", help="The topic that records were sent to.")
    ] = None,
    delivered: Annotated[
        str | None, typer.Option("--delivered", metavar="TOPIC", help="The topic with the records that were delivered.")
    ] = None,
    parquet: Parquet = None,
    id_: Annotated[
        str, typer.Option("--id", metavar="COLUMN", help="With --parquet: the column with the record's id.")
    ] = "id",
    order: Annotated[
        str | None,
        typer.Option("--order", metavar="COLUMN", help="With --parquet: a column that increases with each delivery."),
    ] = None,
    partition: Annotated[
        str | None,
        typer.Option(
            "--partition",
            metavar="COLUMN",
            help="With --parquet: the column with the partition, within which order is checked.",
        ),
    ] = None,
    at: Annotated[
        str | None,
        typer.Option("--at", metavar="COLUMN", help="With --parquet: the column with the time of delivery."),
    ] = None,
    channels: Annotated[
        bool,
        typer.Option("--channels", help="Audit the events of channels in the topics events, fanout and inbox instead."),
    ] = False,
    replicated: Annotated[
        bool, typer.Option("--replicated", help="With --channels: events went to inbox without fanout.")
    ] = False,
    exactly_once: Annotated[
        bool, typer.Option("--exactly-once", help="Duplicates break the guarantee, too. Default: at least once.")
    ] = False,
    until: Annotated[
        str | None,
        typer.Option(
            "--until",
            metavar="TIME",
            help="Ignore records sent after this, such as 2026-01-31T12:00:00Z (without a zone: UTC).",
        ),
    ] = None,
    examples: Annotated[int, integer_option("--examples", help="How many examples of each problem to show.")] = 5,
    master: Master = None,
    memory: Memory = None,
    json: Json = False,
) -> None:
    """Find records that were lost, duplicated or delivered out of order, and measure latency.

    Exits with 1 if a guarantee is broken. Deliveries are read from a topic, or from Parquet files with a row for each.
    With --channels, every event must be in fanout once, and in each partition of inbox at most once, in order.

    Examples:

      shardyard pipeline audit --log sqlite:///data/log --sent orders --delivered orders.done

      shardyard pipeline audit --log sqlite:///data/log --sent orders --parquet deliveries/ --order n --exactly-once

      shardyard pipeline audit --log sqlite:///data/log --channels
    """
    if channels:
        if (sent, delivered, parquet) != (None, None, None):
            raise InvalidCall("expected --channels without --sent, --delivered and --parquet")
        deadline = _parse_time(until) if until is not None else None
        _audit_channels(log, replicated, deadline, examples, master, memory, json=json)
        return
    if sent is None or replicated:
        raise InvalidCall("expected --sent, or --channels (with --replicated)")
    if (delivered is None) == (parquet is None):
        raise InvalidCall("expected either --delivered or --parquet")
    if parquet is not None:
        check_parquet(parquet)
    deadline = _parse_time(until) if until is not None else None
    partition_counts(log, [sent, *([delivered] if delivered is not None else [])])
    with spark_session("audit", master, memory) as spark:
        from shardyard.pipeline.audit.audit import audit as run
        from shardyard.pipeline.audit.audit import (
            delivered_from_table,
            delivered_from_topic,
            sent_from_topic,
        )
        from shardyard.pipeline.lake.delta import read_table

        topics = spark.read.format("shardyard").option("log", log)
        if parquet is not None:
            table = read_table(spark, parquet)
            deliveries = delivered_from_table(table, id=id_, order=order, partition=partition, at=at)
        else:
            deliveries = delivered_from_topic(topics.option("topics", str(delivered)).load())
        records = sent_from_topic(topics.option("topics", sent).load())
        report = run(records, deliveries, exactly_once=exactly_once, until=deadline, examples=examples)
    if json:
        print_json(report.to_json())
    else:
        print_tables(_tables(report))
        print_message(report.sentence())
    if not report.ok:
        raise typer.Exit(1)


def _tables(report: "AuditReport", prefix: str = "") -> dict[str, list[Row]]:
    metrics = report.to_json()
    rows: list[Row] = [{"metric": name, "value": metrics[name]} for name in _PRINTED]
    latency = metrics["latency"] or {}
    rows += [{"metric": f"latency {name}", "value": value} for name, value in latency.items() if name != "records"]
    examples_of = {
        f"{prefix}examples: {problem.replace('_', ' ')}": found for problem, found in metrics["examples"].items()
    }
    return {f"{prefix}audit": rows, **examples_of}


def _audit_channels(
    log: str,
    replicated: bool,
    until: datetime | None,
    examples: int,
    master: str | None,
    memory: str | None,
    *,
    json: bool,
) -> None:
    names = [EVENTS, TOPIC] if replicated else [EVENTS, FANOUT, TOPIC]
    partition_counts(log, names)
    with spark_session("audit", master, memory) as spark:
        from shardyard.pipeline.audit.channels import audit_channels
        from shardyard.pipeline.blocking import blocking
        from shardyard.pipeline.source.offset_lookup import fixed_range
        from shardyard.pipeline.source.options import absolute

        frames = {}
        with blocking(absolute(log)) as opened:
            # What is forwarded is read first, and what it comes from last: so nothing seems to come from nowhere.
            for name in reversed(names):
                offsets = opened.wait(fixed_range(opened.log, [name]))
                frames[name] = spark.read.format("shardyard").options(log=log, topics=name, **offsets).load()
        fanout = frames.get(FANOUT, frames[EVENTS].limit(0))
        report = audit_channels(
            frames[EVENTS], fanout, frames[TOPIC], replicated=replicated, until=until, examples=examples
        )
    ways = {"events to fanout": report.forwarded, "to inbox": report.posted}
    if json:
        print_json({"ok": report.ok} | {name: one.to_json() for name, one in ways.items() if one is not None})
    else:
        print_tables(
            {title: rows for name, one in ways.items() if one for title, rows in _tables(one, f"{name}: ").items()}
        )
        for name, one in ways.items():
            if one is not None:
                print_message(f"{name}: {one.sentence()}")
    if not report.ok:
        raise typer.Exit(1)


_PRINTED = ("sent", "delivered", "lost", "duplicated", "unexpected", "out_of_order")


def _parse_time(text: str) -> datetime:
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidValue("--until", text, "a time such as 2026-01-31T12:00:00Z") from None
    return time if time.tzinfo else time.replace(tzinfo=UTC)
