"""`shardyard broker` as a process."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self


class BrokerProcess:
    """A broker on the log and registry of a folder, or in a database, killed at the end of the block. It keeps its
    address when it is started again."""

    def __init__(
        self, folder: Path, name: str = "broker", *, database: str | None = None, options: Sequence[str] = ()
    ) -> None:
        self._errors = folder / f"{name}.err"
        log = database or f"sqlite:///{folder / 'log'}"
        registry = database or f"sqlite:///{folder / 'registry.db'}"
        self._command = [sys.executable, "-m", "shardyard.cli", "broker", "--log", log, "--registry", registry]
        self._command += options
        self.url = ""

    @property
    def address(self) -> str:
        return self.url.removeprefix("http://")

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def start(self) -> None:
        """Start the process without waiting for it; see `listens`."""
        port = self.url.rpartition(":")[2] or "0"
        with self._errors.open("a") as errors:
            command = [*self._command, "--port", port]
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)

    @property
    def errors(self) -> str:
        """What it has written to stderr."""
        return self._errors.read_text()

    @property
    def resident_bytes(self) -> int:
        """The memory that it takes now, as Linux counts it."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) * 1024

    def listens(self) -> None:
        """Wait until it listens."""
        assert self.process.stdout is not None
        said = self.process.stdout.readline()
        assert said.startswith("listening on "), self._errors.read_text()
        self.url = said.removeprefix("listening on ").strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
