"""Transactions and snapshots as blocks: in a test they read better than functions. They are single attempts."""

import threading
from contextlib import AbstractContextManager

from shardyard.registry import Registry, Snapshot, Transaction


def transaction(registry: Registry) -> AbstractContextManager[Transaction]:
    return registry._transaction(registry.busy_wait)


def snapshot(registry: Registry) -> AbstractContextManager[Snapshot]:
    return registry._snapshot()


def wait_until_listening(registry: Registry) -> None:
    """A registry in PostgreSQL calls all watches when it has connected, so one of its own shows that it has."""
    listening = threading.Event()
    end = registry.watch("listening", listening.set)
    assert listening.wait(30.0)
    end()
