"""ingest: the lake holds every record of its topics exactly once."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow.parquet as pq
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from shardyard.model import (
    Busy,
    Damaged,
    InvalidCall,
    InvalidValue,
    NotOurs,
    Record,
    UnknownTopic,
    WrongSchemaVersion,
)
from shardyard.pipeline.blocking import blocking
from shardyard.pipeline.lake import lake as layout
from shardyard.pipeline.lake.ingest import batch_writer, ingest, maintain
from shardyard.pipeline.lake.lake import COLUMNS, Lake
from shardyard.pipeline.lake.progress import Progress
from shardyard.pipeline.spark_errors import SparkEnded
from tests.pipeline.lakes import files, numbers, require_delta
from tests.pipeline.logs import append, create, fill, url


@pytest.fixture
def log(tmp_path: Path) -> str:
    return url(tmp_path)


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    return tmp_path / "my lake"


@pytest.fixture(params=["delta", "parquet"])
def form(request: pytest.FixtureRequest, spark: SparkSession) -> str:
    """The format of the lake."""
    chosen = str(request.param)
    if chosen == "delta":
        require_delta(spark)
    return chosen


def test_the_lake_holds_every_record_once_by_topic_and_day(
    spark: SparkSession, log: str, lake: Path, form: str
) -> None:
    create(log, "orders", 3)
    create(log, "returns", 1)
    fill(log, "orders", 100)
    fill(log, "returns", 10)
    done = ingest(spark, log, ["orders", "returns"], lake, format=form)
    assert (done.format, done.records, done.batches, done.topics) == (form, 110, 1, ("orders", "returns"))
    assert numbers(lake) == list(range(100))
    assert numbers(lake, "returns") == list(range(10))
    folders = {path.parent.relative_to(lake / "records") for path in files(lake)}
    assert folders == {Path("topic=orders/day=2025-10-09"), Path("topic=returns/day=2025-10-09")}
    assert pq.read_schema(files(lake)[0]).names[: len(COLUMNS)] == list(COLUMNS)  # Delta adds topic and day


def test_an_ingest_continues_where_the_last_one_stopped(spark: SparkSession, log: str, lake: Path) -> None:
    create(log, "orders", 3)
    fill(log, "orders", 100)
    ingest(spark, log, ["orders"], lake, format="parquet")
    assert ingest(spark, log, ["orders"], lake).records == 0
    fill(log, "orders", 50, first=100)
    create(log, "returns", 2)
    fill(log, "returns", 5)
    assert (
        ingest(spark, log, ["returns"], lake).records == 55
    )  # topics that are in the lake already are ingested as well
    assert numbers(lake) == list(range(150))
    assert numbers(lake, "returns") == list(range(5))


def test_a_continuous_ingest_runs_until_it_is_stopped(spark: SparkSession, log: str, lake: Path) -> None:
    create(log, "orders", 2)
    fill(log, "orders", 20)
    seen: list[Progress] = []

    def append_more(progress: Progress) -> None:
        if progress.records == 20 and not any(p.records == 20 for p in seen):
            fill(log, "orders", 30, first=20)
        seen.append(progress)

    done = ingest(
        spark,
        log,
        ["orders"],
        lake,
        format="parquet",
        continuous=True,
        every=0.1,
        on_progress=append_more,
        stopped=lambda: seen[-1:] == [Progress(50, 0)],
    )
    assert done.records == 50
    assert numbers(lake) == list(range(50))


def test_small_files_are_merged_and_no_row_changes(
    spark: SparkSession, log: str, lake: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(log, "orders", 2)
    for n in range(3):
        fill(log, "orders", 20, first=n * 20)
        ingest(spark, log, ["orders"], lake, format=form, tasks=1)
    assert len(files(lake)) == 3
    monkeypatch.setattr(layout, "MIN_MERGE_FILES", 3)
    ingest(spark, log, ["orders"], lake)
    assert len(files(lake)) == 1
    assert numbers(lake) == list(range(60))
    assert [path.name for path in lake.iterdir() if path.name != "records"] == ["_shardyard"]


class FailingMaintenance:
    """Rows that are written, and files that can't be merged."""

    def __init__(self, failure: Exception) -> None:
        self.failure = failure
        self.calls: list[str] = []

    def write(self, _rows: Any, batch: int) -> None:
        self.calls.append(f"write {batch}")

    def maintain(self, _spark: Any) -> None:
        self.calls.append("maintain")
        raise self.failure


