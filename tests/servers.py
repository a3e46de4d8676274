"""Servers as processes, on free ports of the loopback interface, for tests and benchmarks."""

import contextlib
import os
import random
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

READY_SECONDS = 120.0
"""RabbitMQ and Kafka take ten seconds to start, and several times as long on a busy machine."""
STOP_SECONDS = 30.0
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_random = random.SystemRandom()
_given: set[int] = set()
"""Ports that were returned, or were in use."""
_INSTALL_SCRIPT = Path(__file__).parent.parent / "tools" / "install-server"


def install(server: str) -> Path | None:
    """What `tools/install-server` prints: the path of a server. None if that fails; the reason is printed."""
    result = subprocess.run([_INSTALL_SCRIPT, server], stdout=subprocess.PIPE, text=True, check=False)
    return Path(result.stdout.strip()) if result.returncode == 0 else None


def free_port() -> int:
    """A port for a server that a test may stop and start again: no other call returns it, in any process of this run of
    the tests, and systems do not give ports below 32768 to outgoing connections meanwhile. The port after it is free
    and no other's, too."""
    while True:
        port = _random.randrange(10_000, 32_000) // 16 * 16 + _WORKER % 8 * 2
        if port not in _given:
            _given.add(port)
            with contextlib.suppress(OSError):
                for each in (port, port + 1):
                    with socket.socket() as probe:
                        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                        probe.bind(("127.0.0.1", each))
                return port


@contextlib.contextmanager
def server_process(
    command: Sequence[str], folder: Path, settings: Mapping[str, str] | None = None
) -> Iterator["subprocess.Popen[bytes]"]:
    """Start a process that writes to `server.log` in its folder, and stop it when the block ends.

    `settings` are added to its environment.
    """
    environment = {**os.environ, **(settings or {})}
    with (folder / "server.log").open("a") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=folder, env=environment)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def run_server(
    command: Sequence[str], port: int, folder: Path, settings: Mapping[str, str] | None = None
) -> Iterator[int]:
    """The same, and wait until it accepts connections; yields its process id."""
    with server_process(command, folder, settings) as process:
        deadline = time.monotonic() + READY_SECONDS
        while not _accepts_connections(port):
            if process.poll() is not None or time.monotonic() > deadline:
                output = (folder / "server.log").read_text()
                raise RuntimeError(f"{process.args!r} did not start; its output was:\n{output}")
            time.sleep(0.02)
        yield process.pid


def _accepts_connections(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False
