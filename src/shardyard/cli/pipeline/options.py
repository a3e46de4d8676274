"""What the commands of the pipeline have in common: options, the session, and where loads come from."""

import contextlib
import importlib.util
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardyard.model import InvalidCall, InvalidValue

if TYPE_CHECKING:
    from shardyard.pipeline.session import DataFrame, SparkSession

LogUrl = Annotated[str, typer.Option("--log", help="The log, such as sqlite:///data/log.", show_default=False)]
MaybeLogUrl = Annotated[str | None, typer.Option("--log", help="The log, such as sqlite:///data/log.")]
Master = Annotated[
    str | None, typer.Option("--master", help="Where Spark runs, such as spark://host:7077. Default: local[*].")
]
Memory = Annotated[str | None, typer.Option("--memory", help="Of Spark's driver, such as 4g. Default: 2g.")]
Topics = Annotated[list[str] | None, typer.Option("--topic", help="A topic of the log; may be given several times.")]
Parquet = Annotated[Path | None, typer.Option("--parquet", help="Parquet files instead of a topic: a file or folder.")]
KeyColumn = Annotated[str, typer.Option("--key", help="With --parquet: the column with the key.")]
BytesColumn = Annotated[
    str | None, typer.Option("--bytes", help="With --parquet: a column with sizes, or whose length is the size.")
]
TimeColumn = Annotated[str | None, typer.Option("--timestamp", help="With --parquet: the column with the time.")]
PartitionColumn = Annotated[
    str | None, typer.Option("--partition", help="With --parquet: the column with the partition.")
]


def need_spark() -> None:
    """Complain if PySpark, which is an extra, is not installed."""
    if importlib.util.find_spec("pyspark") is None:
        raise InvalidCall("PySpark is missing: pip install 'shardyard[pipeline]'")


@contextlib.contextmanager
def spark_session(
    name: str, master: str | None, memory: str | None, *, own_bar: bool = False
) -> Iterator["SparkSession"]:
    """A session for one command, or the one that is running. Failures come out in one line. `own_bar`: the command
    draws its progress itself."""
    need_spark()
    from shardyard.pipeline.session import SparkSession, session  # noqa: PLC0415 Spark is slow to import
    from shardyard.pipeline.spark_errors import translate_spark_errors as told_plainly  # noqa: PLC0415

    running = SparkSession.getActiveSession()
    settings = {"spark.ui.showConsoleProgress": "false"} if own_bar else {}
    spark = session(name, master=master, memory=memory, settings=settings)
    try:
        with told_plainly():
            yield spark
    finally:
        if running is None:
            spark.stop()


def numbers(name: str, text: str) -> list[int]:
    """Whole numbers separated by commas, each at least 1."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        raise InvalidValue(name, text, "whole numbers, separated by commas") from None
    if min(found) < 1:
        raise InvalidValue(name, text, "whole numbers of at least 1")
    return found


def names(text: str | None) -> list[str]:
    """Words separated by commas."""
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def check_source(log: str | None, topics: list[str] | None, parquet: Path | None) -> None:
    """Complain, before Spark is started, of what can't be read; also of topics that there are not."""
    if (log is None) != (not topics) or (parquet is None) == (log is None):
        raise InvalidCall("expected either --log and --topic, or --parquet")
    if parquet is not None and not parquet.exists():
        raise InvalidValue("--parquet", str(parquet), "a file or folder that exists")
    if log is not None:
        partition_counts(log, topics or [])


def partition_counts(log: str, topics: list[str]) -> dict[str, int]:
    """How many partitions each topic has; `UnknownTopic` if one does not exist."""
    need_spark()
    from shardyard.pipeline.blocking import blocking  # noqa: PLC0415 as above
    from shardyard.pipeline.source.options import absolute  # noqa: PLC0415

    with blocking(absolute(log)) as opened:
        return {name: opened.wait(opened.log.topic(name)).partitions for name in topics}


def successors(log: str, topics: Iterable[str]) -> dict[str, str]:
    """Those of the topics that have moved, and where they go on."""
    from shardyard.pipeline.blocking import blocking  # noqa: PLC0415 as above
    from shardyard.pipeline.source.options import absolute  # noqa: PLC0415

    with blocking(absolute(log)) as opened:
        there = {topic.name: topic.successor for topic in opened.wait(opened.log.topics())}
    return {name: successor for name in topics if (successor := there.get(name)) is not None}


def loads(
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
    """What `balance` and `plan` look at."""
    from shardyard.pipeline.balance.loads import loads_of_table, loads_of_topic  # noqa: PLC0415 as above
    from shardyard.pipeline.blocking import blocking  # noqa: PLC0415
    from shardyard.pipeline.source.offset_lookup import fixed_range  # noqa: PLC0415
    from shardyard.pipeline.source.options import absolute  # noqa: PLC0415

    if parquet is not None:
        table = spark.read.parquet(str(parquet))
        return loads_of_table(table, key=key, bytes=size, timestamp=timestamp, partition=partition, topic=topic_column)
    with blocking(absolute(str(log))) as opened:
        fixed = opened.wait(fixed_range(opened.log, topics or []))  # it is read more than once, and may grow meanwhile
    reader = spark.read.format("shardyard").options(log=str(log), topics=",".join(topics or []), **fixed)
    return loads_of_topic(reader.load())
