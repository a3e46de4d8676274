"""A lake that is a Delta table: exactly once, converted from plain files, merged, vacuumed, and read by other jobs."""

import contextlib
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from shardyard.cli.pipeline.options import read_loads
from shardyard.messaging.history.manifest import load_manifest
from shardyard.model import InvalidValue, Record
from shardyard.pipeline.delta_jars import MissingDelta
from shardyard.pipeline.history.history import history
from shardyard.pipeline.lake import delta, formats
from shardyard.pipeline.lake import lake as layout
from shardyard.pipeline.lake.delta import DeltaRecords
from shardyard.pipeline.lake.delta_log import commit_batch, create_table, has_batch, open_table
from shardyard.pipeline.lake.formats import records_of
from shardyard.pipeline.lake.ingest import by_day, ingest
from shardyard.pipeline.lake.lake import Lake
from shardyard.pipeline.spark_errors import SparkFailed
from shardyard.wire.inbox import InboxEntry, encode_entry
from tests.cli.invocation import Shell
from tests.pipeline.lakes import files, numbers, require_delta
from tests.pipeline.logs import append, create, fill, url


@pytest.fixture(autouse=True)
def delta_lake(spark: SparkSession) -> None:
    require_delta(spark)


@pytest.fixture
def log(tmp_path: Path) -> str:
    log = url(tmp_path)
    create(log, "orders", 2)
    fill(log, "orders", 40)
    return log


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    return tmp_path / "lake"


def forget_commit(lake: Path, batch: int) -> None:
    """Restore the checkpoint as it was before the batch was done, as if the driver had died then."""
    for name in (f"{batch}", f".{batch}.crc"):
        (lake / "_shardyard" / "checkpoint" / "commits" / name).unlink()


def test_a_new_lake_is_a_delta_table_that_others_read_also_as_it_was_and_a_replayed_batch_is_in_it_once(
    spark: SparkSession, log: str, lake: Path
) -> None:
    ingest(spark, log, ["orders"], lake)
    forget_commit(lake, 0)
    fill(log, "orders", 10, first=40)
    done = ingest(spark, log, ["orders"], lake)
    assert (done.format, done.records, done.batches) == ("delta", 10, 1)
    assert numbers(lake) == list(range(50))
    table = DeltaTable(lake / "records")
    assert table.metadata().partition_columns == ["topic", "day"]
    assert (table.protocol().min_reader_version, table.protocol().min_writer_version) == (1, 2)
    table.load_as_version(1)
    assert table.to_pyarrow_table().num_rows == 40


def test_files_have_the_range_of_what_readers_select_by_and_not_the_columns_that_are_in_their_paths(
    spark: SparkSession, log: str, lake: Path
) -> None:
    ingest(spark, log, ["orders"], lake, tasks=1)
    (path,) = files(lake)
    assert tuple(pq.read_schema(path).names) == layout.COLUMNS
    rows = DeltaTable(lake / "records").to_pyarrow_table().to_pylist()
    (added,) = pa.table(DeltaTable(lake / "records").get_add_actions(flatten=True)).to_pylist()
    assert added["num_records"] == len(rows) == 40
    assert (added["partition.topic"], added["partition.day"]) == ("orders", rows[0]["day"])
    for column in ("partition", "offset", "timestamp"):
        values = [row[column] for row in rows]
        assert (added[f"min.{column}"], added[f"max.{column}"]) == (min(values), max(values))
    assert not added.keys() & {"min.id", "min.key", "min.value"}


CONSTRAINT = "ADD CONSTRAINT positive CHECK (offset >= 0)"
"""Delta Lake in Spark writes to a table that has one."""


