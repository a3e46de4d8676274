"""What the pipeline's commands share: options, the Spark session, and reading the load to measure."""

# ruff: noqa: PLC0415 commands start quickly: what is slow to import is imported by those that need it

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardyard.model import InvalidCall, InvalidValue
from shardyard.model.extras import require

if TYPE_CHECKING:
    from shardyard.pipeline.session import DataFrame, SparkSession

_LOG_HELP = "The log, such as sqlite:///data/log."
LogUrl = Annotated[str, typer.Option("--log", metavar="URL", help=_LOG_HELP, show_default=False)]
OptionalLogUrl = Annotated[str | None, typer.Option("--log", metavar="URL", help=_LOG_HELP)]
Master = Annotated[
    str | None,
    typer.Option(
        "--master",
        "--remote",
        metavar="URL",
        help="The Spark master, such as spark://host:7077, or a Spark Connect server, such as sc://host:15002. "
        "Default: local[*].",
    ),
]
Memory = Annotated[
    str | None,
    typer.Option("--memory", metavar="SIZE", help="The memory of Spark's driver, such as 4g. Default: 2g."),
]
Topics = Annotated[
    list[str] | None, typer.Option("--topic", metavar="TOPIC", help="A topic of the log; may be repeated.")
]
Parquet = Annotated[
    Path | None,
    typer.Option("--parquet", metavar="PATH", help="Read Parquet files or a Delta table instead of a topic."),
]
KeyColumn = Annotated[str, typer.Option("--key", metavar="COLUMN", help="With --parquet: the column with the key.")]
BytesColumn = Annotated[
    str | None,
    typer.Option(
        "--bytes", metavar="COLUMN", help="With --parquet: a column with sizes, or one whose length is the size."
    ),
]
TimeColumn = Annotated[
    str | None, typer.Option("--timestamp", metavar="COLUMN", help="With --parquet: the column with the time.")
]
PartitionColumn = Annotated[
    str | None, typer.Option("--partition", metavar="COLUMN", help="With --parquet: the column with the partition.")
]

_PARQUET = b"PAR1"
"""How a Parquet file begins."""


def require_spark() -> None:
    """Fail with instructions if PySpark, an optional dependency, is not installed."""
    require("pipeline", "this command")


@contextlib.contextmanager
def spark_session(
    name: str, master: str | None, memory: str | None, *, own_progress: bool = False
) -> Iterator["SparkSession"]:
    """A new session for one command, or the active one. Spark's failures are raised as one-line errors.

    `own_progress`: the command shows its progress itself, so Spark does not.
    """
    require_spark()
    from shardyard.pipeline.jvm.class_archive import ClassArchive
    from shardyard.pipeline.session import SparkSession, session
    from shardyard.pipeline.spark_errors import translate_spark_errors

    active = SparkSession.getActiveSession()
    settings = {"spark.ui.showConsoleProgress": "false"} if own_progress else {}
    archive = ClassArchive()
    with translate_spark_errors():  # also those of stop(), if the JVM is gone
        spark = session(name, master=master, memory=memory, settings=settings, java_options=archive.use_or_make())
        try:
            yield spark
        finally:
            if active is None:
                spark.stop()
                archive.finish()


def parse_counts(option: str, text: str) -> list[int]:
    """Integers of at least 1, separated by commas."""
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        raise InvalidValue(option, text, "integers, separated by commas") from None
    if min(counts) < 1:
        raise InvalidValue(option, text, "integers of at least 1")
    return counts


def parse_names(text: str | None) -> list[str]:
    """Names separated by commas."""
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def parse_assignors(text: str) -> list[str]:
    """Names of assignors, separated by commas."""
    from shardyard.placement.assignors import assignor_named

    names = parse_names(text)
    for name in names:
        assignor_named(name)
    return names


def check_source(log: str | None, topics: list[str] | None, parquet: Path | None) -> None:
    """Fail, before Spark is started, if there is no such topic, file or folder to measure."""
    if (log is None) != (not topics) or (parquet is None) == (log is None):
        raise InvalidCall("expected either --log and --topic, or --parquet")
    if parquet is not None:
        check_parquet(parquet)
    if log is not None:
        partition_counts(log, topics or [])


def check_parquet(path: Path) -> None:
    """Fail, before Spark is started, if this is no Parquet file, nor a folder of such files, nor a Delta table."""
    if not path.exists():
        raise InvalidValue("--parquet", str(path), "a file or folder that exists")
    if (path / "_delta_log").is_dir():
        return
    files = [path] if path.is_file() else (file for file in path.rglob("*") if file.is_file() and _has_rows(file, path))
    first = next(iter(files), None)
    if first is None:
        raise InvalidValue("--parquet", str(path), "a folder with Parquet files")
    with first.open("rb") as opened:
        if opened.read(len(_PARQUET)) != _PARQUET:
            raise InvalidValue("--parquet", str(path), f"Parquet files, and {first.name} is none")


def _has_rows(file: Path, folder: Path) -> bool:
    """Whether Spark takes a file in a folder for a part of the table."""
    return not any(part.startswith(("_", ".")) for part in file.relative_to(folder).parts)


def partition_counts(log: str, topics: list[str]) -> dict[str, int]:
    """The number of partitions of each topic. Raises `UnknownTopic` if one does not exist."""
    require_spark()
    from shardyard.pipeline.blocking import blocking
    from shardyard.pipeline.source.options import absolute

    with blocking(absolute(log)) as opened:
        return {name: opened.wait(opened.log.topic(name)).partitions for name in topics}


def successors(log: str, topics: Iterable[str]) -> dict[str, str]:
    """The topics that were resharded, with the topic that each continues as."""
    from shardyard.pipeline.blocking import blocking
    from shardyard.pipeline.source.options import absolute

    with blocking(absolute(log)) as opened:
        known = {topic.name: topic.successor for topic in opened.wait(opened.log.topics())}
    return {name: successor for name in topics if (successor := known.get(name)) is not None}


def read_loads(
    spark: "SparkSession",
    log: str | None,
    topics: list[str] | None,
    parquet: Path | None,
    key: str,
    size: str | None,
    timestamp: str | None,
    partition: str | None,
    topic_column: str | None = None,
) -> "DataFrame":
    """The load that `balance` and `plan` measure, from topics or Parquet files."""
    from shardyard.pipeline.balance.loads import loads_of_table, loads_of_topic
    from shardyard.pipeline.blocking import blocking
    from shardyard.pipeline.lake.delta import read_table
    from shardyard.pipeline.source.offset_lookup import fixed_range
    from shardyard.pipeline.source.options import absolute

    if parquet is not None:
        table = read_table(spark, parquet)
        return loads_of_table(table, key=key, bytes=size, timestamp=timestamp, partition=partition, topic=topic_column)
    with blocking(absolute(str(log))) as opened:
        # The frame is read more than once, and the topics may grow in between.
        offsets = opened.wait(fixed_range(opened.log, topics or []))
    reader = spark.read.format("shardyard").options(log=str(log), topics=",".join(topics or []), **offsets)
    return loads_of_topic(reader.load())
