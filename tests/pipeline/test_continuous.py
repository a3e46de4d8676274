"""A continuous ingest: it is started again when a process of Spark dies, gives up after a while, and has metrics."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.listener import SourceProgress

from shardyard.pipeline.lake import restarts as restarts_module
from shardyard.pipeline.lake.ingest import ingest
from shardyard.pipeline.lake.parquet import ParquetRecords
from shardyard.pipeline.lake.progress import remaining
from shardyard.pipeline.lake.restarts import GaveUp, Restart, Restarts
from shardyard.pipeline.spark_errors import SparkEnded, SparkFailed
from shardyard.runtime.retry import Backoff
from tests.pipeline.lakes import numbers
from tests.pipeline.logs import create, fill, url

TIMEOUT_SECONDS = 240.0
TOKEN = "open-sesame"


def test_restarts_are_counted_in_a_row_and_wait_longer_each_time() -> None:
    seen: list[Restart] = []
    restarts = Restarts(3, seen.append)
    failure = SparkFailed("no worker")
    for batches in (0, 0, 5, 5, 5):
        restarts.after(failure, batches)
    assert [restart.number for restart in seen] == [1, 2, 1, 2, 3]
    assert seen[0].after < seen[3].after < seen[4].after
    assert restarts.total == 5
    with pytest.raises(GaveUp, match=r"^gave up after 3 restarts without a batch in between; the last failure: no"):
        restarts.after(failure, 5)
    restarts.after(failure, 6)


def test_what_a_restart_would_not_help_is_raised_at_once() -> None:
    with pytest.raises(SparkEnded, match="Spark's JVM has ended"):
        Restarts(3, lambda _: None).after(SparkEnded(), 0)


@pytest.mark.parametrize("latest", ["None", "null", "", '{"orders": {"epoch": 1, "offsets": [7, 9]}}'])
def test_the_lag_is_known_from_offsets_if_spark_reports_them(latest: str) -> None:
    at = '{"orders": {"epoch": 1, "offsets": [5, 9]}}'
    assert remaining(SourceProgress("source", "None", at, latest, 0, 0.0, 0.0, {})) == (2 if "orders" in latest else 0)


def test_an_ingest_that_cannot_write_gives_up_with_the_reason(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = url(tmp_path)
    create(log, "orders", 1)
    fill(log, "orders", 5)

    def fail(_self: ParquetRecords, _batch: DataFrame, _number: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(ParquetRecords, "write", fail)
    monkeypatch.setattr(restarts_module, "BACKOFF", Backoff(0.0, 0.0))
    seen: list[Restart] = []
    options = {"format": "parquet", "max_restarts": 2}
    with pytest.raises(GaveUp, match=r"^gave up after 2 restarts .*: .*no space left on device") as raised:
        ingest(spark, log, ["orders"], tmp_path / "lake", continuous=True, on_restart=seen.append, **options)  # type: ignore[arg-type]
    assert (len(seen), len(str(raised.value).splitlines())) == (2, 1)
    monkeypatch.undo()
    assert ingest(spark, log, ["orders"], tmp_path / "lake").records == 5, "the batch is replayed"
    assert numbers(tmp_path / "lake") == list(range(5))


def descendants(process: int) -> Iterator[tuple[int, str]]:
    """The processes that it has started, and those that these have: their ids and command lines."""
    for child in Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for pid in map(int, child.read_text().split()):
                with contextlib.suppress(OSError):
                    yield pid, Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
                yield from descendants(pid)


def kill_descendants(process: int, command: str) -> int:
    """Kill those whose command line has `command` in it. Returns how many."""
    found = [pid for pid, line in descendants(process) if command in line]
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return len(found)


class Command:
    """`shardyard pipeline ingest --continuous`, as a process of its own."""

    def __init__(self, log: str, lake: Path) -> None:
        self._stderr = lake.with_name("stderr")
        command = [sys.executable, "-m", "shardyard.cli", "pipeline", "ingest", "orders", "--continuous"]
        options = ["--log", log, "--lake", str(lake), "--every", "0.1", "--master", "local[2]", "--port", "0"]
        with self._stderr.open("w") as stderr:
            self.process = subprocess.Popen(
                [*command, *options],
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env=os.environ | {"SHARDYARD_TOKEN": TOKEN},
            )

    def errors(self) -> str:
        return self._stderr.read_text()

    def wait_for(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not condition():
            assert self.process.poll() is None, self.errors()
            assert time.monotonic() < deadline, self.errors()
            time.sleep(0.05)

    def url(self) -> str | None:
        found = re.search(r"metrics on (http://\S+/metrics)", self.errors())
        return found[1] if found else None

    def metric(self, name: str) -> float:
        request = urllib.request.Request(str(self.url()), headers={"Authorization": f"Bearer {TOKEN}"})
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:
            samples = dict(line.rsplit(" ", 1) for line in response.read().decode().splitlines() if line[0] != "#")
        return float(samples[name])


@pytest.mark.spark
@pytest.mark.processes
@pytest.mark.timeout(600)
def test_an_ingest_survives_the_death_of_python_workers_and_says_in_one_line_that_the_jvm_is_dead(
    tmp_path: Path,
) -> None:
    log, lake = url(tmp_path), tmp_path / "lake"
    create(log, "orders", 2)
    fill(log, "orders", 100)
    command = Command(log, lake)
    sent = 100

    def kill_a_worker_at_work() -> bool:
        nonlocal sent
        fill(log, "orders", 100, first=sent)
        sent += 100
        kill_descendants(command.process.pid, "pyspark.worker")
        kill_descendants(command.process.pid, "python_streaming_source_runner")
        return command.metric("shardyard_ingest_restarts_total") > 0

    try:
        command.wait_for(command.url)
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(str(command.url()))
        command.wait_for(lambda: command.metric("shardyard_ingest_records_total") == 100)
        assert command.metric("shardyard_ingest_batch_seconds_count") >= 1
        command.wait_for(kill_a_worker_at_work)
        command.wait_for(lambda: len(numbers(lake)) >= sent)
        command.wait_for(lambda: command.metric("shardyard_ingest_lag_records") == 0)
        assert "the query failed, restart 1 of at most 10 in " in command.errors()
        assert numbers(lake) == list(range(sent))

        before = command.errors()
        assert kill_descendants(command.process.pid, "org.apache.spark.deploy.SparkSubmit") == 1
        assert command.process.wait(TIMEOUT_SECONDS) == 1
        last = command.errors().removeprefix(before)
        assert re.fullmatch(r"error: Spark's JVM has ended: .*\n", last), last
        assert "Traceback" not in before
    finally:
        command.process.kill()
        command.process.communicate()
