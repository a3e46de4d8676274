"""Transactions and snapshots as blocks: in a test they read better than functions. They are single attempts."""

from contextlib import AbstractContextManager

from shardyard.registry import Registry, Snapshot, Transaction


def transaction(registry: Registry) -> AbstractContextManager[Transaction]:
    return registry._transaction(registry.busy_wait)


def snapshot(registry: Registry) -> AbstractContextManager[Snapshot]:
    return registry._snapshot()
