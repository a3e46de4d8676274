"""The log of a Delta table, without Spark."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from shardyard.model import InvalidValue
from shardyard.pipeline.lake import delta
from shardyard.pipeline.lake.delta import DeltaRecords
from shardyard.pipeline.lake.delta_log import SCHEMA, commit_batch, create_table, open_table
from shardyard.pipeline.lake.lake import Lake


def commit(folder: Path, batch: int) -> None:
    """Commit a batch of one row."""
    path = folder / "topic=orders" / "day=2026-01-02" / f"{batch}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({f.name: pa.array([None], f.type) for f in SCHEMA if f.name not in {"topic", "day"}}), path)
    table = open_table(folder)
    assert table is not None
    commit_batch(table, folder, [path], "query", batch)


def test_a_table_with_a_column_that_is_not_null_is_left_to_spark(tmp_path: Path) -> None:
    DeltaTable.create(tmp_path / "t", pa.schema([pa.field("key", pa.binary(), nullable=False)]))
    assert open_table(tmp_path / "t") is None


@pytest.mark.parametrize("name", ["per%20cent", "back\\slash"])
def test_a_folder_that_would_be_looked_for_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidValue, match="a path without %"):
        create_table(tmp_path / name)
    assert not (tmp_path / name).exists()
    assert open_table(tmp_path / name) is None


def test_the_checkpoint_of_the_log_is_durable_before_the_file_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = Lake(tmp_path)
    create_table(lake.records)
    synced: list[str] = []
    monkeypatch.setattr(delta, "fsync", lambda path: synced.append(path.name))
    for batch in range(12):
        commit(lake.records, batch)
        DeltaRecords(lake, 1)._sync("query", batch)
    (checkpoint,) = (lake.records / "_delta_log").glob("*.checkpoint.parquet")
    assert synced.index(checkpoint.name) < synced.index("_last_checkpoint")
