"""Small files that are written completely or not at all, even if the power fails."""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path

from shardyard.model import Busy


def write_json(path: Path, content: object) -> None:
    """Write or replace a file. When this returns, the new content is durable."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".tmp")
    with draft.open("w") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    draft.rename(path)
    fsync(path.parent)


def fsync(path: Path) -> None:
    """Make the content of a file, or the names in a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def exclusive_lock(path: Path, what: str) -> Iterator[None]:
    """Hold a lock file. Raises `Busy`, naming `what`, if another process holds it; a lock ends with its process."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Busy(what, 0) from None
        yield
