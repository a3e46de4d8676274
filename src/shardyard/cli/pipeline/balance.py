"""`shardyard pipeline balance`: how evenly load is spread, and what would help."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from shardyard.cli.output import Count, Json, Row, print_json, print_table
from shardyard.cli.pipeline.options import (
    BytesColumn,
    KeyColumn,
    Master,
    MaybeLogUrl,
    Memory,
    Parquet,
    PartitionColumn,
    TimeColumn,
    Topics,
    check_source,
    loads,
    names,
    numbers,
    partition_counts,
    spark_session,
)

if TYPE_CHECKING:
    from shardyard.pipeline.balance.figures import BalanceReport, SchemeLoad, Spread, TopicBalance


def balance(
    log: MaybeLogUrl = None,
    topic: Topics = None,
    parquet: Parquet = None,
    key: KeyColumn = "key",
    size: BytesColumn = None,
    timestamp: TimeColumn = None,
    partition: PartitionColumn = None,
    topic_column: Annotated[
        str | None, typer.Option("--topic-column", help="With --parquet: the column with the topic, as a lake has it.")
    ] = None,
    partitions: Annotated[str, typer.Option("--partitions", "-p", help="Counts to try, such as 12,24,256.")] = "12",
    partitioner: Annotated[str, typer.Option("--partitioner", help="Those to try: modulus,jump.")] = "modulus,jump",
    hash_name: Annotated[
        str | None,
        typer.Option("--hash", help="Hashes to try, such as fnv1a32,xxh64. Default: each partitioner's own."),
    ] = None,
    assignor: Annotated[str, typer.Option("--assignor", help="Those to try, such as sticky,contiguous.")] = "sticky",
    members: Annotated[str | None, typer.Option("--members", help="Numbers of members to try, such as 4,16.")] = None,
    window: Annotated[str | None, typer.Option("--window", help="Also by time, such as '1 hour'.")] = None,
    hot: Annotated[int, Count("--hot", help="How many hot keys to list.")] = 10,
    master: Master = None,
    memory: Memory = None,
    json: Json = False,
) -> None:
    """Measure records and bytes per partition, find hot keys, try other hashes and counts, and say what would help.

    Works on topics, and on Parquet files that Shardyard did not write.

    Examples:

      shardyard pipeline balance --log sqlite:///data/log --topic orders --partitions 12,24 --members 4

      shardyard pipeline balance --parquet data/lake/records --topic-column topic --bytes value --partition partition

      shardyard pipeline balance --parquet visits/ --key user_id --bytes body --timestamp at --window '1 hour' --json
    """
    counts = numbers("--partitions", partitions)
    member_counts = numbers("--members", members) if members is not None else []
    check_source(log, topic, parquet)
    from shardyard.pipeline.balance.report import balance_report, window_us  # noqa: PLC0415 Spark is slow to import
    from shardyard.pipeline.balance.scheme import every_scheme  # noqa: PLC0415

    schemes = every_scheme(names(partitioner), names(hash_name) or None, counts)
    if window is not None:
        window_us(window)
    with spark_session("balance", master, memory) as spark:
        report = balance_report(
            loads(spark, log, topic, parquet, key, size, timestamp, partition, topic_column),
            schemes,
            window=window,
            assignors=names(assignor),
            members=member_counts,
            hot=hot,
            partitions=partition_counts(log, topic or []) if log is not None else None,
        )
    if json:
        print_json(report.to_json())
    else:
        show(report)


def show(report: "BalanceReport") -> None:
    """The figures as tables, and the sentence under them."""
    for found in report.topics:
        print_table([_scheme_row(load) for load in found.schemes], f"{found.topic}: {found.records:,} records")
        print_table(_window_rows(found), f"{found.topic}, by time")
        print_table(_member_rows(found), f"{found.topic}, on members")
        print_table(_key_rows(found), f"{found.topic}, hot keys")
        sys.stdout.write(f"{found.topic}: {found.sentence}\n")


def _scheme_row(load: "SchemeLoad") -> Row:
    return {"scheme": load.scheme, **_spread_row(load.records, load.bytes)}


def _spread_row(records: "Spread", size: "Spread | None") -> dict[str, object]:
    row: dict[str, object] = {
        "records max/mean": records.over_mean,
        "chi2/df": records.balance.chi2_per_df,
        "gini": records.balance.gini,
        "fullest": records.fullest,
        "share": records.fullest_share,
    }
    if size is not None:
        row |= {"bytes max/mean": size.over_mean, "bytes gini": size.balance.gini}
        row |= {"fullest by bytes": size.fullest, "share of bytes": size.fullest_share}
    return row


def _window_rows(found: "TopicBalance") -> list[Row]:
    return [
        {"window": window.start.isoformat() if window.start is not None else "", **_scheme_row(load)}
        for window in found.windows
        for load in window.schemes
    ]


def _member_rows(found: "TopicBalance") -> list[Row]:
    return [
        {
            "assignor": m.assignor,
            "members": m.members,
            "scheme": m.scheme,
            "idle": m.idle,
            **_spread_row(m.records, m.bytes),
        }
        for m in found.members
    ]


def _key_rows(found: "TopicBalance") -> list[Row]:
    from shardyard.pipeline.balance.figures import shown  # noqa: PLC0415 as above

    rows: list[Row] = []
    for hot in found.hot_keys.keys:
        row: dict[str, object] = {"key": shown(hot.key), "records": hot.records, "share": hot.share_of_records}
        if hot.bytes is not None:
            row |= {"bytes": hot.bytes, "share of bytes": hot.share_of_bytes}
        row |= {place.scheme: "" if place.partition is None else place.partition for place in hot.places}
        rows.append(row)
    return rows
