"""`shardyard pipeline balance`: how evenly load is spread, and what would help."""

# ruff: noqa: PLC0415 commands start quickly: what is slow to import is imported by those that need it

from typing import TYPE_CHECKING, Annotated

import typer

from shardyard.cli.options import Json, integer_option
from shardyard.cli.output import Row, print_json, print_message, print_tables
from shardyard.cli.pipeline.options import (
    BytesColumn,
    KeyColumn,
    Master,
    Memory,
    OptionalLogUrl,
    Parquet,
    PartitionColumn,
    TimeColumn,
    Topics,
    check_source,
    parse_assignors,
    parse_counts,
    parse_names,
    partition_counts,
    read_loads,
    spark_session,
)

if TYPE_CHECKING:
    from shardyard.pipeline.balance.figures import BalanceReport, SchemeLoad, Spread, TopicBalance


def balance(
    log: OptionalLogUrl = None,
    topic: Topics = None,
    parquet: Parquet = None,
    key: KeyColumn = "key",
    size: BytesColumn = None,
    timestamp: TimeColumn = None,
    partition: PartitionColumn = None,
    topic_column: Annotated[
        str | None,
        typer.Option(
            "--topic-column", metavar="COLUMN", help="With --parquet: the column with the topic, if there are several."
        ),
    ] = None,
    partitions: Annotated[
        str | None,
        typer.Option(
            "--partitions",
            "-p",
            metavar="N,...",
            help="Partition counts to try, such as 12,24,256. Default: those of the topics; with --parquet, 12.",
        ),
    ] = None,
    partitioners: Annotated[
        str, typer.Option("--partitioner", metavar="NAME,...", help="Partitioners to try.")
    ] = "modulus,jump",
    hashes: Annotated[
        str | None,
        typer.Option(
            "--hash", metavar="NAME,...", help="Hashes to try, such as fnv1a32,xxh64. Default: each partitioner's own."
        ),
    ] = None,
    assignors: Annotated[
        str, typer.Option("--assignor", metavar="NAME,...", help="Assignors to try, such as sticky,contiguous.")
    ] = "sticky",
    members: Annotated[
        str | None, typer.Option("--members", metavar="N,...", help="Member counts to try, such as 4,16.")
    ] = None,
    window: Annotated[
        str | None, typer.Option("--window", metavar="DURATION", help="Also measure each window, such as '1 hour'.")
    ] = None,
    hot: Annotated[
        int, integer_option("--hot", help="How many hot keys to list by records, and as many by bytes.")
    ] = 10,
    master: Master = None,
    memory: Memory = None,
    json: Json = False,
) -> None:
    """Measure load per partition, find hot keys, try other hashes and partition counts, and recommend what would help.

    Load is measured in records and bytes. It works on topics and on any Parquet files. The recommendation is printed to
    standard error.

    Examples:

      shardyard pipeline balance --log sqlite:///data/log --topic orders --partitions 12,24 --members 4

      shardyard pipeline balance --parquet data/lake/records --topic-column topic --bytes value --partition partition

      shardyard pipeline balance --parquet visits/ --key user_id --bytes body --timestamp at --window '1 hour' --json
    """
    counts = None if partitions is None else parse_counts("--partitions", partitions)
    member_counts = parse_counts("--members", members) if members is not None else []
    check_source(log, topic, parquet)
    from shardyard.pipeline.balance.report import balance_report, window_us
    from shardyard.pipeline.balance.scheme import every_scheme

    own = partition_counts(log, topic or []) if log is not None else None
    counts = counts or sorted(set((own or {"": 12}).values()))
    assignor_names = parse_assignors(assignors)
    schemes = every_scheme(parse_names(partitioners), parse_names(hashes) or None, counts)
    if window is not None:
        window_us(window)
    with spark_session("balance", master, memory) as spark:
        report = balance_report(
            read_loads(spark, log, topic, parquet, key, size, timestamp, partition, topic_column),
            schemes,
            window=window,
            assignors=assignor_names,
            members=member_counts,
            hot=hot,
            partitions=own,
        )
    if json:
        print_json(report.to_json())
    else:
        print_report(report)


def print_report(report: "BalanceReport") -> None:
    """Print the report's tables, followed by the recommendation for each topic on standard error."""
    tables: dict[str, list[Row]] = {}
    for topic in report.topics:
        tables[f"{topic.topic}: {topic.records:,} records"] = [_scheme_row(load) for load in topic.schemes]
        tables[f"{topic.topic}: by time window"] = _window_rows(topic)
        tables[f"{topic.topic}: by member"] = _member_rows(topic)
        tables[f"{topic.topic}: hot keys ({_bound(topic)})"] = _key_rows(topic)
    print_tables(tables)
    for topic in report.topics:
        if not topic.hot_keys.keys and topic.hot_keys.others_records:
            print_message(f"{topic.topic}: hot keys: none stands out, {_bound(topic)}")
        print_message(f"{topic.topic}: {topic.sentence}")


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


def _window_rows(topic: "TopicBalance") -> list[Row]:
    return [
        {"window": window.start.isoformat() if window.start is not None else "", **_scheme_row(load)}
        for window in topic.windows
        for load in window.schemes
    ]


def _member_rows(topic: "TopicBalance") -> list[Row]:
    return [
        {
            "assignor": load.assignor,
            "members": load.members,
            "scheme": load.scheme,
            "idle": load.idle,
            **_spread_row(load.records, load.bytes),
        }
        for load in topic.members
    ]


def _bound(topic: "TopicBalance") -> str:
    """How far the list of hot keys is complete."""
    hot = topic.hot_keys
    size = "" if hot.others_bytes is None else f" or {hot.others_bytes:,} bytes"
    return f"no {'other ' if hot.keys else ''}key has more than {hot.others_records:,} records{size}"


def _key_rows(topic: "TopicBalance") -> list[Row]:
    from shardyard.pipeline.balance.figures import shown

    rows: list[Row] = []
    for hot in topic.hot_keys.keys:
        row: dict[str, object] = {"key": shown(hot.key), "records": hot.records, "share": hot.share_of_records}
        if hot.bytes is not None:
            row |= {"bytes": hot.bytes, "share of bytes": hot.share_of_bytes}
        row |= {place.scheme: "" if place.partition is None else place.partition for place in hot.places}
        rows.append(row)
    return rows
