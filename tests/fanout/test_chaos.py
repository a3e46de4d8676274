"""Short runs of `chaos`; `make chaos` runs long ones."""

from contextlib import nullcontext
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.fanout import chaos
from tests.postgresql import postgresql_server

SECONDS = 20.0


@pytest.mark.processes
@pytest.mark.timeout(300)
@pytest.mark.parametrize("engine", ["sqlite", pytest.param("postgresql", marks=pytest.mark.server)])
def test_every_member_gets_every_post_once_while_processes_fail_and_the_mode_is_migrated(
    tmp_path: Path, spark: SparkSession, engine: str
) -> None:
    with postgresql_server() if engine == "postgresql" else nullcontext() as database:
        report = chaos.run(tmp_path, SECONDS, seed=3, database=database, spark=spark)
    assert report.problems == []
    assert report.faults >= chaos.LEAST_FAULTS
    assert report.migrations == 2
    assert report.acknowledged > 200, "too little happened to prove anything"
    assert report.received > report.acknowledged
    assert report.paged >= report.acknowledged
