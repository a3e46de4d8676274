"""`shardyard pipeline audit`: sent against delivered."""

import sys
from datetime import UTC, datetime
from typing import Annotated

import typer

from shardyard.cli.output import Count, Json, Row, print_json, print_table
from shardyard.cli.pipeline.options import LogUrl, Master, Memory, Parquet, partition_counts, spark_session
from shardyard.model import InvalidCall, InvalidValue


def audit(
    log: LogUrl,
    sent: Annotated[str, typer.Option("--sent", help="The topic with what was sent.", show_default=False)],
    delivered: Annotated[str | None, typer.Option("--delivered", help="A topic with what was delivered ...")] = None,
    parquet: Parquet = None,
    id_: Annotated[str, typer.Option("--id", help="With --parquet: the column with the record's id.")] = "id",
    order: Annotated[
        str | None, typer.Option("--order", help="With --parquet: a column that grows with each delivery.")
    ] = None,
    partition: Annotated[
        str | None, typer.Option("--partition", help="With --parquet: the column within which the order holds.")
    ] = None,
    at: Annotated[
        str | None, typer.Option("--at", help="With --parquet: the column with the time of delivery.")
    ] = None,
    exactly_once: Annotated[
        bool, typer.Option("--exactly-once", help="Nothing may come twice. Default: at least once.")
    ] = False,
    until: Annotated[
        str | None, typer.Option("--until", help="Leave out what was sent later, such as 2026-01-31T12:00:00Z.")
    ] = None,
    examples: Annotated[int, Count("--examples", help="How many of each to show.")] = 5,
    master: Master = None,
    memory: Memory = None,
    json: Json = False,
) -> None:
    """Say what was lost, came twice or out of order, and how long it took; exit with 1 if a guarantee is broken.

    What was delivered is a topic, or Parquet files with a row for each delivery.

    Examples:

      shardyard pipeline audit --log sqlite:///data/log --sent orders --delivered orders.done

      shardyard pipeline audit --log sqlite:///data/log --sent orders --parquet deliveries/ --order n --exactly-once
    """
    if (delivered is None) == (parquet is None):
        raise InvalidCall("expected either --delivered or --parquet")
    if parquet is not None and not parquet.exists():
        raise InvalidValue("--parquet", str(parquet), "a file or folder that exists")
    deadline = _time(until) if until is not None else None
    partition_counts(log, [sent, *([delivered] if delivered is not None else [])])
    with spark_session("audit", master, memory) as spark:
        from shardyard.pipeline.audit.audit import audit as run  # noqa: PLC0415 Spark is slow to import
        from shardyard.pipeline.audit.audit import (  # noqa: PLC0415
            delivered_from_table,
            delivered_from_topic,
            sent_from_topic,
        )

        topics = spark.read.format("shardyard").option("log", log)
        if parquet is not None:
            table = spark.read.parquet(str(parquet))
            came = delivered_from_table(table, id=id_, order=order, partition=partition, at=at)
        else:
            came = delivered_from_topic(topics.option("topics", str(delivered)).load())
        went = sent_from_topic(topics.option("topics", sent).load())
        report = run(went, came, exactly_once=exactly_once, until=deadline, examples=examples)
    if json:
        print_json(report.to_json())
    else:
        figures = report.to_json()
        rows: list[Row] = [{"figure": name, "value": figures[name]} for name in _SHOWN]
        latency = figures["latency"] or {}
        rows += [{"figure": f"latency {name}", "value": value} for name, value in latency.items() if name != "records"]
        print_table(rows)
        for name, found in figures["examples"].items():  # with keys as text
            print_table(found, f"{name.replace('_', ' ')}, for example")
        sys.stdout.write(f"{report.sentence()}\n")
    if not report.ok:
        raise typer.Exit(1)


_SHOWN = ("sent", "delivered", "lost", "duplicated", "unexpected", "out_of_order")


def _time(text: str) -> datetime:
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidValue("--until", text, "a time such as 2026-01-31T12:00:00Z") from None
    return when if when.tzinfo else when.replace(tzinfo=UTC)
