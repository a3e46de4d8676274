"""Rounds of a reshard by Spark: any number of records, by as many tasks as there are cores."""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import cache

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from shardyard.model import Damaged
from shardyard.pipeline.blocking import BlockingLog
from shardyard.pipeline.partitioning import PartitionerSpec
from shardyard.pipeline.reshard.checksum import checksum
from shardyard.pipeline.reshard.job import Job, Round
from shardyard.pipeline.reshard.offset_translation import Chunk
from shardyard.pipeline.reshard.placing import ChunkPlacer
from shardyard.pipeline.source.columns import from_spark
from shardyard.pipeline.source.staging import PartitionIndexes, Staging

RECORDS_PER_TASK = 500_000


class SparkRounds:
    """Copies and compares rounds as Spark jobs."""

    def __init__(
        self, spark: Callable[[], SparkSession], url: str, opened: BlockingLog, staging: Staging, job: Job
    ) -> None:
        """`spark`: called for a session when one is needed."""
        self._spark, self._url, self._opened, self._staging, self._job = cache(spark), url, opened, staging, job

    def stage(self, starts: Sequence[int], ends: Sequence[int]) -> tuple[Round, tuple[str, ...]]:
        """Stage the records from `starts` up to `ends`. Returns the round and its files."""
        rows = self._read(self._job.topic, starts, ends).mapInArrow(stage_task(self._staging, self._job.spec), _STAGED)
        staged = sorted(rows.collect(), key=lambda row: (row["partition"], row["start"]))
        chunks = tuple(Chunk(row["partition"], row["start"], row["end"], tuple(row["counts"])) for row in staged)
        return Round(tuple(starts), tuple(ends), chunks, is_direct=False), tuple(row["file"] for row in staged)

    def compare(self, done: Round, before: Sequence[int], after: Sequence[int]) -> None:
        """Raise `Damaged` unless the target holds exactly the records of the round, from `before` up to `after`, with
        those of each key in order."""
        job = self._job
        ordered = job.spec.partitioner != "round_robin"  # which does not keep the order of a key
        old = checksum(self._read(job.topic, done.starts, done.ends), ordered=ordered)
        new = checksum(self._read(job.target, before, after), ordered=ordered)
        if old != new:
            raise Damaged(job.target, f"it has {new} where {job.topic!r} has {old}: abort the reshard")
        expected = done.counts(job.spec.partitions)
        found = [new.by_partition.get(q, 0) for q in range(len(expected))]
        if found != expected:
            raise Damaged(job.target, f"a round has {found} records instead of {expected}: abort the reshard")

    def _read(self, topic: str, starts: Sequence[int], ends: Sequence[int]) -> DataFrame:
        count = self._opened.wait(self._opened.log.topic(topic)).partitions
        named = {}
        for option, offsets in (("startingOffsets", starts), ("endingOffsets", ends)):
            others = ["earliest"] * (count - len(offsets))  # nothing of partitions that were added since
            named[option] = json.dumps({topic: dict(enumerate([*offsets, *others]))})
        reader = self._spark().read.format("shardyard").options(log=self._url, topics=topic, **named)
        return reader.option("recordsPerTask", RECORDS_PER_TASK).load()


_STAGED = "partition int, start long, end long, file string, counts array<long>"


def stage_task(
    staging: Staging, spec: PartitionerSpec
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """The work of a task: stage the records of one range with their target partitions, and return what was staged."""

    def task(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        placer: ChunkPlacer | None = None
        partition = start = end = 0

        def with_partitions() -> Iterator[tuple[pa.RecordBatch, PartitionIndexes]]:
            nonlocal placer, partition, start, end
            for data in batches:
                if not len(data):
                    continue
                if placer is None:
                    partition, start = data["partition"][0].as_py(), data["offset"][0].as_py()
                    placer = ChunkPlacer(spec, partition, start)
                end = data["offset"][-1].as_py() + 1
                yield from_spark(data, data["id"]), placer.place(data["key"])

        file = staging.write(with_partitions())
        if file is not None and placer is not None:
            columns = [[partition], [start], [end], [file], [placer.counts.tolist()]]
            arrays = [pa.array(column, kind) for column, kind in zip(columns, _STAGED_TYPES, strict=True)]
            yield pa.RecordBatch.from_arrays(arrays, _STAGED_NAMES)

    return task


_STAGED_NAMES = ["partition", "start", "end", "file", "counts"]
_STAGED_TYPES = [pa.int32(), pa.int64(), pa.int64(), pa.string(), pa.list_(pa.int64())]
