from collections.abc import Iterator

import psycopg
import pytest

from shardyard.log.postgresql.schema import MIGRATIONS
from shardyard.model.url import parse_url
from shardyard.runtime.postgresql import connect, migrate
from tests.postgresql import PostgresqlServer


@pytest.fixture(scope="session")
def shared_log_url(postgresql: PostgresqlServer) -> Iterator[str]:
    with postgresql.new_database() as url:
        with connect(parse_url("log", url), "test") as connection:
            migrate(connection, parse_url("log", url), "log", MIGRATIONS)
        yield url


@pytest.fixture
def postgresql_log_url(shared_log_url: str) -> str:
    """The URL of an empty log. The database is the same for all tests of a process: a new one takes 0.2 s."""
    with psycopg.connect(shared_log_url, autocommit=True, options="-c search_path=shardyard") as connection:
        connection.execute("TRUNCATE log_topics, log_partitions, log_batches, log_stamps, log_fences")
        connection.execute("UPDATE log_counter SET last = 0")
    return shared_log_url
