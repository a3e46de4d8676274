"""`shardyard pipeline audit`: compare what was sent with what was delivered."""

# ruff: noqa: PLC0415 commands start quickly: what is slow to import is imported by those that need it

from datetime import UTC, datetime
from typing import Annotated

import typer

from shardyard.cli.options import Json, integer_option
from shardyard.cli.output import Row, print_json, print_message, print_tables
from shardyard.cli.pipeline.options import LogUrl, Master, Memory, Parquet, partition_counts, spark_session
from shardyard.model import InvalidCall, InvalidValue


def audit(
    log: LogUrl,
    sent: Annotated[
        str, typer.Option("--sent", metavar="TOPIC", help="The topic that records were sent to.", show_default=False)
    ],
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
    exactly_once: Annotated[
        bool, typer.Option("--exactly-once", help="Duplicates break the guarantee, too. Default: at least once.")
    ] = False,
    until: Annotated[
        str | None,
        typer.Option("--until", metavar="TIME", help="Ignore records sent after this, such as 2026-01-31T12:00:00Z."),
    ] = None,
    examples: Annotated[int, integer_option("--examples", help="How many examples of each problem to show.")] = 5,
    master: Master = None,
    memory: Memory = None,
    json: Json = False,
) -> None:
    """Find records that were lost, duplicated or delivered out of order, and measure latency.

    Exits with 1 if a guarantee is broken. Deliveries are read from a topic, or from Parquet files with a row for each.

    Examples:

      shardyard pipeline audit --log sqlite:///data/log --sent orders --delivered orders.done

      shardyard pipeline audit --log sqlite:///data/log --sent orders --parquet deliveries/ --order n --exactly-once
    """
    if (delivered is None) == (parquet is None):
        raise InvalidCall("expected either --delivered or --parquet")
    if parquet is not None and not parquet.exists():
        raise InvalidValue("--parquet", str(parquet), "a file or folder that exists")
    deadline = _parse_time(until) if until is not None else None
    partition_counts(log, [sent, *([delivered] if delivered is not None else [])])
    with spark_session("audit", master, memory) as spark:
        from shardyard.pipeline.audit.audit import audit as run
        from shardyard.pipeline.audit.audit import (
            delivered_from_table,
            delivered_from_topic,
            sent_from_topic,
        )

        topics = spark.read.format("shardyard").option("log", log)
        if parquet is not None:
            table = spark.read.parquet(str(parquet))
            deliveries = delivered_from_table(table, id=id_, order=order, partition=partition, at=at)
        else:
            deliveries = delivered_from_topic(topics.option("topics", str(delivered)).load())
        records = sent_from_topic(topics.option("topics", sent).load())
        report = run(records, deliveries, exactly_once=exactly_once, until=deadline, examples=examples)
    if json:
        print_json(report.to_json())
    else:
        metrics = report.to_json()
        rows: list[Row] = [{"metric": name, "value": metrics[name]} for name in _PRINTED]
        latency = metrics["latency"] or {}
        rows += [{"metric": f"latency {name}", "value": value} for name, value in latency.items() if name != "records"]
        examples_of = {
            f"examples: {problem.replace('_', ' ')}": found for problem, found in metrics["examples"].items()
        }
        print_tables({"audit": rows, **examples_of})
        print_message(report.sentence())
    if not report.ok:
        raise typer.Exit(1)


_PRINTED = ("sent", "delivered", "lost", "duplicated", "unexpected", "out_of_order")


def _parse_time(text: str) -> datetime:
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidValue("--until", text, "a time such as 2026-01-31T12:00:00Z") from None
    return time if time.tzinfo else time.replace(tzinfo=UTC)
