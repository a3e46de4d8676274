"""Delta Lake in Spark: its jars, which Maven downloads once into a cache of the user, and the settings of sessions."""

import hashlib
import shutil
import subprocess
import tempfile
from pathlib import Path

import pyspark
from pyspark.sql import SparkSession

from shardyard.model import InvalidCall, ShardyardError
from shardyard.pipeline.cache import cache_path

SPARK = "4.2"
"""The version of Spark that the jars are made for."""
POM = Path(__file__).with_name("delta-pom.xml")
EXTENSION = "io.delta.sql.DeltaSparkSessionExtension"
_COPY = "org.apache.maven.plugins:maven-dependency-plugin:3.6.1:copy-dependencies"


class MissingDelta(InvalidCall):
    """Raised when a Delta table is to be read or written, and the session does not have Delta Lake."""

    def __init__(self) -> None:
        if not _fits_spark():
            advice = (
                f"it is made for Spark {SPARK}, and this is {pyspark.__version__}: pip install 'pyspark=={SPARK}.*'"
            )
        elif not delta_jars():
            advice = "its jars are missing: run `shardyard pipeline install-delta`"
        else:
            advice = f"create it with session(), or with --jars {jar_folder()}/* and the settings in docs/pipeline.md"
        super().__init__(f"Spark has no Delta Lake; {advice}, or use a lake with the format parquet")


def jar_folder() -> Path:
    """Where the jars are, or would be. Other versions of them have another folder."""
    return cache_path() / f"delta-{hashlib.sha256(POM.read_bytes()).hexdigest()[:12]}"


def delta_jars() -> list[str]:
    """The paths of the jars; none if they are not installed, or made for another version of Spark."""
    return sorted(map(str, jar_folder().glob("*.jar"))) if _fits_spark() else []


def delta_settings() -> dict[str, str]:
    """The settings of a new session that has Delta Lake; none if its jars are missing."""
    jars = delta_jars()
    if not jars:
        return {}
    return {
        "spark.jars": ",".join(jars),
        "spark.sql.extensions": EXTENSION,
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        "spark.databricks.delta.snapshotPartitions": "2",  # Delta's own 50 are for tables with millions of files
    }


def has_delta(spark: SparkSession) -> bool:
    """Whether the session can read and write Delta tables."""
    return EXTENSION in (spark.conf.get("spark.sql.extensions", "") or "")


def install() -> Path:
    """Download the jars with Maven, unless they are there. Returns their folder."""
    folder = jar_folder()
    if folder.is_dir():
        return folder
    if not _fits_spark():
        raise MissingDelta
    maven = shutil.which("mvn")
    if maven is None:
        raise InvalidCall("Maven is missing, which downloads the jars of Delta Lake: apt-get install maven")
    folder.parent.mkdir(parents=True, exist_ok=True)
    incomplete = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    command = [maven, "-q", "-B", "-f", str(POM), _COPY, "-DincludeScope=runtime", f"-DoutputDirectory={incomplete}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 the user's own Maven
        if done.returncode:
            problem = next((line for line in done.stdout.splitlines() if "ERROR" in line), "no message")
            raise ShardyardError(f"Maven could not download the jars of Delta Lake: {problem}")
        incomplete.rename(folder)
    except FileExistsError:
        pass  # another process was faster
    finally:
        shutil.rmtree(incomplete, ignore_errors=True)
    return folder


def _fits_spark() -> bool:
    return pyspark.__version__.startswith(f"{SPARK}.")
