"""The engines of log and registry that the suites of the queues run on: one place to add another one."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shardyard.log import Log
from shardyard.log.memory import MemoryLog
from shardyard.log.sqlite import SqliteLog
from shardyard.registry import Registry, open_registry
from shardyard.runtime.clock import Clock, SystemClock
from tests.log.sparse import SparseLog


@dataclass(frozen=True, slots=True)
class Engine:
    """How to open a log, and the URL of the registry that goes with it. Both are in a folder, if they are files."""

    log: Callable[[Path], Log]
    registry_url: str

    def open_registry(self, folder: Path, clock: Clock | None = None) -> Registry:
        return open_registry(self.registry_url.format(folder=folder), clock=clock or SystemClock())


ENGINES = {
    "memory": Engine(lambda _: MemoryLog(), "memory://"),
    "sparse": Engine(lambda _: SparseLog(), "memory://"),
    "sqlite": Engine(lambda folder: SqliteLog(folder / "log"), "sqlite:///{folder}/registry.db"),
}

DELAYS = FAILURES = SEARCH = BROKERS = ("memory", "sparse", "sqlite")
REGISTRIES = ("memory", "sqlite")
"""The engines of each suite. `REGISTRIES`: suites that need a registry and a log in memory."""
