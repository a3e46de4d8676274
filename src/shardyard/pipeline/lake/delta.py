"""The rows of a lake as a Delta table, which Spark, DuckDB, Polars and others can read while it is written.

Delta's log says which files are the table. A batch is one commit, with the query and the number of the batch in it, so
that a batch that Spark replays is recognised.

Spark writes the files of a batch as plain Parquet files, and `delta_log` commits them. Delta Lake in Spark converts,
merges and vacuums, and it writes batches to tables that ask more of a writer than a newly created one does.
"""

import contextlib
import json
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import unquote

from pyspark.sql import DataFrame, SparkSession

from shardyard.pipeline.atomic_files import fsync, write_json
from shardyard.pipeline.delta_jars import MissingDelta, has_delta
from shardyard.pipeline.lake import lake as layout
from shardyard.pipeline.lake.delta_log import (
    PROPERTIES,
    can_be_committed,
    commit_batch,
    create_table,
    has_batch,
    open_table,
)
from shardyard.pipeline.lake.lake import Lake
from shardyard.pipeline.lake.parquet import ParquetRecords, publish_file
from shardyard.pipeline.spark_errors import SPARK_ERRORS

VACUUM_SECONDS = 24 * 3600.0
"""How often files that the table no longer has are deleted: those that are older than its retention, seven days."""

