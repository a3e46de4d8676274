"""The one place where a Spark session is made."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

from shardyard.model import InvalidCall

__all__ = ["DataFrame", "MissingJava", "SparkSession", "check_java", "session"]

MASTER = "local[*]"
MEMORY = "2g"
"""Of the driver, which in local mode does all the work; enough for every job here on 2 cores."""
LEAST_JAVA = 17

_SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.shuffle.partitions": "8",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "50000",  # batches that are worth a call of a function
    "spark.sql.execution.arrow.pythonUDF.columnarInput.enabled": "false",  # a quarter slower where the input is Parquet
    "spark.sql.maxConcurrentOutputFileWriters": "64",  # no sort before a write by topic and day
    "spark.sql.streaming.noDataMicroBatches.enabled": "false",
}
_LOCAL = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
_JAVA = f"-Xss16m -Dlog4j2.configurationFile={Path(__file__).with_name('log4j2.properties').as_uri()}"
"""A deep stack, since Spark matches the long message of a query that is stopped with a recursive pattern."""
_NOISE = (b"WARNING: Using incubator modules", b"Setting default log level", b"To adjust logging level")


class MissingJava(InvalidCall):
    """Raised when there is no Java for Spark to run on."""

    def __init__(self, found: str) -> None:
        super().__init__(
            f"Spark needs Java {LEAST_JAVA} or later, and there is {found}: "
            f"apt-get install openjdk-{LEAST_JAVA}-jre-headless, or set JAVA_HOME"
        )


def session(
    name: str, *, master: str | None = None, memory: str | None = None, settings: Mapping[str, str] | None = None
) -> SparkSession:
    """A Spark session for a job: the one that is running, or a new one.

    `master` is `local[*]` if nobody says otherwise: neither the caller nor `spark-submit`.
    """
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.appName(f"shardyard {name}")
    wanted = _SETTINGS | {"spark.ui.showConsoleProgress": str(sys.stderr.isatty()).lower()}
    if "PYSPARK_GATEWAY_PORT" in os.environ:  # spark-submit has started the JVM, with settings of its own
        if master is not None:
            builder = builder.master(master)
        return _made(builder, wanted | dict(settings or {}))
    check_java()
    master = master or MASTER
    wanted |= {"spark.driver.memory": memory or MEMORY, "spark.driver.extraJavaOptions": _JAVA}
    if master.startswith("local"):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        wanted |= _LOCAL
    with _without_noise():
        return _made(builder.master(master), wanted | dict(settings or {}))


def _made(builder: SparkSession.Builder, settings: Mapping[str, str]) -> SparkSession:
    for key, value in settings.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def check_java() -> None:
    """Complain, before Spark does so less clearly, if it will not find a Java that it can run on."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    if java is None or not Path(java).is_file():
        raise MissingJava("none" if java is None else f"none at {java}")
    asked = [java, "-version"]
    told = subprocess.run(asked, capture_output=True, text=True, check=False).stderr  # noqa: S603 the user's own Java
    version = re.search(r'version "(?:1\.)?(\d+)', told)
    if version is None or int(version.group(1)) < LEAST_JAVA:
        raise MissingJava(told.splitlines()[0] if told else f"something else at {java}")


@contextlib.contextmanager
def _without_noise() -> Iterator[None]:
    """Let a JVM that is started meanwhile write its standard error through us: some of it tells a user nothing."""
    ours, theirs = os.pipe()
    kept = os.dup(2)
    threading.Thread(target=_pass_on, args=(ours, os.dup(kept)), name="spark-stderr", daemon=True).start()
    os.dup2(theirs, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(theirs)


def _pass_on(source: int, target: int) -> None:
    """Pass on what comes, at once, but for lines that begin as `_NOISE` does; what may yet become one is held back."""
    held = b""
    while chunk := os.read(source, 65536):
        *lines, held = (held + chunk).split(b"\n")
        quiet = b"".join(line + b"\n" for line in lines if not line.startswith(_NOISE))
        if not any(noise.startswith(held) or held.startswith(noise) for noise in _NOISE):
            quiet, held = quiet + held, b""
        os.write(target, quiet)
