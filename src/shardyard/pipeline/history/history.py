"""history: the inbox in a lake -> tables of conversations for fast paging, which `messaging.history.tables` reads.

A run reads the files that are new in the lake and adds what is new in them. Rows of a bucket are written as one sorted
file. Smaller files of the bucket are merged into it, so that a bucket always has few of them. A run that is killed
leaves the tables as they were.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

import msgspec
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, DataFrameWriter, SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812 as everybody calls it

from shardyard.messaging.history.manifest import Manifest, MessagesFile, ReadUpTo
from shardyard.model import InvalidValue, RetryLater
from shardyard.pipeline.history.entries import MARKS, MESSAGES, entries, highest_marks, marks, messages, with_bucket
from shardyard.pipeline.history.files import HistoryFiles, NewRows, describe, to_compare, to_merge
from shardyard.pipeline.lake.formats import records_of
from shardyard.pipeline.lake.lake import Lake
from shardyard.pipeline.spark_errors import translate_spark_errors
from shardyard.wire.inbox import TOPIC

ROW_GROUP_BYTES = 128 * 1024
"""A page reads one row group, or two."""
EXAMPLES = 5
"""Malformed records that are reported."""
ATTEMPTS = 5
"""How often a run starts again because files of the lake were merged while it read them."""
_ORDER = ("user_a", "user_b", "id")

OnStep = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class MalformedRecord:
    """A record of the topic that is no entry of an inbox."""

    partition: int
    offset: int
    problem: str


@dataclass(frozen=True, slots=True)
class HistoryRun:
    """The result of a run."""

    tables: str
    version: int
    """Of the tables. A run that finds nothing new leaves it as it was."""
    records: int
    """Records that were new in the lake. The next five are parts of it."""
    messages: int
    """Messages that were added."""
    duplicates: int
    """Messages that the tables had already, or that were twice among the new ones."""
    marks: int
    copies: int
    malformed: int
    total: int
    """Messages in the tables."""
    files: int
    """Files that they are in."""
    examples: tuple[MalformedRecord, ...] = ()
    """Some of the malformed records."""


def history(
    spark: SparkSession,
    lake: Path | str,
    tables: Path | str,
    *,
    topic: str = TOPIC,
    buckets: int | None = None,
    on_step: OnStep = lambda _: None,
) -> HistoryRun:
    """Bring the tables up to date with the lake. `buckets` is fixed when the tables are created; default: 64."""
    source = Lake(lake)
    source.check()
    if topic not in source.topics():
        raise InvalidValue(
            "topic", topic, f"one that is ingested into the lake: {', '.join(source.topics()) or 'none'}"
        )
    target = HistoryFiles(tables)
    with target.exclusive(buckets) as manifest, translate_spark_errors():
        return _Run(spark, source, topic, target, manifest, on_step).run()


class _Run:
    def __init__(
        self, spark: SparkSession, lake: Lake, topic: str, target: HistoryFiles, manifest: Manifest, on_step: OnStep
    ) -> None:
        self._spark = spark
        self._lake = lake
        self._topic = topic
        self._target = target
        self._manifest = manifest
        self._on_step = on_step

    def run(self) -> HistoryRun:
        for _ in range(ATTEMPTS):
            files = records_of(self._lake).files(self._spark, self._topic)
            try:
                return self._add(files)
            except PySparkException:
                if all(path.exists() for path in files):
                    raise
            self._on_step("files of the lake were merged: starting again")
        raise RetryLater(f"files of the lake {self._lake.root} were merged again and again while they were read")

    def _add(self, files: Sequence[Path]) -> HistoryRun:
        names = tuple(str(path.relative_to(self._lake.records)) for path in files)
        known = set(self._manifest.lake_files)
        new = [str(path) for path, name in zip(files, names, strict=True) if name not in known]
        if not new:
            return self._result(self._manifest, Counter(), ())
        self._on_step(f"reading {len(new)} new files of the lake")
        records = self._spark.read.parquet(*new).transform(self._unread)
        found = records.transform(entries).persist()
        try:
            counts, read = self._summary(found)
            examples = self._examples(found) if counts["malformed"] else ()
            changed = msgspec.structs.replace(
                self._manifest,
                messages=self._write_messages(found) if counts["message"] else self._manifest.messages,
                marks=self._write_marks(found) if counts["mark"] else self._manifest.marks,
                read=self._advanced(read),
                lake_files=names,
            )
        finally:
            found.unpersist()
        return self._result(self._target.publish(self._manifest, changed), counts, examples)

    def _unread(self, records: DataFrame) -> DataFrame:
        """The records that the tables do not have: a merged file of the lake has old ones, too."""
        read = [(at.epoch, at.partition, at.offset) for at in self._manifest.read if at.topic == self._topic]
        if not read:
            return records
        starts = self._spark.createDataFrame(read, "epoch long, partition int, start long")
        rows = records.join(F.broadcast(starts), ["epoch", "partition"], "left")
        return rows.where(F.col("start").isNull() | (F.col("offset") >= F.col("start")))

    def _summary(self, found: DataFrame) -> tuple[Counter[str], list[ReadUpTo]]:
        """How many entries there are of each kind, and how far they go in each partition."""
        kind = F.when(F.col("kind").isin("delivered", "seen"), F.lit("mark")).otherwise(F.col("kind")).alias("kind")
        rows = found.groupBy("epoch", "partition", kind).agg(F.count("*").alias("rows"), F.max("offset").alias("last"))
        counts: Counter[str] = Counter()
        ends: dict[tuple[int, int], int] = {}
        for row in rows.collect():
            counts[row["kind"]] += row["rows"]
            place = (row["epoch"], row["partition"])
            ends[place] = max(ends.get(place, 0), row["last"] + 1)
        return counts, [ReadUpTo(self._topic, *place, end) for place, end in ends.items()]

    def _advanced(self, read: Iterable[ReadUpTo]) -> tuple[ReadUpTo, ...]:
        ends = {(at.topic, at.epoch, at.partition): at for at in (*self._manifest.read, *read)}
        return tuple(ends[place] for place in sorted(ends))

    def _examples(self, found: DataFrame) -> tuple[MalformedRecord, ...]:
        rows = found.where(F.col("kind") == "malformed").orderBy("partition", "offset").limit(EXAMPLES)
        return tuple(MalformedRecord(row["partition"], row["offset"], row["problem"]) for row in rows.collect())

    def _write_messages(self, found: DataFrame) -> tuple[MessagesFile, ...]:
        """Write the new messages, merged with smaller files. Returns all files that the tables have then."""
        fresh = found.transform(messages).transform(with_bucket, self._manifest.buckets)
        merged, compared = self._plan(_rows_by_bucket(fresh))
        self._on_step(f"writing messages, merged with {len(merged)} files")
        rows = [fresh.withColumns({"stored": F.lit(False), "written": F.lit(True)})]
        if merged:
            rows.append(self._stored(merged).withColumns({"stored": F.lit(True), "written": F.lit(True)}))
        if compared:
            without_text = self._stored(compared).withColumn("text", F.lit(None).cast("string"))
            rows.append(without_text.withColumns({"stored": F.lit(True), "written": F.lit(False)}))
        folder = self._target.new_folder("messages")
        _parquet(unique(rows).write.partitionBy("bucket"), folder)
        new = describe(self._target.root, self._target.written(folder))
        kept = [file for file in self._manifest.messages if file not in set(merged)]
        return (*kept, *new)

    def _plan(self, new: Mapping[int, NewRows]) -> tuple[list[MessagesFile], list[MessagesFile]]:
        """The files that new rows are merged with, and others that may have some of these rows already."""
        files: dict[int, list[MessagesFile]] = defaultdict(list)
        for file in self._manifest.messages:
            files[file.bucket].append(file)
        merged = [file for bucket, rows in new.items() for file in to_merge(files[bucket], rows.rows)]
        overlapping = [file for bucket, rows in new.items() for file in to_compare(files[bucket], rows)]
        return merged, [file for file in overlapping if file not in set(merged)]

    def _stored(self, files: Sequence[MessagesFile]) -> DataFrame:
        rows = self._spark.read.schema(MESSAGES).parquet(*(str(self._target.root / file.path) for file in files))
        return rows.transform(with_bucket, self._manifest.buckets)

    def _write_marks(self, found: DataFrame) -> tuple[str, ...]:
        rows = found.transform(marks)
        if self._manifest.marks:
            stored = self._spark.read.schema(MARKS).parquet(*(str(self._target.root / p) for p in self._manifest.marks))
            rows = rows.unionByName(stored)
        self._on_step("writing marks")
        folder = self._target.new_folder("marks")
        _parquet(rows.transform(highest_marks).coalesce(1).sortWithinPartitions("reader", "peer", "kind").write, folder)
        return tuple(self._target.written(folder))

    def _result(
        self, manifest: Manifest, counts: Mapping[str, int], examples: tuple[MalformedRecord, ...]
    ) -> HistoryRun:
        total = sum(file.rows for file in manifest.messages)
        added = total - sum(file.rows for file in self._manifest.messages)
        return HistoryRun(
            tables=str(self._target.root),
            version=manifest.version,
            records=sum(counts.values()),
            messages=added,
            duplicates=counts.get("message", 0) - added,
            marks=counts.get("mark", 0),
            copies=counts.get("copy", 0),
            malformed=counts.get("malformed", 0),
            total=total,
            files=len(manifest.messages),
            examples=examples,
        )


def unique(rows: Sequence[DataFrame]) -> DataFrame:
    """The rows to write, each message once, by bucket and sorted: `MESSAGES` with the columns `bucket`, `stored` (it is
    in the tables already, and takes precedence) and `written` (it is to be written, if it does)."""
    merged = reduce(lambda some, more: some.unionByName(more), rows)
    same = Window.partitionBy("bucket", *_ORDER).orderBy(F.desc("stored"), "epoch", "offset")
    return (
        merged.repartition("bucket")  # the window and the files need no other shuffle than this
        .withColumn("rank", F.row_number().over(same))
        .where((F.col("rank") == 1) & F.col("written"))
        .drop("rank", "stored", "written")
        .sortWithinPartitions("bucket", *_ORDER)
    )


def _rows_by_bucket(fresh: DataFrame) -> dict[int, NewRows]:
    rows = fresh.groupBy("bucket").agg(
        F.count("*").alias("rows"), F.min("id").alias("first"), F.max("id").alias("last")
    )
    return {row["bucket"]: NewRows(row["rows"], row["first"], row["last"]) for row in rows.collect()}


def _parquet(writer: DataFrameWriter, folder: Path) -> None:
    writer.options(**{"parquet.block.size": str(ROW_GROUP_BYTES), "compression": "zstd"}).parquet(str(folder))
