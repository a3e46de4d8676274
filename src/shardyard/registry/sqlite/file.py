"""The file of a registry."""

from pathlib import Path

from shardyard.registry.migrations import VERSION_TABLE
from shardyard.registry.port import TransactionAborted
from shardyard.runtime.sqlite import SqliteFile


class RegistryFile(SqliteFile):
    """The path of a registry, and how to open it."""

    def __init__(self, path: Path, busy_wait: float) -> None:
        super().__init__(path, "registry", VERSION_TABLE, busy_wait)

    def _locked(self, why: str) -> TransactionAborted:
        return TransactionAborted(self.name, why)
