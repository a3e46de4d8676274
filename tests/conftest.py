import asyncio
import gc
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import uvicorn.server
from hypothesis import settings

from tests.postgresql import PostgresqlServer, postgresql_server
from tests.rabbitmq import RabbitMQ, find_rabbitmq, rabbitmq_server

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

settings.register_profile("default", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.register_profile("quick", deadline=None, max_examples=30)
settings.register_profile("thorough", deadline=None, max_examples=5_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "default"))

SHORT_LIVED_JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""For JVMs that live for seconds: compiling less and collecting in one thread halves the processor time they take."""
os.environ.setdefault("SPARK_SUBMIT_OPTS", f'{SHORT_LIVED_JVM} -Dspark.executor.extraJavaOptions="{SHORT_LIVED_JVM}"')
os.environ.setdefault("SPARK_DAEMON_JAVA_OPTS", SHORT_LIVED_JVM)

SMALL_SESSION = {"spark.sql.shuffle.partitions": "2"}


def pytest_itemcollected(item: pytest.Item) -> None:
    """A test that uses the shared Spark session, or the RabbitMQ, runs in the one process that has it. Tests that use
    these, or a database server, are not in `make quick`."""
    fixtures = getattr(item, "fixturenames", ())
    if "spark" in fixtures:
        item.add_marker(pytest.mark.spark)
        item.add_marker(pytest.mark.xdist_group("spark"))
    if "postgresql" in fixtures or "own_postgresql" in fixtures:
        item.add_marker(pytest.mark.server)
    if "rabbitmq" in fixtures:
        item.add_marker(pytest.mark.server)
        item.add_marker(pytest.mark.xdist_group("rabbitmq"))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start with the tests that may take longest, so that none of them still runs when the others are done."""

    def time_limit(item: pytest.Item) -> float:
        own = item.get_closest_marker("timeout")
        return float(item.config.getini("timeout") if own is None else own.args[0])

    items.sort(key=time_limit, reverse=True)


def pytest_collection_finish() -> None:
    """What is loaded now stays to the end. If the garbage collection looked at it again and again, that would take a
    tenth of the processor time of all tests."""
    gc.freeze()


class _UvicornsAsyncio:
    """What uvicorn knows as `asyncio`. It looks every 100 ms whether it is to stop, and whether its connections are
    closed: a server in the process of a test would take a quarter of a second to stop, which hundreds of tests do."""

    def __getattr__(self, name: str) -> object:
        return getattr(asyncio, name)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds / 20)


@pytest.fixture(scope="session", autouse=True)
def servers_that_stop_quickly() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(uvicorn.server, "asyncio", _UvicornsAsyncio())
        yield


@pytest.fixture(scope="session")
def postgresql() -> Iterator[PostgresqlServer]:
    """One server for all tests of a process that need one."""
    with postgresql_server() as server:
        yield server


@pytest.fixture
def own_postgresql() -> Iterator[PostgresqlServer]:
    """A server that the test may harm."""
    with postgresql_server() as server:
        yield server


@pytest.fixture
def postgresql_url(postgresql: PostgresqlServer) -> Iterator[str]:
    """The URL of an empty database."""
    with postgresql.new_database() as url:
        yield url


@pytest.fixture(scope="session")
def rabbitmq(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RabbitMQ]:
    """One server with the sharding plugin, for all tests that need one."""
    script = find_rabbitmq()
    if script is None:
        missing = "RabbitMQ is missing: apt-get install rabbitmq-server"
        if os.environ.get("CI") == "true":
            pytest.fail(missing)
        pytest.skip(missing)
    with rabbitmq_server(script, tmp_path_factory.mktemp("rabbitmq"), ["rabbitmq_sharding"]) as server:
        yield server


@pytest.fixture(scope="session")
def spark() -> Iterator["SparkSession"]:
    """One small session for all tests of a process that need one."""
    from shardyard.pipeline.session import session  # noqa: PLC0415 most tests need no Spark

    shared = session("tests", master="local[2]", memory="1g", settings=SMALL_SESSION)
    yield shared
    shared.stop()


@pytest.fixture(autouse=True)
def small_session(request: pytest.FixtureRequest) -> None:
    """Keep the session small: a job that uses it for itself gives it settings that suit larger data."""
    if "spark" in request.fixturenames:
        shared: SparkSession = request.getfixturevalue("spark")
        for name, value in SMALL_SESSION.items():
            shared.conf.set(name, value)