_OPTIMIZE = {
    "spark.databricks.delta.optimize.minFileSize": str(layout.FILE_BYTES // 2),
    "spark.databricks.delta.optimize.maxFileSize": str(layout.FILE_BYTES),
}
_VACUUM = {
    "spark.sql.sources.parallelPartitionDiscovery.parallelism": "16"
}  # by default it lists files with 10 000 tasks
_CONFLICT = "DELTA_CONCURRENT"
"""How the errors begin by which Delta reports that another writer was faster."""


def is_delta_table(folder: Path) -> bool:
    return any((folder / "_delta_log").glob("*.json"))


def read_table(spark: SparkSession, path: Path) -> DataFrame:
    """The rows of a Delta table, or of Parquet files: a file or a folder."""
    if not is_delta_table(path):
        return spark.read.parquet(str(path))
    if not has_delta(spark):
        raise MissingDelta
    return spark.read.format("delta").load(str(path))


class DeltaRecords:
    """The table, in the folder `records` of the lake."""

    def __init__(self, lake: Lake, tasks: int) -> None:
        """`tasks`: how many write a batch; each writes a file for each topic and day."""
        self._lake = lake
        self._tasks = tasks
        self._table = f"delta.`{str(lake.records).replace('`', '``')}`"
        self._plain = ParquetRecords(lake, tasks)
        """What the lake was before it was converted, if it was."""

    def files(self, spark: SparkSession, topic: str) -> list[Path]:
        """See `Records`."""
        if not is_delta_table(self._lake.records):  # it is being converted
            return self._plain.files(spark, topic)
        return [path for path in self._files(spark) if path.parts[-3] == f"topic={topic}"]

    def _files(self, spark: SparkSession) -> list[Path]:
        found = read_table(spark, self._lake.records).inputFiles()
        return sorted(self._lake.records / file[file.rindex("/topic=") + 1 :] for file in found)

    def prepare(self, spark: SparkSession) -> None:
        """See `Records`. Converts plain files, which stay where they are."""
        if is_delta_table(self._lake.records):
            return
        self._plain.prepare()
        self._plain.finish_batch()
        if any(self._lake.records.glob("topic=*/day=*/*.parquet")):
            source = self._table.replace("delta.", "parquet.", 1)
            spark.sql(f"CONVERT TO DELTA {source} NO STATISTICS PARTITIONED BY (topic STRING, day DATE)")
            properties = ", ".join(f"'{name}' = '{value}'" for name, value in PROPERTIES.items())
            spark.sql(f"ALTER TABLE {self._table} SET TBLPROPERTIES ({properties})")
        else:
            create_table(self._lake.records)
            self._sync()
        self._set_vacuumed()

    def write(self, records: DataFrame, batch: int) -> None:
        """See `Records`."""
        if self._plain.is_published(batch):  # before the lake was converted
            return
        self._lake.bind_checkpoint()
        query = str(self._lake.query_id())
        if not self._commit(records, query, batch):
            self._write_by_delta(records, query, batch)
        self._sync(query, batch)

    def _commit(self, records: DataFrame, query: str, batch: int) -> bool:
        """Write the batch, unless the table has it. False if that is left to Delta Lake in Spark."""
        table = open_table(self._lake.records)
        if table is None or has_batch(table, query, batch):
            return table is not None
        staged = self._plain.stage(records)
        files = sorted(staged.glob("topic=*/day=*/*.parquet"))
        if can_be_committed(files):
            published = [self._lake.records / path.relative_to(staged) for path in files]
            for path, target in zip(files, published, strict=True):
                fsync(path)
                publish_file(path, target)
            commit_batch(table, self._lake.records, published, query, batch)
        shutil.rmtree(staged, ignore_errors=True)
        return can_be_committed(files)

    def _write_by_delta(self, records: DataFrame, query: str, batch: int) -> None:
        """Let Delta Lake in Spark write the batch, unless the table has it."""
        writer = records.coalesce(self._tasks).write.format("delta").mode("append")
        writer = writer.options(txnAppId=query, txnVersion=str(batch))
        path = str(self._lake.records)
        if not _unless_another_writer_was_faster(lambda: writer.save(path)):
            # The JVM of a driver that was killed has finished this batch meanwhile. If so, this does nothing.
            writer.save(path)

    def maintain(self, spark: SparkSession) -> None:
        """See `Records`."""
        if _with_many_small(self._lake.records.glob("topic=*/day=*/*.parquet")):  # quicker to see than the table's own
            self._merge(spark, _with_many_small(self._files(spark)))
        if time.time() - self._lake.load("vacuumed.json", {"at": 0})["at"] >= VACUUM_SECONDS:
            with _settings(spark, _VACUUM):
                spark.sql(f"VACUUM {self._table}").collect()
            self._plain.clear_staging(VACUUM_SECONDS)  # not at once: a killed driver may still write and commit a batch
            self._set_vacuumed()

    def _merge(self, spark: SparkSession, folders: Sequence[Path]) -> None:
        if folders:
            where = " OR ".join(f"({_value(folder.parent)} AND {_value(folder)})" for folder in folders)
            with _settings(spark, _OPTIMIZE):
                _unless_another_writer_was_faster(lambda: spark.sql(f"OPTIMIZE {self._table} WHERE {where}").collect())
            self._sync()

    def _set_vacuumed(self) -> None:
        write_json(self._lake.own / "vacuumed.json", {"at": time.time()})

    def _sync(self, query: str | None = None, batch: int | None = None) -> None:
        """Make the commit of a batch durable, by default the last commit, with its files: Spark leaves that to the
        operating system. Only then is the batch done in the checkpoint."""
        log = self._lake.records / "_delta_log"
        for path in sorted(log.glob("*.json"), reverse=True):
            actions = [json.loads(line) for line in path.read_text().splitlines()]
            transactions = [(action["txn"]["appId"], action["txn"]["version"]) for action in actions if "txn" in action]
            if query is None or (query, batch) in transactions:
                break
        else:
            return  # an old commit that Delta has cleaned up
        added = [self._lake.records / unquote(action["add"]["path"]) for action in actions if "add" in action]
        files = [file for file in added if file.exists()]  # those of an old commit may be merged and vacuumed
        folders = {folder for file in files for folder in (file.parent, file.parent.parent)}
        written = sorted(file for file in log.iterdir() if file.name >= path.stem)  # last of them _last_checkpoint
        for each in (*files, *folders, self._lake.records, *written, log):
            fsync(each)


def _with_many_small(files: Iterable[Path]) -> list[Path]:
    """The folders that have enough small files to merge them."""
    small = Counter(path.parent for path in files if path.stat().st_size < layout.FILE_BYTES // 2)
    return [folder for folder, count in small.items() if count >= layout.MIN_MERGE_FILES]


def _value(folder: Path) -> str:
    """The condition that a folder such as `topic=orders` stands for."""
    column, value = folder.name.split("=", 1)
    return f"{column} = '{value}'"


@contextlib.contextmanager
def _settings(spark: SparkSession, settings: Mapping[str, str]) -> Iterator[None]:
    """Change settings of the session within the block."""
    before = {name: spark.conf.get(name, None) for name in settings}
    for name, value in settings.items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name, old in before.items():
            spark.conf.unset(name) if old is None else spark.conf.set(name, old)


def _unless_another_writer_was_faster(commit: Callable[[], object]) -> bool:
    """Whether this commit succeeded. False if another writer committed something that it conflicts with."""
    try:
        commit()
    except SPARK_ERRORS as error:
        if _CONFLICT not in str(error):
            raise
        return False
    return True
