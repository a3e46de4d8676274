"""Who gets an announcement: frames of names."""

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 as everybody calls it

from shardyard.fanout.routing import Snapshot
from shardyard.model import InvalidValue
from shardyard.pipeline.fanout.runs import Audience
from shardyard.wire.channels import FANOUT_PARTITIONS, MAX_CHANNEL_LENGTH
from shardyard.wire.inbox import MAX_USER_LENGTH

NAMES = "name string"
_COLUMNS = {"channels": "channel", "users": "user"}
_LENGTHS = {"channels": MAX_CHANNEL_LENGTH, "users": MAX_USER_LENGTH}
_HASH_BYTES = 2**20
USER_SLICES = 16
"""Tasks that list all users."""


def names_in_file(spark: SparkSession, path: Path, audience: Audience) -> DataFrame:
    """The names in a text file, one in each line, or in the column `channel` or `user` of Parquet files; each once."""
    if not path.exists():
        raise InvalidValue(f"--{audience}", str(path), "a file that exists")
    column = _COLUMNS[audience]
    if path.is_dir() or path.suffix == ".parquet":
        table = spark.read.parquet(str(path))
        if column not in table.columns:
            raise InvalidValue(f"columns of {path}", ", ".join(table.columns), f"a column {column!r}")
        return table.select(F.col(column).cast("string").alias("name")).distinct()
    return spark.read.text(str(path)).select(F.col("value").alias("name")).where(F.col("name") != "").distinct()


def all_names(spark: SparkSession, routing: Path, audience: Audience) -> DataFrame:
    """All channels with members, or all users who are members of one or online, as a routing snapshot has them."""
    folder = str(routing)
    Snapshot.open(folder)  # raises here and not in a task

    def channels(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        snapshot = Snapshot.open(folder)
        for batch in batches:
            for p in batch["id"].to_pylist():
                yield _batch(snapshot.partition(p).channels.names)

    def users(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        names = Snapshot.open(folder).users.names.names
        for batch in batches:
            for n in batch["id"].to_pylist():
                first, end = (len(names) * i // USER_SLICES for i in (n, n + 1))
                yield _batch(names.slice(first, end - first))

    if audience == "channels":
        return spark.range(FANOUT_PARTITIONS).mapInArrow(channels, NAMES)
    return spark.range(USER_SLICES).mapInArrow(users, NAMES)


def _batch(names: pa.Array) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([names.cast(pa.string())], ["name"])


def check_names(names: DataFrame, audience: Audience) -> int:
    """How many names there are. Raises `InvalidValue` for one that no channel or user can have."""
    most = _LENGTHS[audience]
    wrong = F.col("name").isNull() | ~F.length("name").between(1, most) | F.contains("name", F.lit("\0"))
    row = names.agg(
        F.count("*").alias("names"), F.count_if(wrong).alias("wrong"), F.any_value(F.when(wrong, F.col("name")), True)
    ).collect()[0]
    if row["wrong"]:
        raise InvalidValue(_COLUMNS[audience], row[2], f"a name of 1 to {most} characters without NUL")
    return int(row["names"])


def digest(paths: Iterable[Path]) -> str:
    """Of the content of files and folders."""
    found = hashlib.sha256()
    for path in paths:
        for file in sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]:
            with file.open("rb") as opened:
                while chunk := opened.read(_HASH_BYTES):
                    found.update(chunk)
    return found.hexdigest()
