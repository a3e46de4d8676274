"""A small disk for tests that fill it."""

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(megabytes: int) -> Iterator[Path]:
    """The folder of a file system of this size, in memory. To mount one takes the rights of an administrator: without
    them the test is skipped, except in CI."""
    with tempfile.TemporaryDirectory(prefix="yard-disk-") as name:
        command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m,mode=755", "tmpfs", name]
        mounted = subprocess.run(command, capture_output=True, text=True, check=False)
        if mounted.returncode:
            missing = f"no file system can be mounted, which a test of a full disk needs: {mounted.stderr.strip()}"
            if os.environ.get("CI") == "true":
                pytest.fail(missing)
            pytest.skip(missing)
        try:
            yield Path(name)
        finally:
            subprocess.run(["umount", "--lazy", name], check=True)


class Ballast:
    """A file that takes space on a disk until it is deleted."""

    def __init__(self, folder: Path, megabytes: int) -> None:
        self._file = folder / "ballast"
        self._file.write_bytes(bytes(megabytes * 2**20))

    def drop(self) -> None:
        self._file.unlink()