class HeldDriver:
    """A driver that stops in the middle of a batch, with its transaction begun, until it is told to go on."""

    def __init__(self, spark: SparkSession, log: str, lake: Path, scratch: Path, change: str | None = None) -> None:
        """`change`: of the table, by `ALTER TABLE`."""
        self._spark, self._lake, self._change = spark, Lake(lake), change
        self._started, self._go_on = scratch / "started", scratch / "go-on"
        self.records = DeltaRecords(self._lake, 1)
        self.rows = spark.read.format("shardyard").options(log=log, topics="orders").load().transform(by_day)

    def __enter__(self) -> "HeldDriver":
        started, go_on = self._started, self._go_on

        def hold(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            started.touch()
            while not go_on.exists():
                time.sleep(0.02)
            yield from batches

        self._stack = contextlib.ExitStack()
        self._stack.enter_context(self._lake.exclusive("delta"))
        self._driver = self._stack.enter_context(ThreadPoolExecutor(1))
        self._lake.checkpoint.mkdir()
        (self._lake.checkpoint / "metadata").write_text('{"id": "one"}')
        self.records.prepare(self._spark)
        if self._change is not None:
            self._spark.sql(f"ALTER TABLE delta.`{self._lake.records}` {self._change}")
        self._write = self._driver.submit(self.records.write, self.rows.mapInArrow(hold, self.rows.schema), 0)
        while not started.exists():
            assert not self._write.done()
            time.sleep(0.02)
        return self

    def __exit__(self, *_: object) -> None:
        self._go_on.touch()
        with self._stack:
            self._write.result()


@pytest.mark.parametrize("change", [None, CONSTRAINT])
def test_a_batch_that_a_killed_driver_still_commits_is_in_the_table_once(
    spark: SparkSession, log: str, lake: Path, tmp_path: Path, change: str | None
) -> None:
    with HeldDriver(spark, log, lake, tmp_path, change) as other:
        other.records.write(other.rows, 0)
    assert numbers(lake) == list(range(40))
    assert DeltaTable(lake / "records").version() == (1 if change is None else 2)


def test_rows_may_be_deleted_from_the_table_while_a_batch_is_written(
    spark: SparkSession, log: str, lake: Path, tmp_path: Path
) -> None:
    with HeldDriver(spark, log, lake, tmp_path) as other:
        other.rows.write.format("delta").mode("append").save(str(lake / "records"))
        spark.sql(f"DELETE FROM delta.`{lake / 'records'}` WHERE topic = 'orders'")
    assert numbers(lake) == list(range(40))
    assert DeltaTable(lake / "records").version() == 3


def test_a_table_that_was_given_constraints_is_written_by_delta_lake_which_checks_them(
    spark: SparkSession, log: str, lake: Path
) -> None:
    ingest(spark, log, ["orders"], lake)
    spark.sql(f"ALTER TABLE delta.`{lake / 'records'}` {CONSTRAINT}")
    fill(log, "orders", 10, first=40)
    ingest(spark, log, ["orders"], lake)
    assert numbers(lake) == list(range(50))
    spark.sql(f"ALTER TABLE delta.`{lake / 'records'}` ADD CONSTRAINT few CHECK (offset < 25)")
    fill(log, "orders", 10, first=50)
    with pytest.raises(SparkFailed, match="few"):
        ingest(spark, log, ["orders"], lake)
    assert numbers(lake) == list(range(50))


def test_records_with_a_wrong_timestamp_do_not_end_the_ingest(spark: SparkSession, log: str, lake: Path) -> None:
    ingest(spark, log, ["orders"], lake)
    append(log, "orders", 0, [Record("late", b"k", b"40", (), 8_500_000_000_000_000)])  # in the year 271 324
    ingest(spark, log, ["orders"], lake)
    fill(log, "orders", 9, first=41)
    ingest(spark, log, ["orders"], lake)
    rows = delta.read_table(spark, lake / "records")
    assert sorted(int(row["value"]) for row in rows.select("value").collect()) == list(range(50))


def test_the_log_has_a_checkpoint_after_ten_commits(tmp_path: Path) -> None:
    create_table(tmp_path)
    for batch in range(10):
        table = open_table(tmp_path)
        assert table is not None
        assert not has_batch(table, "query", batch)
        commit_batch(table, tmp_path, [], "query", batch)
    table = open_table(tmp_path)
    assert table is not None
    assert has_batch(table, "query", 9)
    assert (tmp_path / "_delta_log" / "_last_checkpoint").exists()


def test_a_lake_of_plain_files_is_converted_also_if_its_last_batch_was_not_published(
    spark: SparkSession, log: str, lake: Path
) -> None:
    ingest(spark, log, ["orders"], lake, format="parquet", tasks=1)
    before = files(lake)
    own = lake / "_shardyard"
    staged = own / "staging" / json.loads((own / "complete.json").read_text())["staged"]
    for path in before:
        target = staged / path.parent.relative_to(lake / "records") / path.name.removeprefix("batch-00000000-")
        target.parent.mkdir(parents=True, exist_ok=True)
        path.rename(target)
    (own / "published.json").unlink()
    forget_commit(lake, 0)
    fill(log, "orders", 10, first=40)
    assert ingest(spark, log, ["orders"], lake, format="delta").format == "delta"
    assert numbers(lake) == list(range(50))
    assert set(before) < set(files(lake))


def test_a_delta_table_is_not_turned_into_plain_files_and_is_refused_without_delta(
    spark: SparkSession, log: str, lake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Lake(lake).exclusive("delta"):
        pass
    with pytest.raises(InvalidValue, match=r"format is 'parquet': expected delta, which the lake .* has already"):
        ingest(spark, log, ["orders"], lake, format="parquet")
    monkeypatch.setattr(formats, "has_delta", lambda _: False)
    with pytest.raises(MissingDelta):
        ingest(spark, log, ["orders"], lake)
    assert ingest(spark, log, ["orders"], lake.with_name("other")).format == "parquet"


def test_merged_files_are_kept_until_their_retention_is_over_and_unfinished_ones_for_a_day(
    spark: SparkSession, log: str, lake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stored() -> list[Path]:
        return sorted((lake / "records").glob("topic=*/*/*.parquet"))

    ingest(spark, log, ["orders"], lake, tasks=1)
    fill(log, "orders", 10, first=40)
    monkeypatch.setattr(layout, "MIN_MERGE_FILES", 2)
    ingest(spark, log, ["orders"], lake, tasks=1)
    assert (len(files(lake)), len(stored())) == (1, 3)

    retention = "'delta.deletedFileRetentionDuration' = '0 hours'"
    spark.sql(f"ALTER TABLE delta.`{lake / 'records'}` SET TBLPROPERTIES ({retention})")
    left = lake / "_shardyard" / "staging" / "of-a-killed-run"
    left.mkdir(parents=True)
    records_of(Lake(lake)).maintain(spark)
    assert (len(stored()), left.exists()) == (3, True), "a day has not passed"
    monkeypatch.setattr(delta, "VACUUM_SECONDS", 0.0)
    records_of(Lake(lake)).maintain(spark)
    assert (stored(), left.exists()) == (files(lake), False)
    assert numbers(lake) == list(range(50))


def test_balance_and_history_read_the_table_and_not_the_files_that_it_has_replaced(
    spark: SparkSession, tmp_path: Path, lake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = url(tmp_path)
    create(log, "inbox", 1)

    def send(first: int) -> None:
        entries = [InboxEntry(n << 22, "alice", "bob", "phone", n, n, f"message {n}") for n in range(first, first + 5)]
        append(log, "inbox", 0, [Record(str(e.id), b"bob", encode_entry(e), (), e.at) for e in entries])
        ingest(spark, log, ["inbox"], lake, tasks=1)

    send(1_760_000_000_000)
    assert history(spark, lake, tmp_path / "tables").messages == 5
    monkeypatch.setattr(layout, "MIN_MERGE_FILES", 2)
    send(1_760_000_000_005)
    assert len(records_of(Lake(lake)).files(spark, "inbox")) == 1
    done = history(spark, lake, tmp_path / "tables")
    assert (done.records, done.messages, done.duplicates, done.total) == (5, 5, 0, 10)
    assert load_manifest(tmp_path / "tables").lake_files == (str(files(lake)[0].relative_to(lake / "records")),)
    loads = read_loads(spark, None, None, lake / "records", "key", "value", None, "partition")
    assert loads.count() == 10


def test_audit_and_plan_read_the_table_and_not_the_files_that_it_has_replaced(
    spark: SparkSession,
    log: str,
    lake: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ingest(spark, log, ["orders"], lake, tasks=1)
    fill(log, "orders", 10, first=40)
    monkeypatch.setattr(layout, "MIN_MERGE_FILES", 2)
    ingest(spark, log, ["orders"], lake, tasks=1)
    assert len(files(lake)) < len(list((lake / "records").rglob("*.parquet")))
    shell = Shell(monkeypatch, capsys)
    records = ("--parquet", str(lake / "records"), "--partition", "partition")
    audit = ("pipeline", "audit", "--log", log, "--sent", "orders", *records, "--order", "offset", "--at", "timestamp")
    found = shell.json(*audit, "--exactly-once")
    assert (found["ok"], found["sent"], found["delivered"], found["ordered"]) == (True, 50, 50, 50)
    assert found["latency"]["records"] == 50

    plan = shell.json("pipeline", "plan", *records, "--bytes", "value", "--members", "2")
    assert (plan["load"]["records"], plan["load"]["bytes"], plan["load"]["distinct_keys"]) == (50, 90, 50)
    assert sum(plan["load"]["partition_records"]) == 50
    assert [count["partitions"] for count in plan["partition_counts"]] == [2, 4, 8]

    fill(log, "orders", 1, first=50)
    code, out = shell.run(*audit, "--json")
    found = json.loads(out)
    assert (code, found["broken"], found["lost"], found["delivered"]) == (1, ["lost"], 1, 50)
