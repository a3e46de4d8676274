"""`TransactionBatcher`: units of work that wait together are one transaction, or one snapshot."""

import asyncio
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardyard.model import Closed, Fenced
from shardyard.registry import GroupRow, Registry, Snapshot, Transaction, TransactionBatcher
from shardyard.registry.batcher import SMALL_TURN, YIELDED_TURNS
from shardyard.registry.memory import MemoryRegistry
from shardyard.registry.port import TransactionAborted
from shardyard.registry.sql import SqlRegistry
from shardyard.registry.sqlite import store
from shardyard.registry.sqlite.store import SqliteStore
from shardyard.runtime.group_commit import AVERAGED_COMMITS, CommitTimes, Interrupted

TIMEOUT_SECONDS = 60.0
"""How long a test waits for what must happen soon."""


class RecordingRegistry(MemoryRegistry):
    """Records which transactions and snapshots were opened, and aborts the next `aborts` transactions at their
    commit."""

    def __init__(self) -> None:
        super().__init__()
        self.opened: list[str] = []
        self.aborts = 0

    @contextmanager
    def _transaction(self, wait: float) -> Iterator[Transaction]:
        self.opened.append("transaction")
        with super()._transaction(wait) as tx:
            yield tx
            if self.aborts:
                self.aborts -= 1
                raise TransactionAborted("the test registry", "serialization failure")

    @contextmanager
    def _snapshot(self) -> Iterator[Snapshot]:
        self.opened.append("snapshot")
        with super()._snapshot() as snapshot:
            yield snapshot


def increment(tx: Transaction) -> int:
    row = tx.group("billing") or GroupRow("billing")
    tx.put_group(replace(row, epoch=row.epoch + 1))
    return row.epoch + 1


def epoch(snapshot: Snapshot) -> int:
    row = snapshot.group("billing")
    return 0 if row is None else row.epoch


def refuse(_snapshot: Snapshot) -> None:
    raise Fenced("no longer the owner")


Calls = Callable[[TransactionBatcher], list[Any]]


def outcomes_together(registry: RecordingRegistry, calls: Calls) -> list[Any]:
    """The outcomes of calls that wait together while an earlier unit is carried out."""
    started, proceed = threading.Event(), threading.Event()

    def block(_snapshot: Snapshot) -> None:
        started.set()
        assert proceed.wait(TIMEOUT_SECONDS)

    async def submit(transactions: TransactionBatcher) -> list[Any]:
        first = asyncio.create_task(transactions.read(block))
        assert await asyncio.to_thread(started.wait, TIMEOUT_SECONDS)
        waiting = asyncio.gather(*calls(transactions), return_exceptions=True)
        await asyncio.sleep(0)  # so that all of them are submitted
        registry.opened.clear()
        proceed.set()
        await first
        return await waiting

    transactions = TransactionBatcher(registry)
    try:
        return asyncio.run(submit(transactions))
    finally:
        proceed.set()
        transactions.close()


def test_units_that_wait_together_are_one_transaction_and_an_error_of_one_does_not_undo_the_others() -> None:
    registry = RecordingRegistry()
    first, refused, read, second = outcomes_together(
        registry,
        lambda batcher: [batcher.run(increment), batcher.run(refuse), batcher.read(epoch), batcher.run(increment)],
    )
    assert (first, read, second) == (1, 1, 2)
    assert isinstance(refused, Fenced)
    assert registry.opened == ["transaction"]
    assert registry.read(epoch) == 2


def test_units_that_only_read_run_on_one_snapshot_without_methods_that_write() -> None:
    registry = RecordingRegistry()
    read, refused, writable = outcomes_together(
        registry,
        lambda batcher: [batcher.read(epoch), batcher.read(refuse), batcher.read(lambda tx: hasattr(tx, "put_group"))],
    )
    assert (read, writable) == (0, False)
    assert isinstance(refused, Fenced)
    assert registry.opened == ["snapshot"]


def test_all_units_are_run_again_when_their_transaction_is_aborted() -> None:
    registry = RecordingRegistry()
    registry.aborts = 2
    runs: list[str] = []

    def named(name: str, work: Callable[[Transaction], Any]) -> Callable[[Transaction], Any]:
        def unit(tx: Transaction) -> Any:
            runs.append(name)
            return work(tx)

        return unit

    first, refused, second = outcomes_together(
        registry,
        lambda batcher: [batcher.run(named("a", increment)), batcher.run(named("b", refuse)), batcher.run(increment)],
    )
    assert (first, second) == (1, 2)
    assert isinstance(refused, Fenced)
    assert runs == ["a", "b"] * 3
    assert registry.opened == ["transaction"] * 3
    assert registry.read(epoch) == 2


