"""A lake of plain files: merging, and what is left of a batch or a merge that was interrupted."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from shardyard.model import Damaged
from shardyard.pipeline.lake import lake as layout
from shardyard.pipeline.lake.ingest import ingest
from shardyard.pipeline.lake.lake import Lake
from shardyard.pipeline.lake.parquet import Merge, ParquetRecords, check_rows
from tests.pipeline.lakes import files, numbers
from tests.pipeline.logs import create, fill, url


@pytest.fixture
def log(tmp_path: Path) -> str:
    return url(tmp_path)


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    return tmp_path / "lake"


def test_files_are_merged_up_to_a_size(tmp_path: Path) -> None:
    lake = Lake(tmp_path / "lake")
    folder = lake.records / "topic=orders" / "day=2026-01-31"
    folder.mkdir(parents=True)
    for name, size in {"a": 40, "b": 30, "c": 40, "d": 60, "e": 10}.items():
        (folder / f"{name}.parquet").write_bytes(b"x" * size)
    records = ParquetRecords(lake, 1)
    names = [[path.stem for path in merge.files] for merge in records.plan_merges(100, 2)]
    assert names == [["a", "b"], ["c", "e"]]
    assert records.plan_merges(100, 5) == []


def test_the_files_of_a_topic_are_those_of_published_batches_and_a_merged_file_instead_of_what_it_replaces(
    spark: SparkSession, tmp_path: Path
) -> None:
    lake = Lake(tmp_path / "lake")
    records = ParquetRecords(lake, 1)
    folder = lake.records / "topic=orders" / "day=2026-01-31"

    def names() -> list[str]:
        return [path.stem for path in records.files(spark, "orders")]

    with lake.exclusive("parquet"):
        assert names() == []
        folder.mkdir(parents=True)
        for name in ("batch-00000001-a", "batch-00000002-a", "batch-00000003-a", "merged-b"):
            (folder / f"{name}.parquet").touch()
        (lake.own / "published.json").write_text('{"batch": 2}')
        assert names() == ["batch-00000001-a", "batch-00000002-a", "merged-b"]
        replaced = str(records.files(spark, "orders")[0])
        merge = {"staged": "", "target": str(folder / "merged-b.parquet"), "remove": [replaced]}
        (lake.own / "merge.json").write_text(json.dumps(merge))
        assert names() == ["batch-00000002-a", "merged-b"]


# Interruptions


def test_a_batch_that_was_interrupted_while_its_files_were_published_is_finished(
    spark: SparkSession, log: str, lake: Path
) -> None:
    create(log, "orders", 2)
    fill(log, "orders", 40)
    ingest(spark, log, ["orders"], lake, format="parquet", tasks=2)
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
    ingest(spark, log, ["orders"], lake, format="parquet", tasks=2)
    unpublish(lake, files(lake))
    (lake / "_shardyard" / "complete.json").unlink()
    ingest(spark, log, ["orders"], lake)
    assert numbers(lake) == list(range(40))


def test_a_merge_that_was_interrupted_is_finished(
    spark: SparkSession, log: str, lake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(log, "orders", 2)
    for n in range(3):
        fill(log, "orders", 20, first=n * 20)
        ingest(spark, log, ["orders"], lake, format="parquet", tasks=1)

    def crash(_self: Path, missing_ok: bool = False) -> None:
        raise KeyboardInterrupt(missing_ok)

    monkeypatch.setattr(layout, "MIN_MERGE_FILES", 3)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", crash)
        with pytest.raises(KeyboardInterrupt):
            ingest(spark, log, ["orders"], lake)
    assert len(files(lake)) == 4  # the merged one and those it replaces
    ingest(spark, log, ["orders"], lake)
    assert len(files(lake)) == 1
    assert numbers(lake) == list(range(60))


def test_a_merge_that_failed_is_finished_before_the_next_one_is_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = Lake(tmp_path / "lake")
    records = ParquetRecords(lake, 1)
    folder, staged = lake.records / "topic=orders" / "day=2026-01-31", records.new_staging()
    with lake.exclusive("parquet"):
        for path in (folder / "a.parquet", folder / "b.parquet", staged / "c.parquet"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()

        def fail(_self: Path, missing_ok: bool = False) -> None:  # noqa: ARG001 as Path has it
            raise OSError("input/output error")

        with monkeypatch.context() as patch, pytest.raises(OSError, match="input/output error"):
            patch.setattr(Path, "unlink", fail)
            records.apply_merge(Merge(folder, tuple(sorted(folder.iterdir()))), staged)
        assert len(files(lake.root)) == 3
        records.maintain(None)  # type: ignore[arg-type]  # there is nothing left to merge
    assert [path.name for path in files(lake.root)] == ["merged-c.parquet"]


def test_a_merge_never_replaces_files_by_one_with_another_number_of_rows(tmp_path: Path) -> None:
    for name, rows in {"a": 3, "b": 4}.items():
        pq.write_table(pa.table({"x": [0] * rows}), tmp_path / f"{name}.parquet")
    staged = tmp_path / "staged"
    staged.mkdir()
    pq.write_table(pa.table({"x": [0] * 6}), staged / "c.parquet")
    with pytest.raises(Damaged, match="2 files with 7 rows became one with 6"):
        check_rows(Merge(tmp_path, (tmp_path / "a.parquet", tmp_path / "b.parquet")), staged)
