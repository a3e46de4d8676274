"""A driver process that tests kill: `python -m tests.pipeline.driver JOB LOG FOLDER`.

Prints a line when a batch or round has started, and "done" at the end.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import patch

from pyspark.sql import SparkSession

from shardyard.pipeline.lake.ingest import ingest
from shardyard.pipeline.lake.progress import Progress
from shardyard.pipeline.reshard import copying, spark_rounds
from shardyard.pipeline.reshard.reshard import reshard
from shardyard.pipeline.session import session

BATCH = 2000


def print_now(text: object) -> None:
    print(text, flush=True)


def run_ingest(spark: SparkSession, log: str, folder: Path, format: str = "delta") -> None:  # noqa: A002 as in ingest
    def show(progress: Progress) -> None:
        print_now(f"{progress.records} records, {progress.left} left")

    ingest(spark, log, ["orders"], folder / "lake", format=format, records_per_batch=BATCH, on_progress=show)


def run_write(spark: SparkSession, log: str, folder: Path) -> None:
    """Copy `orders` to `copy` with a stream."""
    stream = spark.readStream.format("shardyard").options(log=log, topics="orders", startingOffsets="earliest")
    writer = stream.option("maxRecordsPerTrigger", BATCH).load().writeStream.format("shardyard")
    writer = writer.options(log=log, topic="copy", checkpointLocation=str(folder / "checkpoint"))
    query = writer.trigger(availableNow=True).start()
    while not query.awaitTermination(0.1):  # type: ignore[arg-type]  # it takes fractions of a second
        if query.lastProgress is not None:
            print_now(query.lastProgress.batchId)


def run_reshard(spark: SparkSession, log: str, folder: Path) -> None:
    with patch.object(copying, "SPARK_ABOVE", 0), patch.object(spark_rounds, "RECORDS_PER_TASK", BATCH):
        reshard(spark, log, "orders", partitions=7, registry=f"sqlite:///{folder / 'registry.db'}", on_step=print_now)


JOBS: dict[str, Callable[[SparkSession, str, Path], None]] = {
    "ingest": run_ingest,
    "ingest_parquet": partial(run_ingest, format="parquet"),
    "write": run_write,
    "reshard": run_reshard,
}

if __name__ == "__main__":
    job, log, folder = sys.argv[1:]
    JOBS[job](session("driver", master="local[2]", memory="1g"), log, Path(folder))
    print_now("done")
