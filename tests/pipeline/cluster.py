"""A standalone Spark cluster of one master and two workers, from the installed pyspark."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pyspark

from tests.servers import free_port

HOME = Path(pyspark.__file__).parent
TIMEOUT_SECONDS = 60.0
ENVIRONMENT = {"SPARK_LOCAL_IP": "127.0.0.1", "SPARK_HOME": str(HOME)}


@contextlib.contextmanager
def daemon(name: str, folder: Path, *arguments: str) -> Iterator[Path]:
    """A daemon of Spark in a process of its own. Yields the file with its output."""
    output = folder / f"{name}.log"
    command = [str(HOME / "bin" / "spark-class"), f"org.apache.spark.deploy.{arguments[0]}", *arguments[1:]]
    with output.open("w") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, cwd=folder, env=os.environ | ENVIRONMENT, start_new_session=True
        )
    try:
        yield output
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(TIMEOUT_SECONDS)


def wait_for_output(output: Path, text: str, times: int) -> None:
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while output.read_text().count(text) < times:
        assert time.monotonic() < deadline, output.read_text()
        time.sleep(0.1)


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[str]:
    """The master's URL, once both workers have registered."""
    folder.mkdir()
    port = free_port()
    url = f"spark://127.0.0.1:{port}"
    host = ("--host", "127.0.0.1", "--webui-port", "0")
    with contextlib.ExitStack() as parts:
        master = parts.enter_context(daemon("master", folder, "master.Master", *host, "--port", str(port)))
        wait_for_output(master, "I have been elected leader", 1)
        for name in ("worker-1", "worker-2"):
            size = ("--cores", "1", "--memory", "1g", "--work-dir", str(folder / name))
            parts.enter_context(daemon(name, folder, "worker.Worker", *host, *size, url))
        wait_for_output(master, "Registering worker", 2)
        yield url
