"""A driver process that tests kill: `python -m tests.pipeline.driver ingest|write|reshard|hold_seal LOG FOLDER`.

Prints a line when a batch or round has started, and "done" at the end.
"""

import sys
import threading
from pathlib import Path
from unittest.mock import patch

from pyspark.sql import SparkSession

from shardyard.pipeline.lake.ingest import Progress, ingest
from shardyard.pipeline.reshard import reshard as resharding
from shardyard.pipeline.reshard.reshard import reshard
from shardyard.pipeline.session import session

BATCH = 2000


def print_now(text: object) -> None:
    print(text, flush=True)


def run_ingest(spark: SparkSession, log: str, folder: Path) -> None:
    def show(progress: Progress) -> None:
        print_now(f"{progress.records} records, {progress.left} left")

    ingest(spark, log, ["orders"], folder / "lake", records_per_batch=BATCH, on_progress=show)


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
    with patch.multiple(resharding, SWITCH_BELOW=0, RECORDS_PER_TASK=BATCH):
        reshard(spark, log, "orders", partitions=7, registry=f"sqlite:///{folder / 'registry.db'}", on_step=print_now)


def run_hold_seal(spark: SparkSession, log: str, folder: Path) -> None:
    """A reshard that prints "sealed" when everything is copied and the topic is sealed, and then does not go on."""

    def hold(_: object) -> None:
        print_now("sealed")
        threading.Event().wait()

    with patch.object(resharding._Reshard, "_translate_positions", hold):
        run_reshard(spark, log, folder)


JOBS = {"ingest": run_ingest, "write": run_write, "reshard": run_reshard, "hold_seal": run_hold_seal}

if __name__ == "__main__":
    job, log, folder = sys.argv[1:]
    JOBS[job](session("driver", master="local[2]", memory="1g"), log, Path(folder))
    print_now("done")
