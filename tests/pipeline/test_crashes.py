"""The driver is killed in the middle of a job, several times: what it leaves is finished by the next one."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow.dataset as ds
import pytest

from tests.pipeline.logs import by_key, contents, create, fill, url

RECORDS = 16_000
KILLS = int(os.environ.get("KILLS", "1"))
"""Of each driver; `make chaos` has more."""
PATIENCE = 120.0


@contextlib.contextmanager
def driver(job: str, log: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A driver at work; what is left of it is ended in the end."""
    command = [sys.executable, "-m", "tests.pipeline.driver", job, log, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def killed(job: str, log: str, folder: Path, after: float) -> bool:
    """Kill a driver some time after its first sign of work; whether it was still at work then."""
    with driver(job, log, folder) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        time.sleep(after)
        process.kill()  # the driver alone: its JVM and their workers live on for a moment
        return first != "done\n" and "done\n" not in process.stdout.readlines()


def finished(job: str, log: str, folder: Path) -> None:
    with driver(job, log, folder) as process:
        out, _ = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0
        assert out.endswith("done\n")


def crash(job: str, log: str, folder: Path) -> None:
    """Kill it a few times at moments of any kind, then let it finish."""
    chance = random.Random(job)
    assert killed(job, log, folder, chance.uniform(0.0, 0.5))
    for _ in range(KILLS - 1):
        killed(job, log, folder, chance.uniform(0.0, 3.0))
    finished(job, log, folder)


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
    crash("reshard", log, tmp_path)
    assert by_key(contents(log, "orders.2")) == by_key(contents(log, "orders"))
