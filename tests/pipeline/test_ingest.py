"""ingest: the lake holds every record of its topics exactly once."""

import json
from pathlib import Path

import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
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
from shardyard.pipeline.lake import ingest as ingest_module
from shardyard.pipeline.lake.files import COLUMNS, Lake, Merge
from shardyard.pipeline.lake.ingest import Progress, ingest
from tests.pipeline.logs import append, create, fill, url


@pytest.fixture
def log(tmp_path: Path) -> str:
    return url(tmp_path)


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    return tmp_path / "lake"


def numbers(lake: Path, topic: str = "orders") -> list[int]:
    """The values in the lake, read with pyarrow alone."""
    files = ds.dataset(lake / "records", format="parquet", partitioning="hive")
    table = files.to_table(filter=ds.field("topic") == topic)
    return sorted(int(value) for value in table["value"].to_pylist())


def files(lake: Path) -> list[Path]:
    return sorted((lake / "records").rglob("*.parquet"))


def test_the_lake_holds_every_record_once_by_topic_and_day(spark: SparkSession, log: str, lake: Path) -> None:
    create(log, "orders", 3)
    create(log, "returns", 1)
    fill(log, "orders", 100)
    fill(log, "returns", 10)
    done = ingest(spark, log, ["orders", "returns"], lake)
    assert (done.records, done.topics) == (110, ("orders", "returns"))
    assert numbers(lake) == list(range(100))
    assert numbers(lake, "returns") == list(range(10))
    folders = {path.parent.relative_to(lake / "records") for path in files(lake)}
    assert folders == {Path("topic=orders/day=2025-10-09"), Path("topic=returns/day=2025-10-09")}
    assert tuple(pq.read_schema(files(lake)[0]).names) == COLUMNS


def test_an_ingest_continues_where_the_last_one_stopped(spark: SparkSession, log: str, lake: Path) -> None:
    create(log, "orders", 3)
    fill(log, "orders", 100)
    ingest(spark, log, ["orders"], lake)
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
        continuous=True,
        every=0.1,
        on_progress=append_more,
        stopped=lambda: seen[-1:] == [Progress(50, 0)],
    )
    assert done.records == 50
    assert numbers(lake) == list(range(50))


def write_three_files(spark: SparkSession, log: str, lake: Path) -> None:
    create(log, "orders", 2)
    for n in range(3):
        fill(log, "orders", 20, first=n * 20)
        ingest(spark, log, ["orders"], lake, tasks=1)


