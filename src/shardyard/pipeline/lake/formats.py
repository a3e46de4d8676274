"""The format of a lake: which one it has or gets, and what reads and writes its rows."""

import os

from pyspark.sql import SparkSession

from shardyard.model import InvalidValue
from shardyard.pipeline.delta_jars import MissingDelta, has_delta
from shardyard.pipeline.lake.delta import DeltaRecords
from shardyard.pipeline.lake.lake import FORMATS, Lake, Records
from shardyard.pipeline.lake.parquet import ParquetRecords


def check_format(lake: Lake, wanted: str | None) -> None:
    """Raise an error if the lake cannot have this format. A lake of plain files can become a Delta table, but not the
    other way round."""
    if wanted is not None and wanted not in FORMATS:
        raise InvalidValue("format", wanted, " or ".join(FORMATS))
    if wanted == "parquet" and lake.format == "delta":
        raise InvalidValue("format", wanted, f"delta, which the lake {lake.root} has already")


def choose_format(spark: SparkSession, lake: Lake, wanted: str | None) -> str:
    """The format that an ingest into the lake uses: the wanted one, or by default its own, or for a new lake delta if
    Spark has it."""
    check_format(lake, wanted)
    chosen = wanted or lake.format or ("delta" if has_delta(spark) else "parquet")
    if chosen == "delta" and not has_delta(spark):
        raise MissingDelta
    return chosen


def records_of(lake: Lake, tasks: int | None = None) -> Records:
    """What reads and writes the rows of an existing lake. `tasks`: how many write a batch; default: one per core."""
    tasks = tasks or os.cpu_count() or 1
    return DeltaRecords(lake, tasks) if lake.format == "delta" else ParquetRecords(lake, tasks)
