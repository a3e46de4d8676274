"""The jobs on a real cluster: a master and two workers, in processes of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pytest

import shardyard.cli
from tests.pipeline.cluster import ENVIRONMENT, cluster
from tests.pipeline.logs import contents, create, fill, url

RECORDS = 3000
BIN = Path(sys.executable).parent


def run(*command: str | Path, cwd: Path) -> Any:
    environment = {name: value for name, value in os.environ.items() if name != "PYSPARK_PYTHON"} | ENVIRONMENT
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.spark
@pytest.mark.timeout(300)
def test_ingest_and_balance_run_on_a_cluster(tmp_path: Path) -> None:
    log = url(tmp_path)
    create(log, "orders", 4)
    fill(log, "orders", RECORDS)
    script = Path(shardyard.cli.__file__).with_name("__main__.py")
    options = ("--log", "sqlite:///log", "--json")  # relative, but the workers have other working directories
    with cluster(tmp_path / "cluster") as master:
        interpreter = ("--conf", f"spark.pyspark.python={sys.executable}")
        submit = (BIN / "spark-submit", "--master", master, *interpreter, script, "pipeline")
        done = run(*submit, "ingest", "orders", "--lake", "lake", *options, cwd=tmp_path)
        command = (BIN / "shardyard", "pipeline", "balance", "--topic", "orders", "--master", master)
        found = run(*command, *options, cwd=tmp_path)
    assert done["records"] == RECORDS
    table = ds.dataset(tmp_path / "lake" / "records", format="parquet", partitioning="hive").to_table()
    assert sorted(int(value) for value in table["value"].to_pylist()) == list(range(RECORDS))
    (topic,) = found["topics"]
    assert topic["schemes"][0]["records"]["counts"] == [len(records) for records in contents(log, "orders")]
