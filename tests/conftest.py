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

QUICK = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""For JVMs that live for seconds: compiling less and collecting in one thread halves the processor time they take."""
os.environ.setdefault("SPARK_SUBMIT_OPTS", f'{QUICK} -Dspark.executor.extraJavaOptions="{QUICK}"')
os.environ.setdefault("SPARK_DAEMON_JAVA_OPTS", QUICK)

FEW = {"spark.sql.shuffle.partitions": "2"}


class SideBySide(LoadScopeScheduling):  # type: ignore[misc]  # it has no types
    """Tests run one by one wherever there is room, but those that share a Spark session, or brokers, in one process."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        shared = path.startswith("tests/pipeline/") or path in (
            "tests/groups/test_processes.py",
            "tests/cli/test_pipeline.py",
        )
        if shared and path != "tests/pipeline/test_cluster.py":  # its Spark is in processes of its own
            return "spark"
        return path if path in ("tests/queues/test_processes.py", "tests/cli/test_queues.py") else nodeid


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> SideBySide:
    return SideBySide(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the tests that may take longest, so that none of them is still at work when the others are done."""

    def allowed(item: pytest.Item) -> float:
        own = item.get_closest_marker("timeout")
        return float(item.config.getini("timeout") if own is None else own.args[0])

    items.sort(key=allowed, reverse=True)


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """One small session for all tests that have use for one."""
    made = session("tests", master="local[2]", memory="1g", settings=FEW)
    yield made
    made.stop()


@pytest.fixture(autouse=True)
def small(request: pytest.FixtureRequest) -> None:
    """Keep the session small: a job that takes it over for itself gives it settings that suit larger data."""
    if "spark" in request.fixturenames:
        running: SparkSession = request.getfixturevalue("spark")
        for name, value in FEW.items():
            running.conf.set(name, value)
