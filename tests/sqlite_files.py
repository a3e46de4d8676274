"""Files of empty logs and registries, written at once: creating one waits for the disk several times, and runs every
migration. For tests of something else than that."""

import functools
import tempfile
from pathlib import Path

from shardyard.log.sqlite.files import create_or_check
from shardyard.registry.sql import SqlRegistry
from shardyard.registry.sqlite import SqliteStore


def with_log(folder: Path) -> Path:
    """`folder`, with a log in it: an empty one, unless it has one."""
    name, content = _empty_log()
    if not (folder / name).exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def with_registry(path: Path) -> Path:
    """`path`, with a registry: an empty one, unless there is one."""
    if not path.exists():
        path.write_bytes(_empty_registry())
    return path


@functools.cache
def _empty_log() -> tuple[str, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        file = create_or_check(Path(folder))
        return file.name, file.read_bytes()


@functools.cache
def _empty_registry() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "registry.db")
        SqlRegistry(SqliteStore(file)).close()
        return file.read_bytes()
