import os
from collections.abc import Iterator

import pytest
from hypothesis import settings
from pyspark.sql import SparkSession
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from shardyard.pipeline.session import session

settings.register_profile("default", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.register_profile("thorough", deadline=None, max_examples=5_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "default"))


class SideBySide(LoadScopeScheduling):  # type: ignore[misc]  # it has no types
    """Tests run one by one wherever there is room, but those that share a Spark session, or brokers, in one process."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        alone = path.endswith(("/test_crashes.py", "/test_cluster.py"))  # their Spark is in processes of its own
        shared = path.startswith("tests/pipeline/") or path in (
            "tests/groups/test_processes.py",
            "tests/cli/test_pipeline.py",
        )
        if shared and not alone:
            return "spark"
        return path if path in ("tests/queues/test_processes.py", "tests/cli/test_queues.py") else nodeid


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> SideBySide:
    return SideBySide(config, log)


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """One small session for all tests that have use for one."""
    made = session("tests", master="local[2]", memory="1g", settings={"spark.sql.shuffle.partitions": "2"})
    yield made
    made.stop()
