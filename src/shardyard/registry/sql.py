"""The registry in an SQL database. What differs between databases is in their `Store`."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from sqlalchemy import Connection, Update

from shardyard.registry.port import Registry, Snapshot, Transaction
from shardyard.registry.sql_transaction import SqlSnapshot, SqlTransaction, Values


class Store(Protocol):
    """A database, as far as databases differ: transactions, time, errors and the notification of watches.

    It raises the database's own errors as ours, and `TransactionAborted` for those that ask to run the transaction
    again.
    """

    @property
    def busy_wait(self) -> float:
        """See `Registry.busy_wait`."""
        ...

    @property
    def is_embedded(self) -> bool:
        """See `Registry.is_embedded`."""
        ...

    def begin(self, wait: float, *, guarded: bool = False) -> AbstractContextManager[Connection]:
        """A serializable transaction on an up-to-date schema, committed at the end of the block, or rolled back if it
        raised. Wait up to `wait` seconds for transactions of others, then `Busy`. `guarded`: see
        `Registry.run_guarded`."""
        ...

    def begin_reading(self) -> AbstractContextManager[Connection]:
        """A transaction that only reads. It does not wait for writers, and no writer waits for it."""
        ...

    def now(self, connection: Connection) -> float:
        """The time of the transaction on `connection`, on the clock that all users of the database share."""
        ...

    def update_each(self, connection: Connection, statement: Update, rows: Sequence[Values]) -> list[bool]:
        """Run `statement` for each of the rows, which bind its parameters, one after the other. Returns for each
        whether it matched a row.

        This is what members do for every batch, so it is worth the shortest way to the driver: all rows in one round
        trip, and no more work for each than the database needs.
        """
        ...

    def update_all(self, connection: Connection, statement: Update, rows: Sequence[Values]) -> int:
        """The same, faster, if it does not matter which of them matched. Returns how many rows were matched in all."""
        ...

    def record_touched(self, connection: Connection, names: set[str]) -> None:
        """Notify the watches of these names, in every process, if the transaction on `connection` is committed."""
        ...

    def committed(self, names: set[str]) -> None:
        """Called after the commit of a transaction of this process that touched these names."""
        ...

    def watch(self, name: str, callback: Callable[[], None]) -> Callable[[], None]:
        """See `Registry.watch`."""
        ...

    def close(self) -> None:
        """See `Registry.close`."""
        ...


class SqlRegistry(Registry):
    """A registry in the database of `store`, which it closes."""

    def __init__(self, store: Store) -> None:
        self.busy_wait = store.busy_wait
        self.is_embedded = store.is_embedded
        self._store = store

    def _transaction(self, wait: float) -> AbstractContextManager[Transaction]:
        return self._begin(wait, guarded=False)

    def _guarded_transaction(self, wait: float) -> AbstractContextManager[Transaction]:
        return self._begin(wait, guarded=True)

    @contextmanager
    def _begin(self, wait: float, *, guarded: bool) -> Iterator[Transaction]:
        with self._store.begin(wait, guarded=guarded) as connection:
            transaction = SqlTransaction(
                connection, self._store.now(connection), self._store.update_each, self._store.update_all
            )
            try:
                yield transaction
            finally:
                transaction.end()
            if transaction.touched:
                self._store.record_touched(connection, transaction.touched)
        if transaction.touched:
            self._store.committed(transaction.touched)

    @contextmanager
    def _snapshot(self) -> Iterator[Snapshot]:
        with self._store.begin_reading() as connection:
            snapshot = SqlSnapshot(connection, self._store.now(connection))
            try:
                yield snapshot
            finally:
                snapshot.end()

    def watch(self, name: str, callback: Callable[[], None]) -> Callable[[], None]:
        return self._store.watch(name, callback)

    def close(self) -> None:
        self._store.close()
