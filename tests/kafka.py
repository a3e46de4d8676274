"""A real Kafka server on free loopback ports, for tests and benchmarks: one process that is broker and controller."""

import base64
import os
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.postgresql import free_port

START_SECONDS = 120.0
"""It takes ten seconds, and several times as long on a busy machine."""
STOP_SECONDS = 30.0
_INSTALL_SCRIPT = Path(__file__).parent.parent / "tools" / "install-server"
_JAVA_OPTIONS = ("-Xms1g", "-Xmx1g", "-XX:+UseG1GC", "-XX:MaxGCPauseMillis=20", "-XX:InitiatingHeapOccupancyPercent=35")
"""What Kafka's own start script sets."""
_LOG_WARNINGS = "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"


def find_kafka() -> Path | None:
    """The folder of Kafka's jars, which are downloaded if need be. None if that fails; the reason is printed."""
    result = subprocess.run([_INSTALL_SCRIPT, "kafka"], stdout=subprocess.PIPE, text=True, check=False)
    return Path(result.stdout.strip()) if result.returncode == 0 else None


@contextmanager
def kafka_server(jars: Path, folder: Path, **settings: object) -> Iterator[int]:
    """Run Kafka with its data in the folder; yields its port. `settings` are Kafka's own, with `_` for `.`."""
    port, controller_port = free_port(), free_port()
    properties = {
        "process_roles": "broker,controller",
        "node_id": 1,
        "controller_quorum_voters": f"1@127.0.0.1:{controller_port}",
        "controller_listener_names": "CONTROLLER",
        "listeners": f"PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller_port}",
        "log_dirs": folder / "data",
        "auto_create_topics_enable": "false",
        "group_initial_rebalance_delay_ms": 0,  # the first member of a group does not wait for others
        # There are no other brokers that could hold replicas.
        "offsets_topic_replication_factor": 1,
        "transaction_state_log_replication_factor": 1,
        "transaction_state_log_min_isr": 1,
        "share_coordinator_state_topic_replication_factor": 1,
        "share_coordinator_state_topic_min_isr": 1,
        **settings,
    }
    config = folder / "kafka.properties"
    config.write_text("".join(f"{name.replace('_', '.')}={value}\n" for name, value in properties.items()))
    cluster = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
    with _running(jars, folder, "kafka.tools.StorageTool", "format", "-t", cluster, "-c", str(config)) as formatting:
        if formatting.wait(START_SECONDS) != 0:
            raise RuntimeError(f"Kafka's folder could not be formatted:\n{(folder / 'server.log').read_text()}")
    with _running(jars, folder, "kafka.Kafka", str(config)) as server:
        _wait_until_ready(server, port, folder)
        yield port


@contextmanager
def _running(jars: Path, folder: Path, *command: str) -> Iterator[subprocess.Popen[bytes]]:
    with (folder / "server.log").open("ab") as output:
        process = subprocess.Popen(
            [_java(), *_JAVA_OPTIONS, _LOG_WARNINGS, "-cp", f"{jars}/*", *command],
            stdout=output,
            stderr=output,
            cwd=folder,
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _java() -> str:
    home = os.environ.get("JAVA_HOME")
    return f"{home}/bin/java" if home else "java"


def _wait_until_ready(process: subprocess.Popen[bytes], port: int, folder: Path) -> None:
    """Kafka listens once it can serve clients."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"Kafka did not start:\n{(folder / 'server.log').read_text()}")
        time.sleep(0.05)
