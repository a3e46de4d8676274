"""Small files that are there as a whole or not at all, also after a power cut."""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path

from shardyard.model import Busy


def store_json(path: Path, content: object) -> None:
    """Write a file, or replace it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".tmp")
    with draft.open("w") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    draft.rename(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Make a file's content durable, or a folder's names."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


@contextlib.contextmanager
def alone(path: Path, what: str) -> Iterator[None]:
    """Hold the lock of that file, which ends with the process; `Busy` if somebody has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Busy(what, 0) from None
        yield