def add_all(tx: Transaction, numbers: Sequence[int]) -> list[int | Fenced]:
    """Add up what is above 0, and refuse the rest."""
    row = tx.group("billing") or GroupRow("billing")
    tx.put_group(replace(row, epoch=row.epoch + sum(number for number in numbers if number > 0)))
    return [len(numbers) if number > 0 else Fenced(f"not {number}") for number in numbers]


def test_items_of_bulk_work_that_wait_together_are_passed_to_it_at_once_before_other_units() -> None:
    registry = RecordingRegistry()
    read, first, refused, incremented, second = outcomes_together(
        registry,
        lambda batcher: [
            batcher.read(epoch),
            batcher.run_bulk(add_all, 10),
            batcher.run_bulk(add_all, -1),
            batcher.run(increment),
            batcher.run_bulk(add_all, 20),
        ],
    )
    assert (first, second) == (3, 3), "the work got all three items"
    assert str(refused) == "not -1"
    assert (read, incremented) == (30, 31)
    assert registry.opened == ["transaction"]


def test_bulk_work_that_fails_as_a_whole_fails_for_all_its_items_and_for_nobody_else() -> None:
    registry = RecordingRegistry()

    def fail(_tx: Transaction, _items: Sequence[int]) -> list[int]:
        raise Fenced("nothing works")

    first, other, second, added = outcomes_together(
        registry,
        lambda batcher: [
            batcher.run_bulk(fail, 1),
            batcher.run(increment),
            batcher.run_bulk(fail, 2),
            batcher.run_bulk(add_all, 5),
        ],
    )
    assert str(first) == str(second) == "nothing works"
    assert (other, added) == (6, 1)


def test_bulk_work_is_done_again_when_its_transaction_is_aborted() -> None:
    registry = RecordingRegistry()
    registry.aborts = 2
    outcomes = outcomes_together(registry, lambda batcher: [batcher.run_bulk(add_all, n) for n in (1, 2)])
    assert outcomes == [2, 2]
    assert registry.opened == ["transaction"] * 3
    assert registry.read(epoch) == 3


@contextmanager
def embedded(folder: Path) -> Iterator[tuple[Registry, TransactionBatcher, list[str]]]:
    """A registry in a file, and where its bulk work was done: in the event loop, or in the thread."""
    done_in: list[str] = []

    class Recording(SqlRegistry):
        def _guarded_transaction(self, wait: float) -> AbstractContextManager[Transaction]:
            in_loop = threading.current_thread() is threading.main_thread()
            done_in.append("event loop" if in_loop else "thread")
            return super()._guarded_transaction(wait)

    with Recording(SqliteStore(folder / "registry.db")) as registry:
        transactions = TransactionBatcher(registry)
        try:
            yield registry, transactions, done_in
        finally:
            transactions.close()


def test_bulk_work_of_one_turn_is_one_transaction_in_the_event_loop_of_an_embedded_registry(tmp_path: Path) -> None:
    async def add(transactions: TransactionBatcher) -> list[Any]:
        return await asyncio.gather(*(transactions.run_bulk(add_all, n) for n in (1, -1, 2)), return_exceptions=True)

    with embedded(tmp_path) as (registry, transactions, done_in):
        first, refused, second = asyncio.run(add(transactions))
        assert (first, str(refused), second) == (3, "not -1", 3)
        assert done_in == ["event loop"]
        assert registry.read(epoch) == 3


def test_bulk_work_lets_what_came_with_it_go_first(tmp_path: Path) -> None:
    with embedded(tmp_path) as (_, transactions, done_in):

        async def add() -> None:
            adding = asyncio.create_task(transactions.run_bulk(add_all, 1))
            for _ in range(YIELDED_TURNS):
                await asyncio.sleep(0)
                assert done_in == []
            await adding

        asyncio.run(add())
        assert done_in == ["event loop"]


def test_bulk_work_is_left_to_the_thread_while_transactions_take_long(tmp_path: Path) -> None:
    with embedded(tmp_path) as (registry, transactions, done_in):
        for _ in range(AVERAGED_COMMITS):
            transactions._times.took(1.0)
        assert asyncio.run(transactions.run_bulk(add_all, 1)) == 1
        assert done_in == ["thread"]
        assert registry.read(epoch) == 1
        while done_in[-1] == "thread":  # after a while it tries again whether they still do
            assert asyncio.run(transactions.run_bulk(add_all, 1)) == 1
            assert len(done_in) < 10_000


