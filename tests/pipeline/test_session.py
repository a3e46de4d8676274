"""The session: its settings, the interpreter of its workers, and a clear error without Java."""

import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pyspark
import pytest
from py4j.protocol import Py4JNetworkError
from pyspark.sql import SparkSession

from shardyard.model import InvalidCall, RetryLater
from shardyard.pipeline.session import MissingJava, check_java, collector, quiet_py4j, session
from shardyard.pipeline.session_checks import PROXIES, check_connect_server
from shardyard.pipeline.spark_errors import SparkEnded
from tests.pipeline.logs import create, fill, url
from tests.servers import free_port

JOB = """
import json
import sys
from shardyard.pipeline.session import session

log, settings = sys.argv[1], json.loads(sys.argv[2])
spark = session("job", master="local[1]", memory="1g", settings=settings)
print(len(spark.read.format("shardyard").options(log=log, topics="orders").load().collect()))
"""
SPARK_HOME = Path(pyspark.__file__).parent


def executable(path: Path, script: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def java(folder: Path, version: str) -> Path:
    """A program that reports this version of Java. Returns its JAVA_HOME."""
    executable(folder / "bin" / "java", f"echo '{version}' >&2")
    return folder


@pytest.mark.parametrize(
    ("master", "memory"),
    [("sc:/host/;token=SECRET", None), ("sc://host:x/;token=SECRET", None), ("sc://host/;token=SECRET", "4g")],
)
def test_errors_do_not_show_the_token_of_a_spark_connect_server(master: str, memory: str | None) -> None:
    with pytest.raises(InvalidCall, match="host") as raised:
        session("job", master=master, memory=memory)
    assert "SECRET" not in str(raised.value)


def test_a_spark_connect_server_behind_a_proxy_is_left_to_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
    remote = f"sc://127.0.0.1:{free_port()}"
    with pytest.raises(RetryLater, match="can't be reached"):
        check_connect_server(remote)
    for name in ("grpc_proxy", "https_proxy", "HTTP_PROXY"):
        with monkeypatch.context() as environment:
            environment.setenv(name, "http://proxy:3128")
            check_connect_server(remote)


def test_the_error_for_missing_or_old_java_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "none"))
    with pytest.raises(MissingJava, match=r"there is none at .*none/bin/java: apt-get install openjdk-17-jre-headless"):
        check_java()
    monkeypatch.setenv("JAVA_HOME", str(java(tmp_path / "old", 'openjdk version "11.0.2" 2019-01-15')))
    with pytest.raises(MissingJava, match=r'there is openjdk version "11\.0\.2"'):
        check_java()
    monkeypatch.setenv("JAVA_HOME", str(java(tmp_path / "older", 'java version "1.8.0_292"')))
    with pytest.raises(MissingJava, match=r'there is java version "1\.8'):
        check_java()
    monkeypatch.delenv("JAVA_HOME")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingJava, match="there is none: apt-get"):
        check_java()
    monkeypatch.setenv("JAVA_HOME", str(java(tmp_path / "new", 'openjdk version "21.0.1" 2023-10-17')))
    check_java()


def test_a_collector_is_only_chosen_if_the_environment_chooses_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SPARK_SUBMIT_OPTS", "JDK_JAVA_OPTIONS", "JAVA_TOOL_OPTIONS", "_JAVA_OPTIONS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SPARK_SUBMIT_OPTS", "-XX:TieredStopAtLevel=1 -Dx=UseG1GC")
    assert collector() == "-XX:+UseParallelGC"
    assert collector("-Xmx1g", "-XX:+UseZGC") == ""
    monkeypatch.setenv("JDK_JAVA_OPTIONS", "-Xmx1g -XX:+UseG1GC")
    assert collector() == ""


@pytest.mark.processes
def test_a_command_without_java_fails_with_one_line(tmp_path: Path) -> None:
    pq.write_table(pa.table({"key": ["a"]}), tmp_path / "keys.parquet")
    command = [str(Path(sys.executable).with_name("shardyard")), "pipeline", "balance", "--parquet", str(tmp_path)]
    environment = {"PATH": str(tmp_path), "HOME": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: Spark needs Java 17 or later, and there is none")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("error", "is_logged"),
    [
        (Py4JNetworkError("Error while sending or receiving"), False),
        (ConnectionResetError("Connection reset by peer"), False),
        (SparkEnded(), False),
        (ValueError("a mistake in a function that Spark calls"), True),
    ],
)
def test_a_call_from_the_jvm_that_fails_leaves_a_trace_unless_the_jvm_is_gone(
    error: Exception, is_logged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    quiet_py4j()
    logging.getLogger("py4j.clientserver").error("There was an exception", exc_info=error)
    assert ["There was an exception" in record.message for record in caplog.records] == [True] * is_logged


def test_the_running_session_is_reused_and_has_the_settings_of_the_jobs(spark: SparkSession) -> None:
    assert session("again", master="local[2]") is spark or session("again").conf.get("spark.app.id") == spark.conf.get(
        "spark.app.id"
    )
    assert spark.conf.get("spark.sql.session.timeZone") == "UTC"
    assert spark.conf.get("spark.ui.enabled") == "false"
    assert spark.conf.get("spark.driver.host") == "127.0.0.1"


@pytest.mark.spark
@pytest.mark.timeout(300)
@pytest.mark.parametrize("chosen_by", ["nobody", "environment", "settings", "spark-submit"])
def test_a_script_finds_the_data_source_without_its_environment_on_the_path(tmp_path: Path, chosen_by: str) -> None:
    create(url(tmp_path), "orders", 2)
    fill(url(tmp_path), "orders", 10)
    script = tmp_path / "job.py"
    script.write_text(JOB)
    used = tmp_path / "used"
    chosen = executable(tmp_path / "chosen-python", f'touch {used} && exec {sys.executable} "$@"')
    executable(tmp_path / "bin" / "python3", "exit 1")  # what Spark runs by default

    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYSPARK_")}
    java = Path(shutil.which("java") or "java").parent
    environment["PATH"] = os.pathsep.join([str(tmp_path / "bin"), str(java), os.defpath])
    environment["SPARK_HOME"] = str(SPARK_HOME)
    settings = {"spark.pyspark.python": chosen} if chosen_by == "settings" else {}
    command = [sys.executable, str(script), url(tmp_path), json.dumps(settings)]
    if chosen_by == "environment":
        environment |= {"PYSPARK_PYTHON": chosen, "PYSPARK_DRIVER_PYTHON": "jupyter"}
    if chosen_by == "spark-submit":
        command[:1] = [str(SPARK_HOME / "bin" / "spark-submit"), "--conf", f"spark.pyspark.python={chosen}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "10\n"), done.stderr
    assert used.exists() == (chosen_by != "nobody")
