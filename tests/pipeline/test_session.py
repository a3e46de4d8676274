"""The session: its settings, and a clear error without Java."""

import subprocess
import sys
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from shardyard.pipeline.session import MissingJava, check_java, session


def java(folder: Path, version: str) -> Path:
    """A program that reports this version of Java. Returns its JAVA_HOME."""
    program = folder / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho '{version}' >&2\n")
    program.chmod(0o755)
    return folder


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


def test_a_command_without_java_fails_with_one_line(tmp_path: Path) -> None:
    command = [str(Path(sys.executable).with_name("shardyard")), "pipeline", "balance", "--parquet", str(tmp_path)]
    environment = {"PATH": str(tmp_path), "HOME": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: Spark needs Java 17 or later, and there is none")
    assert len(done.stderr.splitlines()) == 1


def test_the_running_session_is_reused_and_has_the_settings_of_the_jobs(spark: SparkSession) -> None:
    assert session("again", master="local[2]") is spark or session("again").conf.get("spark.app.id") == spark.conf.get(
        "spark.app.id"
    )
    assert spark.conf.get("spark.sql.session.timeZone") == "UTC"
    assert spark.conf.get("spark.ui.enabled") == "false"
    assert spark.conf.get("spark.driver.host") == "127.0.0.1"