@pytest.mark.parametrize(
    "failure", [PySparkException("OPTIMIZE failed"), OSError("no space left"), Damaged("it", "rows"), KeyError("file")]
)
def test_maintenance_that_fails_is_logged_and_tried_again_after_further_batches(
    failure: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    records: Any = FailingMaintenance(failure)
    write, batch = batch_writer(records), Mock()
    for number in (18, 19, 20, 39):
        write(batch, number)
    assert records.calls == ["write 18", "write 19", "maintain", "write 20", "write 39", "maintain"]
    assert [record.message.startswith("maintenance of the lake ") for record in caplog.records] == [True, True]


def test_maintenance_that_finds_no_spark_any_more_says_so() -> None:
    with pytest.raises(SparkEnded):
        maintain(FailingMaintenance(ConnectionRefusedError()), Mock())  # type: ignore[arg-type]


# Invalid input: an error of one line, and nothing is written


def test_a_topic_that_does_not_exist_is_refused_before_anything_is_written(
    spark: SparkSession, log: str, lake: Path
) -> None:
    create(log, "orders", 1)
    with pytest.raises(UnknownTopic, match="topic 'refunds' does not exist"):
        ingest(spark, log, ["orders", "refunds"], lake)
    with pytest.raises(InvalidValue, match=r"topics is .*: expected at least one"):
        ingest(spark, log, [], lake)
    assert not lake.exists()


def test_a_folder_that_is_not_a_lake_is_not_changed(spark: SparkSession, log: str, lake: Path) -> None:
    create(log, "orders", 1)
    lake.mkdir()
    (lake / "thesis.txt").write_text("mine")
    with pytest.raises(NotOurs, match="is not a lake, nor an empty folder"):
        ingest(spark, log, ["orders"], lake)
    assert [path.name for path in lake.iterdir()] == ["thesis.txt"]


def test_a_lake_of_another_version_is_not_changed(spark: SparkSession, log: str, lake: Path) -> None:
    create(log, "orders", 1)
    fill(log, "orders", 5)
    ingest(spark, log, ["orders"], lake, format="parquet")
    before = files(lake)
    state = lake / "_shardyard" / "lake.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"schema_version": 3}))
    fill(log, "orders", 5, first=5)
    with pytest.raises(WrongSchemaVersion, match="has schema version 3, this Shardyard works with 2"):
        ingest(spark, log, ["orders"], lake)
    assert files(lake) == before


@pytest.mark.parametrize("damage", ["missing", "garbage", "another"])
def test_a_checkpoint_that_is_missing_or_damaged_is_not_started_again(
    spark: SparkSession, log: str, lake: Path, damage: str
) -> None:
    create(log, "orders", 1)
    fill(log, "orders", 5)
    ingest(spark, log, ["orders"], lake, format="parquet")
    metadata = lake / "_shardyard" / "checkpoint" / "metadata"
    match damage:
        case "missing":
            metadata.unlink()
        case "garbage":
            metadata.write_text("{")
        case _:
            metadata.write_text('{"id": "00000000-0000-0000-0000-000000000000"}')
    with pytest.raises(Damaged, match="it is not the checkpoint that this lake was filled with"):
        ingest(spark, log, ["orders"], lake)
    assert numbers(lake) == list(range(5))


def test_invalid_offsets_in_the_checkpoint_give_an_error_of_one_line(spark: SparkSession, log: str, lake: Path) -> None:
    create(log, "orders", 1)
    fill(log, "orders", 5)
    ingest(spark, log, ["orders"], lake, format="parquet")
    offsets = lake / "_shardyard" / "checkpoint" / "offsets"
    (offsets / ".0.crc").unlink()
    lines = (offsets / "0").read_text().splitlines()
    (offsets / "0").write_text("\n".join([*lines[:-1], '{"orders": {"0": 5}}']))
    fill(log, "orders", 5, first=5)
    with pytest.raises(InvalidCall, match=r"^offsets in the checkpoint is .*: expected those of a shardyard stream$"):
        ingest(spark, log, ["orders"], lake)
    assert numbers(lake) == list(range(5))


def test_a_lake_that_was_interrupted_while_it_was_created_is_created(spark: SparkSession, log: str, lake: Path) -> None:
    create(log, "orders", 1)
    fill(log, "orders", 5)
    (lake / "_shardyard").mkdir(parents=True)
    assert ingest(spark, log, ["orders"], lake).records == 5


def test_the_day_is_in_utc_and_other_tools_can_read_the_timestamp(spark: SparkSession, log: str, lake: Path) -> None:
    create(log, "orders", 1)
    append(log, "orders", 0, [Record("a", b"k", b"1", (), 1_760_000_000_000 - 32_000_000)])  # an hour or so before noon
    spark.conf.set("spark.sql.session.timeZone", "Pacific/Auckland")
    try:
        ingest(spark, log, ["orders"], lake)
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")
    (path,) = files(lake)
    assert path.parent.name == "day=2025-10-09"
    assert str(pq.read_schema(path).field("timestamp").type) == "timestamp[us, tz=UTC]"


def test_a_second_ingest_into_the_same_lake_is_refused(spark: SparkSession, log: str, lake: Path) -> None:
    create(log, "orders", 1)
    with Lake(lake).exclusive("parquet"), pytest.raises(Busy, match="another ingest is running"):
        ingest(spark, log, ["orders"], lake)


def test_a_deleted_topic_of_the_lake_fails_the_ingest_unless_data_may_be_lost(
    spark: SparkSession, log: str, lake: Path
) -> None:
    create(log, "orders", 1)
    create(log, "returns", 1)
    fill(log, "orders", 5)
    fill(log, "returns", 5)
    ingest(spark, log, ["orders", "returns"], lake, format="parquet")
    with blocking(log) as opened:
        opened.wait(opened.log.delete_topic("returns"))
    fill(log, "orders", 5, first=5)
    with pytest.raises(InvalidValue, match="topic of the lake is 'returns': expected a topic that still exists"):
        ingest(spark, log, ["orders"], lake)
    ingest(spark, log, ["orders"], lake, fail_on_data_loss=False)
    assert numbers(lake) == list(range(10))
    assert numbers(lake, "returns") == list(range(5))
