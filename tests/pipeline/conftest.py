from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from shardyard.pipeline.session import session


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """One small session for all tests of the pipeline."""
    made = session("tests", master="local[2]", memory="1g", settings={"spark.sql.shuffle.partitions": "2"})
    yield made
    made.stop()