def test_much_bulk_work_is_left_to_the_thread_and_so_is_what_follows_until_it_is_done(tmp_path: Path) -> None:
    async def add(transactions: TransactionBatcher) -> None:
        much = asyncio.create_task(transactions.run_bulk(add_all, 1, size=SMALL_TURN + 1))
        for _ in range(YIELDED_TURNS + 3):
            await asyncio.sleep(0)
        await transactions.run_bulk(add_all, 2)
        await much
        await transactions.run_bulk(add_all, 4)

    with embedded(tmp_path) as (registry, transactions, done_in):
        asyncio.run(add(transactions))
        assert set(done_in[:-1]) == {"thread"}
        assert done_in[-1] == "event loop"
        assert registry.read(epoch) == 7


def test_bulk_work_that_an_event_loop_has_not_begun_does_not_hold_up_the_next_one(tmp_path: Path) -> None:
    async def add(transactions: TransactionBatcher) -> int:
        async with asyncio.timeout(TIMEOUT_SECONDS):
            return await transactions.run_bulk(add_all, 2)

    with embedded(tmp_path) as (registry, transactions, _):
        loop = asyncio.new_event_loop()
        pending = loop.create_task(transactions.run_bulk(add_all, 1))
        loop.call_soon(loop.stop)
        loop.run_forever()
        assert not pending.done()
        pending._log_destroy_pending = False  # type: ignore[attr-defined]
        loop.close()
        assert asyncio.run(add(transactions)) == 1
        assert registry.read(epoch) == 2


def test_bulk_work_that_is_interrupted_in_the_event_loop_leaves_nobody_waiting(tmp_path: Path) -> None:
    def interrupt(_tx: Transaction, _items: Sequence[int]) -> list[int]:
        raise KeyboardInterrupt

    with embedded(tmp_path) as (registry, transactions, _):
        loop = asyncio.new_event_loop()
        task = loop.create_task(transactions.run_bulk(interrupt, 1))
        with pytest.raises(KeyboardInterrupt):
            loop.run_until_complete(task)
        with pytest.raises(Interrupted):
            loop.run_until_complete(task)
        assert loop.run_until_complete(transactions.run_bulk(add_all, 1)) == 1
        loop.close()
        assert registry.read(epoch) == 1


def test_a_checkpoint_is_left_to_a_transaction_that_may_wait_but_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "CHECKPOINT_TRANSACTIONS", 5)
    monkeypatch.setattr(store, "MOST_TRANSACTIONS", 20)

    async def add(transactions: TransactionBatcher, count: int) -> None:
        for _ in range(count):
            transactions._times = CommitTimes()  # how quick the disk really is does not matter here
            await transactions.run_bulk(add_all, 1)

    with embedded(tmp_path) as (registry, transactions, done_in):
        writing = registry._store._writing  # type: ignore[attr-defined]
        writing._since_checkpoint = 0
        asyncio.run(add(transactions, 7))
        assert writing._since_checkpoint == 7, "it waits for one that may wait"
        registry.run(increment)
        assert writing._since_checkpoint == 0
        asyncio.run(add(transactions, 21))
        assert writing._since_checkpoint == 1, "it waited long enough"
        assert set(done_in) == {"event loop"}
        assert registry.read(epoch) == 29


def test_bulk_work_that_has_to_wait_for_another_process_does_not_hold_up_the_event_loop(tmp_path: Path) -> None:
    async def add(transactions: TransactionBatcher, other: sqlite3.Connection) -> int:
        adding = asyncio.create_task(transactions.run_bulk(add_all, 1))
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert not adding.done()
        other.execute("COMMIT")
        return await adding

    with embedded(tmp_path) as (registry, transactions, done_in):
        with closing(sqlite3.connect(tmp_path / "registry.db", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            assert asyncio.run(add(transactions, other)) == 1
        assert done_in[:2] == ["event loop", "thread"]
        assert registry.read(epoch) == 1


def test_bulk_work_whose_caller_is_gone_is_not_done_and_that_of_a_closed_registry_is_refused(tmp_path: Path) -> None:
    async def add(transactions: TransactionBatcher) -> None:
        gone, stays = (asyncio.create_task(transactions.run_bulk(add_all, n)) for n in (1, 2))
        await asyncio.sleep(0)  # they are submitted
        gone.cancel()
        assert await stays == 1
        transactions.close()
        with pytest.raises(Closed):
            await transactions.run_bulk(add_all, 4)

    with embedded(tmp_path) as (registry, transactions, _):
        asyncio.run(add(transactions))
        registry.close()
    with SqlRegistry(SqliteStore(tmp_path / "registry.db")) as registry:
        assert registry.read(epoch) == 2
