"""The factory of Spark sessions: no other code creates one."""

import contextlib
import logging
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
from shardyard.model.extras import require
from shardyard.pipeline.delta_jars import delta_settings
from shardyard.pipeline.jvm.class_archive import ClassArchive
from shardyard.pipeline.session_checks import (
    CONNECT,
    check_connect_server,
    check_master,
    check_memory,
    without_options,
)
from shardyard.pipeline.source.source import Shardyard
from shardyard.pipeline.spark_errors import is_from_lost_jvm

__all__ = ["DataFrame", "MissingJava", "SparkSession", "check_java", "session"]

MASTER = "local[*]"
MEMORY = "2g"
"""Memory of the driver, which does all the work in local mode; enough for every job here on 2 cores."""
MIN_JAVA = 17

_SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.shuffle.partitions": "8",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "50000",  # makes the call of a Python function per batch cheap
    "spark.sql.execution.arrow.pythonUDF.columnarInput.enabled": "false",  # a quarter slower with Parquet input
    "spark.sql.maxConcurrentOutputFileWriters": "64",  # so that a write by topic and day needs no sort
    "spark.sql.streaming.noDataMicroBatches.enabled": "false",
}
_LOCAL = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
_JAVA = f"-Xss16m -Dlog4j2.configurationFile={Path(__file__).with_name('log4j2.properties').as_uri()}"
"""A deep stack, because Spark matches the long message of a stopped query with a recursive regular expression."""
_COLLECTOR = "-XX:+UseParallelGC"
"""A job is done sooner with it than with Java's default on two cores: it is about throughput, not about pauses."""
_JAVA_VARIABLES = ("SPARK_SUBMIT_OPTS", "JDK_JAVA_OPTIONS", "JAVA_TOOL_OPTIONS", "_JAVA_OPTIONS")
_NOISE = (
    b"WARNING: Using incubator modules",
    b"Setting default log level",
    b"To adjust logging level",
    b"Deleted ",  # Delta Lake prints how many files VACUUM deleted
)


class MissingJava(InvalidCall):
    """Raised when there is no Java that Spark can run on."""

    def __init__(self, found: str) -> None:
        super().__init__(
            f"Spark needs Java {MIN_JAVA} or later, and there is {found}: "
            f"apt-get install openjdk-{MIN_JAVA}-jre-headless, or set JAVA_HOME"
        )


def session(
    name: str,
    *,
    master: str | None = None,
    memory: str | None = None,
    settings: Mapping[str, str] | None = None,
    java_options: str | None = None,
) -> SparkSession:
    """A Spark session for a job: the active one, or a new one.

    `master` defaults to `local[*]`, or to the master that `spark-submit` was started with; `sc://host:15002` is a Spark
    Connect server. Spark's Python workers use the interpreter that runs this, unless another one is set by
    `spark.pyspark.python` in `settings` or by `PYSPARK_PYTHON`; those of a Spark Connect server use the server's own.
    `java_options` of a new JVM are by default those that use the archive of classes, if there is one.
    """
    quiet_py4j()
    settings = settings or {}
    if master is not None:
        check_master(master)
    if memory is not None:
        check_memory(memory)
    if master is not None and master.startswith(CONNECT):
        return _connect(master, memory, settings)
    _set_interpreter(settings.get("spark.pyspark.python"))
    builder = SparkSession.builder.appName(f"shardyard {name}")
    config = _SETTINGS | {"spark.ui.showConsoleProgress": str(sys.stderr.isatty()).lower()}
    if "PYSPARK_GATEWAY_PORT" in os.environ:  # spark-submit has started the JVM with its own settings
        if master is not None:
            builder = builder.master(master)
        spark = _create(builder, config | dict(settings))
        spark.dataSource.register(Shardyard)  # the JVM would look for it with an interpreter that may lack Shardyard
        return spark
    check_java()
    master = master or MASTER
    if java_options is None:
        java_options = ClassArchive().use()
    options = f"{_JAVA} {collector(java_options, *settings.values())} {java_options}"
    config |= {"spark.driver.memory": memory or MEMORY, "spark.driver.extraJavaOptions": options}
    if not settings.keys() & (delta := delta_settings()).keys():  # a caller with jars of its own knows better
        config |= delta
    if master.startswith("local"):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        config |= _LOCAL
    with _quiet_startup():
        return _create(builder.master(master), config | dict(settings))


