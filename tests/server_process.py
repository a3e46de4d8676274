"""A server of ours as a process that a test kills, stalls and starts again."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import aiohttp

from tests.servers import free_port

STOP_SECONDS = 30.0
"""How long a server may take to stop."""


class ServerProcess:
    """`shardyard <arguments> --port <a free one>`, in a folder of its own, with its output in a file."""

    def __init__(self, folder: Path, name: str, arguments: list[str]) -> None:
        self.name = name
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.output = folder / f"{name}.log"
        self._command = [sys.executable, "-m", "shardyard.cli", *arguments, "--port", str(self.port)]
        self._folder = folder
        self.start()

    def start(self) -> None:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("SHARDYARD_")}
        with self.output.open("a") as output:
            self.handle = subprocess.Popen(
                self._command, stdout=output, stderr=output, cwd=self._folder, env=environment
            )

    def send_signal(self, number: signal.Signals) -> None:
        self.handle.send_signal(number)

    async def end(self, number: signal.Signals = signal.SIGKILL) -> None:
        self.send_signal(number)
        await asyncio.to_thread(self.handle.wait, STOP_SECONDS)

    def discard(self) -> None:
        """End it in whatever state it is."""
        self.send_signal(signal.SIGCONT)
        self.handle.kill()
        self.handle.wait()

    async def ready(self, seconds: float = 60.0) -> None:
        """Wait until it serves."""
        async with aiohttp.ClientSession() as http, asyncio.timeout(seconds):
            while True:
                if self.handle.poll() is not None:
                    raise RuntimeError(f"{self.name} has ended: {self.output.read_text()[-2000:]}")
                with contextlib.suppress(aiohttp.ClientError, OSError):
                    async with http.get(f"{self.url}/readyz") as response:
                        if response.status == 200:
                            return
                await asyncio.sleep(0.1)
