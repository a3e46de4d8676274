"""A driver is killed in the middle of a job, and the next one finishes its work."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from shardyard.registry import open_registry
from tests.pipeline.driver import JOBS
from tests.pipeline.lakes import numbers, require_delta
from tests.pipeline.logs import by_key, contents, create, fill, url

KILLS = int(os.environ.get("KILLS", "1"))
"""How many drivers are killed; `make chaos` sets more."""
RECORDS = 8_000 * KILLS
"""Enough that each killed driver leaves some to the next."""
TIMEOUT_SECONDS = 120.0
TEST_TIMEOUT_SECONDS = 540 + 60 * KILLS


class Drivers:
    """Drivers of one job, one after the other, each in a process of its own."""

    def __init__(self, job: str, log: str, folder: Path) -> None:
        self._command = [sys.executable, "-m", "tests.pipeline.driver", job, log, str(folder)]
        self._started: list[subprocess.Popen[str]] = []

    def start(self) -> Iterator[str]:
        """Start a driver. Returns the lines that it prints."""
        process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        self._started.append(process)
        assert process.stdout is not None
        return iter(process.stdout)

    def kill(self) -> None:
        """Kill the driver that was started last.

        Its JVM and the Python workers live on for a moment, at the same time as the next driver.
        """
        process = self._started[-1]
        process.kill()
        assert process.wait(TIMEOUT_SECONDS) == -signal.SIGKILL, "it had already ended"

    def await_last_jvm(self) -> None:
        """Wait until the JVM of the last driver has ended: this process already has one, so it would start too soon."""
        process = self._started[-1]
        deadline = time.monotonic() + TIMEOUT_SECONDS
        with contextlib.suppress(ProcessLookupError):
            while time.monotonic() < deadline:
                os.killpg(process.pid, 0)
                time.sleep(0.05)
            raise AssertionError("the JVM of a killed driver is still running")

    def kill_all(self) -> None:
        for process in self._started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def crash(job: str, spark: SparkSession, log: str, folder: Path) -> None:
    """Kill drivers at random moments, then finish the job in this process, which has a session already."""
    rng = random.Random(job)
    drivers = Drivers(job, log, folder)
    try:
        for _ in range(KILLS):
            assert next(drivers.start()) != "done\n"
            time.sleep(rng.uniform(0.0, 2.0))
            drivers.kill()
        drivers.await_last_jvm()
        JOBS[job](spark, log, folder)
    finally:
        drivers.kill_all()


@pytest.fixture
def log(tmp_path: Path) -> str:
    log = url(tmp_path)
    create(log, "orders", 5)
    fill(log, "orders", RECORDS, keys=500)
    return log


@pytest.mark.timeout(TEST_TIMEOUT_SECONDS)
@pytest.mark.parametrize("job", ["ingest", "ingest_parquet"])
def test_a_killed_ingest_leaves_every_record_in_the_lake_once(
    spark: SparkSession, log: str, tmp_path: Path, job: str
) -> None:
    if job == "ingest":
        require_delta(spark)
    crash(job, spark, log, tmp_path)
    assert numbers(tmp_path / "lake") == list(range(RECORDS))


@pytest.mark.timeout(TEST_TIMEOUT_SECONDS)
def test_a_killed_stream_leaves_every_record_in_the_topic_once_in_order(
    spark: SparkSession, log: str, tmp_path: Path
) -> None:
    create(log, "copy", 7)
    crash("write", spark, log, tmp_path)
    assert by_key(contents(log, "copy")) == by_key(contents(log, "orders"))


@pytest.mark.timeout(TEST_TIMEOUT_SECONDS)
def test_a_killed_reshard_leaves_every_record_in_the_new_topic_once_in_order(
    spark: SparkSession, log: str, tmp_path: Path
) -> None:
    open_registry(f"sqlite:///{tmp_path / 'registry.db'}").close()
    crash("reshard", spark, log, tmp_path)
    assert by_key(contents(log, "orders.2")) == by_key(contents(log, "orders"))
