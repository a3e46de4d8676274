"""Reads lakes without Spark, as other programs do."""

import os
from pathlib import Path
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.dataset as ds
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from shardyard.pipeline.delta_jars import MissingDelta, has_delta
from shardyard.pipeline.lake.delta import is_delta_table


def require_delta(spark: SparkSession) -> None:
    """Skip the test if Delta Lake is missing, except in CI."""
    if not has_delta(spark):
        if os.environ.get("CI") == "true":
            pytest.fail(str(MissingDelta()))
        pytest.skip(str(MissingDelta()))


def table(lake: Path) -> pa.Table:
    """All rows of the lake: read by `deltalake`, or if it has plain files by pyarrow."""
    records = lake / "records"
    if is_delta_table(records):
        return DeltaTable(records).to_pyarrow_table()
    return ds.dataset(records, format="parquet", partitioning="hive").to_table()


def numbers(lake: Path, topic: str = "orders") -> list[int]:
    """The values in the lake, in order, queried with DuckDB."""
    import duckdb  # noqa: PLC0415 what is loaded before the tests start is never freed, which it complains about

    rows = table(lake)
    query = "SELECT CAST(decode(value) AS BIGINT) FROM rows WHERE topic = ? ORDER BY ALL"
    with duckdb.connect() as connection:
        connection.register("rows", rows)
        return [row[0] for row in connection.execute(query, [topic]).fetchall()]


def files(lake: Path) -> list[Path]:
    """The files that have the rows of the lake."""
    records = lake / "records"
    if is_delta_table(records):
        return sorted(Path(unquote(uri.removeprefix("file://"))) for uri in DeltaTable(records).file_uris())
    return sorted(records.rglob("*.parquet"))
