"""The driver is killed in the middle of a job: what it leaves is finished by the next one."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.dataset as ds
import pytest
from pyspark.sql import SparkSession

from shardyard.registry import open_registry
from tests.pipeline.driver import JOBS
from tests.pipeline.logs import by_key, contents, create, fill, url

KILLS = int(os.environ.get("KILLS", "1"))
"""Of each driver; `make chaos` has more."""
RECORDS = 8_000 * KILLS
"""So many that each driver leaves some to the next."""
PATIENCE = 120.0
LIMIT = 540 + 60 * KILLS
"""Seconds."""


class Drivers:
    """Drivers of one job in processes of their own, one after the other; what is left of them is ended in the end."""

    def __init__(self, job: str, log: str, folder: Path) -> None:
        self._command = [sys.executable, "-m", "tests.pipeline.driver", job, log, str(folder)]
        self._started: list[subprocess.Popen[str]] = []

    def kill_one(self, after: float) -> None:
        """Kill a driver some time after its first sign of work. Its JVM and their workers live on for a moment, and
        meet the next driver."""
        process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        self._started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() not in ("", "done\n")
        time.sleep(after)
        process.kill()
        assert process.wait(PATIENCE) == -signal.SIGKILL, "it had ended before"

    def await_last_jvm(self) -> None:
        """Wait until the JVM of the last one has noticed, as it has whenever the next driver must start its own."""
        process = self._started[-1]
        until = time.monotonic() + PATIENCE
        with contextlib.suppress(ProcessLookupError):
            while time.monotonic() < until:
                os.killpg(process.pid, 0)
                time.sleep(0.05)
            raise AssertionError("the JVM of a killed driver lives on")

    def end(self) -> None:
        for process in self._started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def crash(job: str, spark: SparkSession, log: str, folder: Path) -> None:
    """Kill it at moments of any kind, then let it finish: here, where a session is there already."""
    chance = random.Random(job)
    drivers = Drivers(job, log, folder)
    try:
        for _ in range(KILLS):
            drivers.kill_one(chance.uniform(0.0, 2.0))
        drivers.await_last_jvm()
        JOBS[job](spark, log, folder)
    finally:
        drivers.end()


@pytest.fixture
def log(tmp_path: Path) -> str:
    made = url(tmp_path)
    create(made, "orders", 5)
    fill(made, "orders", RECORDS, keys=500)
    return made


@pytest.mark.timeout(LIMIT)
def test_a_killed_ingest_leaves_every_record_in_the_lake_once(spark: SparkSession, log: str, tmp_path: Path) -> None:
    crash("ingest", spark, log, tmp_path)
    table = ds.dataset(tmp_path / "lake" / "records", format="parquet", partitioning="hive").to_table()
    assert sorted(int(value) for value in table["value"].to_pylist()) == list(range(RECORDS))


@pytest.mark.timeout(LIMIT)
def test_a_killed_stream_leaves_every_record_in_the_topic_once_in_order(
    spark: SparkSession, log: str, tmp_path: Path
) -> None:
    create(log, "copy", 7)
    crash("write", spark, log, tmp_path)
    assert by_key(contents(log, "copy")) == by_key(contents(log, "orders"))


@pytest.mark.timeout(LIMIT)
def test_a_killed_reshard_leaves_every_record_in_the_new_topic_once_in_order(
    spark: SparkSession, log: str, tmp_path: Path
) -> None:
    open_registry(f"sqlite:///{tmp_path / 'registry.db'}").close()
    crash("reshard", spark, log, tmp_path)
    assert by_key(contents(log, "orders.2")) == by_key(contents(log, "orders"))
