"""The engines of log and registry that the suites of the queues run on: one place to add another one."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from shardyard.log import Log, open_log
from shardyard.log.memory import MemoryLog
from shardyard.log.sqlite import SqliteLog
from shardyard.registry import Registry, open_registry
from shardyard.runtime.clock import Clock, SystemClock
from tests.log.sparse import SparseLog
from tests.postgresql import PostgresqlServer
from tests.sqlite_files import with_log, with_registry


@dataclass(frozen=True, slots=True)
class Engine:
    """How to open a log, and the URL of the registry that goes with it. Both are in a folder, if they are files."""

    log: Callable[[Path], Log]
    registry_url: Callable[[Path], str]

    def open_registry(self, folder: Path, clock: Clock | None = None) -> Registry:
        return open_registry(self.registry_url(folder), clock=clock or SystemClock())


_databases: dict[Path, str] = {}
_create: list[Callable[[], str]] = []


@contextmanager
def databases(server: PostgresqlServer) -> Iterator[None]:
    """For the length of the block, every folder has a database on the server."""
    with ExitStack() as stack:
        _create.append(lambda: stack.enter_context(server.new_database()))
        try:
            yield
        finally:
            _create.clear()
            _databases.clear()


def _database(folder: Path) -> str:
    if folder not in _databases:
        _databases[folder] = _create[-1]()
    return _databases[folder]


ENGINES = {
    "memory": Engine(lambda _: MemoryLog(), lambda _: "memory://"),
    "sparse": Engine(lambda _: SparseLog(), lambda _: "memory://"),
    "sqlite": Engine(
        lambda folder: SqliteLog(with_log(folder / "log")),
        lambda folder: f"sqlite:///{with_registry(folder / 'registry.db')}",
    ),
    "postgresql": Engine(lambda folder: open_log(_database(folder)), _database),
}

POSTGRESQL = pytest.param("postgresql", marks=pytest.mark.server)
SPARSE = pytest.param("sparse", marks=pytest.mark.long)
SEARCH = DELAYS = ("memory", SPARSE, "sqlite")
FAILURES = BROKERS = ("memory", SPARSE, "sqlite", POSTGRESQL)
REGISTRIES = ("memory", "sqlite", POSTGRESQL)
"""The engines of each suite. `REGISTRIES`: suites that need a registry and a log in memory. A search reads a log like
any reader, and a delayed record is delivered like any other: the suites of readers and brokers run on PostgreSQL."""
