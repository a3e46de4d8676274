"""A real Kafka server on free loopback ports, for tests and benchmarks: one process that is broker and controller."""

import base64
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.servers import READY_SECONDS, free_port, install, run_server, server_process

_JAVA_OPTIONS = ("-Xms1g", "-Xmx1g", "-XX:+UseG1GC", "-XX:MaxGCPauseMillis=20", "-XX:InitiatingHeapOccupancyPercent=35")
"""What Kafka's own start script sets."""
_LOG_WARNINGS = "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"


def find_kafka() -> Path | None:
    """The folder of Kafka's jars, which are downloaded if need be. None if that fails; the reason is printed."""
    return install("kafka")


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
    format_folder = _kafka(jars, "kafka.tools.StorageTool", "format", f"--cluster-id={cluster}", "-c", str(config))
    with server_process(format_folder, folder) as formatting:
        if formatting.wait(READY_SECONDS) != 0:
            raise RuntimeError(f"Kafka's folder could not be formatted:\n{(folder / 'server.log').read_text()}")
    with run_server(_kafka(jars, "kafka.Kafka", str(config)), port, folder):
        yield port


def _kafka(jars: Path, *command: str) -> list[str]:
    return [_java(), *_JAVA_OPTIONS, _LOG_WARNINGS, "-cp", f"{jars}/*", *command]


def _java() -> str:
    home = os.environ.get("JAVA_HOME")
    return f"{home}/bin/java" if home else "java"
