"""The driver is killed in the middle of a job, several times: what it leaves is finished by the next one."""

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

from shardyard.registry import open_registry
from tests.pipeline.logs import by_key, contents, create, fill, url

RECORDS = 8_000
KILLS = int(os.environ.get("KILLS", "1"))
"""Of each driver; `make chaos` has more."""
PATIENCE = 120.0


class Drivers:
    """Drivers of one job, one after the other; what is left of them is ended in the end."""

    def __init__(self, job: str, log: str, folder: Path) -> None:
        self._command = [sys.executable, "-m", "tests.pipeline.driver", job, log, str(folder)]
        self._started: list[subprocess.Popen[str]] = []

    def start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        self._started.append(process)
        return process

    def kill_one(self, after: float) -> None:
        """Kill a driver some time after its first sign of work. Its JVM and their workers live on for a moment, and
        meet the next driver."""
        process = self.start()
        assert process.stdout is not None
        assert process.stdout.readline() not in ("", "done\n")
        time.sleep(after)
        process.kill()

    def finish(self) -> None:
        process = self.start()
        out, _ = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0
        assert out.endswith("done\n")

    def end(self) -> None:
        for process in self._started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def crash(job: str, log: str, folder: Path) -> None:
    """Kill it at moments of any kind, then let it finish."""
    chance = random.Random(job)
    drivers = Drivers(job, log, folder)
    try:
        for _ in range(KILLS):
            drivers.kill_one(chance.uniform(0.0, 2.0))
        drivers.finish()
    finally:
        drivers.end()


@pytest.fixture
def log(tmp_path: Path) -> str:
    made = url(tmp_path)
    create(made, "orders", 5)
    fill(made, "orders", RECORDS, keys=500)
    return made


@pytest.mark.timeout(600)
def test_a_killed_ingest_leaves_every_record_in_the_lake_once(log: str, tmp_path: Path) -> None:
    crash("ingest", log, tmp_path)
    table = ds.dataset(tmp_path / "lake" / "records", format="parquet", partitioning="hive").to_table()
    assert sorted(int(value) for value in table["value"].to_pylist()) == list(range(RECORDS))


@pytest.mark.timeout(600)
def test_a_killed_stream_leaves_every_record_in_the_topic_once_in_order(log: str, tmp_path: Path) -> None:
    create(log, "copy", 7)
    crash("write", log, tmp_path)
    assert by_key(contents(log, "copy")) == by_key(contents(log, "orders"))


@pytest.mark.timeout(600)
def test_a_killed_reshard_leaves_every_record_in_the_new_topic_once_in_order(log: str, tmp_path: Path) -> None:
    open_registry(f"sqlite:///{tmp_path / 'registry.db'}").close()
    crash("reshard", log, tmp_path)
    assert by_key(contents(log, "orders.2")) == by_key(contents(log, "orders"))