def collector(*options: str) -> str:
    """The garbage collector of the JVM, unless the environment or one of the `options` chooses one: Java does not start
    with two of them."""
    chosen = [*options, *(os.environ.get(name, "") for name in _JAVA_VARIABLES)]
    is_chosen = any(re.search(r"-XX:\+Use\w+GC\b", text) for text in chosen)
    return "" if is_chosen else _COLLECTOR


def _connect(remote: str, memory: str | None, settings: Mapping[str, str]) -> SparkSession:
    """A session of a Spark Connect server. Only settings of SQL are a session's own there; others are the server's."""
    if memory is not None:
        server = without_options(remote)
        raise InvalidCall(f"{server} has its own memory: set it where the server is started (spark.driver.memory)")
    require("pipeline", "Spark Connect", "grpc", "grpc_status", "zstandard")
    check_connect_server(remote)
    config = {key: value for key, value in (_SETTINGS | dict(settings)).items() if key.startswith("spark.sql.")}
    return _create(SparkSession.builder.remote(remote), config)


def _set_interpreter(python: str | None) -> None:
    """Set the interpreter of the workers. Spark's own default, `python3`, need not be one that has Shardyard."""
    os.environ["PYSPARK_PYTHON"] = python or os.environ.get("PYSPARK_PYTHON") or sys.executable
    os.environ.pop("PYSPARK_DRIVER_PYTHON", None)  # data sources would run with it, and it may be Jupyter


def quiet_py4j() -> None:
    """Keep traces off standard error that Py4J logs for errors that it raises as well, or that every call raises."""
    logging.getLogger().addFilter(_is_not_py4j)
    for name in ("py4j.clientserver", "py4j.java_gateway"):  # a filter does not apply to loggers below its own
        logging.getLogger(name).addFilter(_is_not_from_lost_jvm)


def _is_not_py4j(record: logging.LogRecord) -> bool:
    """Py4J logs errors that it raises as well, with the root logger."""
    return "py4j" not in Path(record.pathname).parts


def _is_not_from_lost_jvm(record: logging.LogRecord) -> bool:
    """Py4J logs that a call from the JVM has failed here. If the JVM has ended meanwhile, the job itself says so."""
    return record.exc_info is None or not is_from_lost_jvm(record.exc_info[1])


def _create(builder: SparkSession.Builder, settings: Mapping[str, str]) -> SparkSession:
    for key, value in settings.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def check_java() -> None:
    """Raise `MissingJava` if Spark would not find a Java that it can run on: its own error is less clear."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    if java is None or not Path(java).is_file():
        raise MissingJava("none" if java is None else f"none at {java}")
    if (version := _released_version(Path(java))) is not None and version >= MIN_JAVA:
        return
    command = [java, "-version"]
    output = subprocess.run(command, capture_output=True, text=True, check=False).stderr  # noqa: S603 the user's own Java
    match = re.search(r'version "(?:1\.)?(\d+)', output)
    if match is None or int(match.group(1)) < MIN_JAVA:
        raise MissingJava(output.splitlines()[0] if output else f"something else at {java}")


def _released_version(java: Path) -> int | None:
    """The version according to the file `release` of a Java installation, which takes no time to start."""
    try:
        release = (java.resolve().parent.parent / "release").read_text(errors="replace")
    except OSError:
        return None
    match = re.search(r'^JAVA_VERSION="(\d+)', release, re.MULTILINE)
    return None if match is None else int(match.group(1))


@contextlib.contextmanager
def _quiet_startup() -> Iterator[None]:
    """Filter the output of a JVM that is started inside this block: some of its lines mean nothing to users. What it
    prints goes to standard error, because standard output is for results."""
    read_end, write_end = os.pipe()
    before = {number: os.dup(number) for number in (1, 2)}
    threading.Thread(target=_forward, args=(read_end, os.dup(2)), name="spark-stderr", daemon=True).start()
    for number in before:
        os.dup2(write_end, number)
    try:
        yield
    finally:
        for number, descriptor in before.items():
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.close(write_end)


def _forward(source: int, target: int) -> None:
    """Copy one descriptor to the other without delay, except for lines that start with one of `_NOISE`.

    The start of a line is held back while it may still turn out to be noise.
    """
    held = b""
    while chunk := os.read(source, 65536):
        *lines, held = (held + chunk).split(b"\n")
        quiet = b"".join(line + b"\n" for line in lines if not line.startswith(_NOISE))
        if not any(noise.startswith(held) or held.startswith(noise) for noise in _NOISE):
            quiet, held = quiet + held, b""
        os.write(target, quiet)