def test_small_files_are_merged_and_no_row_changes(
    spark: SparkSession, log: str, lake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_three_files(spark, log, lake)
    assert len(files(lake)) == 3
    monkeypatch.setattr(ingest_module, "MIN_MERGE_FILES", 3)
    ingest(spark, log, ["orders"], lake)
    assert len(files(lake)) == 1
    assert numbers(lake) == list(range(60))
    assert [path.name for path in lake.iterdir() if path.name != "records"] == ["_shardyard"]


def test_files_are_merged_up_to_a_size(tmp_path: Path) -> None:
    lake = Lake(tmp_path / "lake")
    folder = lake.records / "topic=orders" / "day=2026-01-31"
    folder.mkdir(parents=True)
    for name, size in {"a": 40, "b": 30, "c": 40, "d": 60, "e": 10}.items():
        (folder / f"{name}.parquet").write_bytes(b"x" * size)
    names = [[path.stem for path in merge.files] for merge in lake.plan_merges(100, 2)]
    assert names == [["a", "b"], ["c", "e"]]
    assert lake.plan_merges(100, 5) == []


def test_the_files_of_a_topic_are_those_of_published_batches_and_a_merged_file_instead_of_what_it_replaces(
    tmp_path: Path,
) -> None:
    lake = Lake(tmp_path / "lake")
    folder = lake.records / "topic=orders" / "day=2026-01-31"
    with lake.exclusive():
        assert lake.files("orders") == []
        folder.mkdir(parents=True)
        for name in ("batch-00000001-a", "batch-00000002-a", "batch-00000003-a", "merged-b"):
            (folder / f"{name}.parquet").touch()
        own = tmp_path / "lake" / "_shardyard"
        (own / "published.json").write_text('{"batch": 2}')
        assert [path.stem for path in lake.files("orders")] == ["batch-00000001-a", "batch-00000002-a", "merged-b"]
        merge = {"staged": "", "target": str(folder / "merged-b.parquet"), "remove": [str(lake.files("orders")[0])]}
        (own / "merge.json").write_text(json.dumps(merge))
        assert [path.stem for path in lake.files("orders")] == ["batch-00000002-a", "merged-b"]


# Interruptions


def test_a_batch_that_was_interrupted_while_its_files_were_published_is_finished(
    spark: SparkSession, log: str, lake: Path
) -> None:
    create(log, "orders", 2)
    fill(log, "orders", 40)
    ingest(spark, log, ["orders"], lake, tasks=2)
    assert len(files(lake)) == 2
    unpublish(lake, files(lake)[1:])
    ingest(spark, log, ["orders"], lake)
    assert numbers(lake) == list(range(40))


def unpublish(lake: Path, last: list[Path]) -> None:
    """Restore the state before the last files of batch 0 were published, as if the driver had died then."""
    own = lake / "_shardyard"
    staged = own / "staging" / json.loads((own / "complete.json").read_text())["staged"]
    for path in last:
        target = staged / path.parent.relative_to(lake / "records") / path.name.removeprefix("batch-00000000-")
        target.parent.mkdir(parents=True, exist_ok=True)
        path.rename(target)
    (own / "published.json").unlink()
    (own / "checkpoint" / "commits" / "0").unlink()
    (own / "checkpoint" / "commits" / ".0.crc").unlink()


def test_a_batch_that_was_interrupted_while_it_was_written_is_written_again(
    spark: SparkSession, log: str, lake: Path
) -> None:
    create(log, "orders", 2)
    fill(log, "orders", 40)
    ingest(spark, log, ["orders"], lake, tasks=2)
    unpublish(lake, files(lake))
    (lake / "_shardyard" / "complete.json").unlink()
    ingest(spark, log, ["orders"], lake)
    assert numbers(lake) == list(range(40))


def test_a_merge_that_was_interrupted_is_finished(
    spark: SparkSession, log: str, lake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_three_files(spark, log, lake)

    def crash(_self: Path, missing_ok: bool = False) -> None:
        raise KeyboardInterrupt(missing_ok)

    monkeypatch.setattr(ingest_module, "MIN_MERGE_FILES", 3)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", crash)
        with pytest.raises(KeyboardInterrupt):
            ingest(spark, log, ["orders"], lake)
    assert len(files(lake)) == 4  # the merged one and those it replaces
    ingest(spark, log, ["orders"], lake)
    assert len(files(lake)) == 1
    assert numbers(lake) == list(range(60))


def test_a_merge_never_replaces_files_by_one_with_another_number_of_rows(tmp_path: Path) -> None:
    import pyarrow as pa  # noqa: PLC0415

    for name, rows in {"a": 3, "b": 4}.items():
        pq.write_table(pa.table({"x": [0] * rows}), tmp_path / f"{name}.parquet")
    staged = tmp_path / "staged"
    staged.mkdir()
    pq.write_table(pa.table({"x": [0] * 6}), staged / "c.parquet")
    with pytest.raises(Damaged, match="2 files with 7 rows became one with 6"):
        ingest_module.check_rows(Merge(tmp_path, (tmp_path / "a.parquet", tmp_path / "b.parquet")), staged)


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
    ingest(spark, log, ["orders"], lake)
    before = files(lake)
    state = lake / "_shardyard" / "lake.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"schema_version": 2}))
    fill(log, "orders", 5, first=5)
    with pytest.raises(WrongSchemaVersion, match="has schema version 2, this Shardyard works with 1"):
        ingest(spark, log, ["orders"], lake)
    assert files(lake) == before


@pytest.mark.parametrize("damage", ["missing", "garbage", "another"])
def test_a_checkpoint_that_is_missing_or_damaged_is_not_started_again(
    spark: SparkSession, log: str, lake: Path, damage: str
) -> None:
    create(log, "orders", 1)
    fill(log, "orders", 5)
    ingest(spark, log, ["orders"], lake)
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
    ingest(spark, log, ["orders"], lake)
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
    with Lake(lake).exclusive(), pytest.raises(Busy, match="another ingest is running"):
        ingest(spark, log, ["orders"], lake)


def test_a_deleted_topic_of_the_lake_fails_the_ingest_unless_data_may_be_lost(
    spark: SparkSession, log: str, lake: Path
) -> None:
    create(log, "orders", 1)
    create(log, "returns", 1)
    fill(log, "orders", 5)
    fill(log, "returns", 5)
    ingest(spark, log, ["orders", "returns"], lake)
    with blocking(log) as opened:
        opened.wait(opened.log.delete_topic("returns"))
    fill(log, "orders", 5, first=5)
    with pytest.raises(InvalidValue, match="topic of the lake is 'returns': expected a topic that still exists"):
        ingest(spark, log, ["orders"], lake)
    ingest(spark, log, ["orders"], lake, fail_on_data_loss=False)
    assert numbers(lake) == list(range(10))
    assert numbers(lake, "returns") == list(range(5))
