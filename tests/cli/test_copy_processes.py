"""`shardyard copy` to PostgreSQL as a process that is killed, or interrupted, in the middle of its work."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from shardyard.groups import GroupConfig, configure
from shardyard.model import Partition, Position
from shardyard.pipeline.blocking import blocking
from shardyard.registry import OwnershipRow, Transaction, open_registry
from tests.pipeline.logs import contents, create, fill, url

RECORDS = 120_000
PARTITIONS = 4
TRIMMED = 1_000
"""Records that the first partition of the source has lost, so that offsets are others in the copy."""
PATIENCE = 60.0
"""Seconds that a test waits for what must come soon."""

pytestmark = [pytest.mark.server, pytest.mark.processes]


class Copying:
    """A source with a topic and a group, and a database to copy it to."""

    def __init__(self, folder: Path, target: str) -> None:
        self.source, self.target = url(folder), target
        self._registry = f"sqlite:///{folder / 'registry.db'}"
        self._database = psycopg.connect(target, autocommit=True)
        self._fill()
        self._command = [sys.executable, "-m", "shardyard.cli", "copy", "--from", self.source, "--to", target, "--json"]

    def _fill(self) -> None:
        epoch = create(self.source, "orders", PARTITIONS).epoch
        fill(self.source, "orders", RECORDS, batch=20_000)
        with blocking(self.source) as opened:
            opened.wait(opened.log.trim(Partition("orders", 0), TRIMMED))

        def commit(tx: Transaction) -> None:
            configure(tx, "billing", GroupConfig(), who="ann")
            at = [Position(epoch, TRIMMED + 500 * index) for index in range(PARTITIONS)]
            rows = [OwnershipRow("billing", Partition("orders", i), committed=place) for i, place in enumerate(at)]
            tx.put_ownerships(rows)

        with open_registry(self._registry) as registry:
            registry.run(commit)

    def close(self) -> None:
        self._database.close()

    def start(self) -> "subprocess.Popen[str]":
        return subprocess.Popen(self._command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def finish(self) -> int:
        """Run it to its end. Returns how many records were copied."""
        run = subprocess.run(self._command, capture_output=True, text=True, check=False, timeout=PATIENCE)
        assert run.returncode == 0, run.stderr
        (topic,) = json.loads(run.stdout)["topics"]
        assert (topic["records"], topic["remaining"]) == (RECORDS - TRIMMED, 0)
        copied: int = topic["copied"]
        return copied

    def copied(self) -> int:
        """How many records the target holds."""
        if self._one("SELECT to_regclass('shardyard.log_partitions') IS NULL"):
            return 0
        return self._one('SELECT coalesce(sum("end"), 0)::int FROM shardyard.log_partitions')

    def await_progress(self, process: "subprocess.Popen[str]", records: int) -> None:
        """Wait until the process has copied so many more records."""
        before, deadline = self.copied(), time.monotonic() + PATIENCE
        while self.copied() < before + records:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def await_disconnection(self) -> None:
        """Wait until the server has noticed that the process is gone, and carried out what it had sent."""
        deadline = time.monotonic() + PATIENCE
        while self._one(
            "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'shardyard%'"
            " AND datname = current_database()"
        ):
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def _one(self, statement: str) -> int:
        row = self._database.execute(statement.encode()).fetchone()
        assert row is not None
        value: int = row[0]
        return value

    def check(self) -> None:
        """Every record is there once and in order, and the group is where it was."""
        assert contents(self.target, "orders") == contents(self.source, "orders")
        with open_registry(self.target) as registry:
            rows = registry.read(lambda tx: list(tx.ownerships("billing")))
        committed = {row.partition.index: row.committed.offset for row in rows if row.committed is not None}
        assert committed == {0: 0, 1: TRIMMED + 500, 2: TRIMMED + 1000, 3: TRIMMED + 1500}


@pytest.fixture
def copying(tmp_path: Path, postgresql_url: str) -> Iterator[Copying]:
    copying = Copying(tmp_path, postgresql_url)
    yield copying
    copying.close()


def test_a_copy_that_was_killed_continues_where_it_was(copying: Copying) -> None:
    for records in (1, RECORDS // 4):
        with copying.start() as process:
            copying.await_progress(process, records)
            process.kill()
        assert process.returncode == -signal.SIGKILL
        copying.await_disconnection()
        assert 0 < copying.copied() < RECORDS - TRIMMED, "it was not killed in the middle"
    there = copying.copied()
    assert copying.finish() == RECORDS - TRIMMED - there
    copying.check()


def test_a_copy_that_is_interrupted_says_in_one_line_that_it_can_be_continued(copying: Copying) -> None:
    with copying.start() as process:
        copying.await_progress(process, 1)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out) == (130, "")
    assert err == "interrupted: the same command continues where it was\n"
    there = copying.copied()
    assert 0 < there < RECORDS - TRIMMED
    assert copying.finish() == RECORDS - TRIMMED - there
    copying.check()
