"""A Spark Connect server, from the installed pyspark."""

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds

from shardyard.pipeline.delta_jars import delta_settings
from tests.conftest import SHORT_LIVED_JVM
from tests.pipeline.cluster import HOME
from tests.servers import free_port, run_server

MAIN = "org.apache.spark.sql.connect.service.SparkConnectServer"


@dataclass(frozen=True)
class ConnectServer:
    url: str
    warehouse: Path
    """Where its tables are."""

    def table(self, name: str) -> pa.Table:
        return ds.dataset(self.warehouse / name, format="parquet", exclude_invalid_files=True).to_table()


@contextlib.contextmanager
def connect_server(folder: Path) -> Iterator[ConnectServer]:
    """A server with two cores and Delta Lake, once it accepts connections. `folder`: for its log and its tables."""
    port = free_port()
    settings = {
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": str(port),
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.ui.enabled": "false",
        **delta_settings(),
    }
    options = [part for name, value in settings.items() for part in ("--conf", f"{name}={value}")]
    java = ["--driver-memory", "1g", "--driver-java-options", SHORT_LIVED_JVM]
    submit = [str(HOME / "bin" / "spark-submit"), "--master", "local[2]", *java, *options]
    environment = {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1", "SPARK_HOME": str(HOME)}
    with run_server([*submit, "--class", MAIN, "spark-internal"], port, folder, environment):
        yield ConnectServer(f"sc://127.0.0.1:{port}", folder / "warehouse")
