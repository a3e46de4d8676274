"""`Registry.run`: a transaction that the database aborts is run again."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import Connection
from sqlalchemy.exc import OperationalError

from shardyard.model import Busy, Fenced
from shardyard.registry import GroupRow, Registry, Snapshot, Transaction
from shardyard.registry.port import TransactionAborted
from shardyard.registry.sql import SqlRegistry
from shardyard.registry.sqlite import SqliteStore


class AbortingStore(SqliteStore):
    """Aborts the next `aborts` transactions at their commit, as a database does after a serialization failure."""

    aborts = 0

    def __init__(self, path: Path, *, busy_wait: float = 10.0) -> None:
        super().__init__(path, busy_wait=busy_wait)
        self.published: list[set[str]] = []
        """The names that each committed transaction touched."""

    def committed(self, names: set[str]) -> None:
        self.published.append(names)

    @contextmanager
    def begin(self, wait: float, *, guarded: bool = False) -> Iterator[Connection]:
        with super().begin(wait, guarded=guarded) as connection:
            yield connection
            if self.aborts:
                self.aborts -= 1
                raise TransactionAborted("the test database", "serialization failure")


@pytest.fixture
def store(tmp_path: Path) -> AbortingStore:
    return AbortingStore(tmp_path / "registry.db")


@pytest.fixture
def registry(store: AbortingStore) -> Iterator[Registry]:
    with SqlRegistry(store) as registry:
        yield registry


def increment(tx: Transaction, name: str = "billing") -> int:
    row = tx.group(name) or GroupRow(name)
    tx.put_group(replace(row, epoch=row.epoch + 1))
    tx.audit("ann", "increment", name)
    tx.touch(f"group/{name}")
    return row.epoch + 1


def state(registry: Registry) -> tuple[list[GroupRow], int]:
    """The groups, and how many audit entries there are."""
    return registry.read(lambda tx: (tx.groups(), len(tx.audit_log())))


def test_an_aborted_transaction_is_run_again_on_fresh_state_and_only_the_last_run_counts(
    store: AbortingStore, registry: Registry
) -> None:
    runs: list[list[GroupRow]] = []

    def work(tx: Transaction) -> int:
        runs.append(tx.groups())
        tx.touch(f"run/{len(runs)}")
        tx.put_group(GroupRow(f"run {len(runs)}"))
        increment(tx)
        return len(runs)

    store.aborts = 3
    assert registry.run(work) == 4
    assert runs == [[], [], [], []]
    assert state(registry) == ([GroupRow("billing", 1), GroupRow("run 4")], 1)
    assert store.published == [{"run/4", "group/billing"}]


def test_busy_when_every_attempt_is_aborted_until_the_deadline(tmp_path: Path) -> None:
    store = AbortingStore(tmp_path / "registry.db", busy_wait=0.05)
    with SqlRegistry(store) as registry:
        store.aborts = 10**9
        with pytest.raises(Busy, match=r"the test database was busy for 0\.05 s") as busy:
            registry.run(increment)
        assert isinstance(busy.value.__cause__, TransactionAborted)
        store.aborts = 0
        assert state(registry) == ([], 0)


def test_an_aborted_snapshot_is_read_again(registry: Registry) -> None:
    registry.run(increment)
    runs = 0

    def work(snapshot: Snapshot) -> list[GroupRow]:
        nonlocal runs
        runs += 1
        if runs < 3:
            raise TransactionAborted("the test database", "conflict with recovery")
        return snapshot.groups()

    assert registry.read(work) == [GroupRow("billing", 1)]


def test_an_error_of_the_work_is_not_retried(store: AbortingStore, registry: Registry) -> None:
    runs = 0

    def fail(tx: Transaction) -> None:
        nonlocal runs
        runs += 1
        increment(tx)
        raise Fenced("out")

    store.aborts = 3
    with pytest.raises(Fenced):
        registry.run(fail)
    assert runs == 1
    assert state(registry) == ([], 0)


@pytest.mark.parametrize("code", [sqlite3.SQLITE_BUSY, sqlite3.SQLITE_BUSY_SNAPSHOT, sqlite3.SQLITE_LOCKED])
def test_a_lock_that_sqlite_reports_in_the_middle_of_a_transaction_is_retried(registry: Registry, code: int) -> None:
    runs = 0

    def work(tx: Transaction) -> int:
        nonlocal runs
        runs += 1
        increment(tx)
        if runs == 1:
            cause = sqlite3.OperationalError("database is locked")
            cause.sqlite_errorcode = code
            raise OperationalError("COMMIT", {}, cause)
        return runs

    assert registry.run(work) == 2
    assert state(registry) == ([GroupRow("billing", 1)], 1)
