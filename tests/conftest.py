import os
from collections.abc import Iterator

import pytest
from hypothesis import settings
from pyspark.sql import SparkSession

from shardyard.pipeline.session import session

settings.register_profile("default", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.register_profile("thorough", deadline=None, max_examples=5_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "default"))


def pytest_itemcollected(item: pytest.Item) -> None:
    """Where tests run side by side, those with a Spark session share one, in one process."""
    if "spark" in getattr(item, "fixturenames", ()):
        item.add_marker(pytest.mark.xdist_group("spark"))


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """One small session for all tests that have use for one."""
    made = session("tests", master="local[2]", memory="1g", settings={"spark.sql.shuffle.partitions": "2"})
    yield made
    made.stop()
