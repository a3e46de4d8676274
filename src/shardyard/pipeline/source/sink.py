"""Writing a frame to a topic: what Spark calls in its tasks, and in the driver once all tasks are done."""

import hashlib
import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlparse

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from shardyard.log.router import current_topic
from shardyard.model import InvalidValue, Topic
from shardyard.pipeline.blocking import blocking
from shardyard.pipeline.partitioning import PartitionerSpec
from shardyard.pipeline.source.columns import from_spark
from shardyard.pipeline.source.options import WriteOptions
from shardyard.pipeline.source.staging import Manifest, PartitionIndexes, Staging, commit, staging_folder


@dataclass(frozen=True)
class Staged(WriterCommitMessage):
    """The file that a task staged, and the state of the topic that it was staged for."""

    task: int
    file: str | None
    requested: Topic
    """The topic that the options name."""
    topic: Topic
    """The topic that the records go to: the successor of `requested` if that one has moved."""


class _Sink:
    """The part that batch and streaming writes have in common."""

    def __init__(self, options: WriteOptions) -> None:
        self._options = options
        self._staging = Staging(staging_folder(options.log, options.staging))

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        context = TaskContext.get()
        task = context.partitionId() if context is not None else 0
        with blocking(self._options.log) as log:
            requested = log.wait(log.log.topic(self._options.topic))
            topic = log.wait(current_topic(log.log, requested.name))
        file = self._staging.write(self._with_partitions(iterator, topic, task))
        return Staged(task, file, requested, topic)

    def _with_partitions(
        self, batches: Iterator[pa.RecordBatch], topic: Topic, task: int
    ) -> Iterator[tuple[pa.RecordBatch, PartitionIndexes]]:
        spec = None
        if not self._options.by_column:
            spec = PartitionerSpec.of(topic, self._options.partitioner, self._options.hash)
        prefix, first = f"{uuid.uuid4().hex}-", task  # tasks start at different partitions with records without a key
        for data in batches:
            sequence = np.arange(first, first + len(data))
            ids = pc.binary_join_element_wise(prefix, pa.array(sequence).cast(pa.string()), "")
            records = from_spark(data, ids)
            yield records, _partition_column(data, topic) if spec is None else spec.place(records["key"], sequence)
            first += len(data)

    def _commit(self, messages: list[WriterCommitMessage | None], producer: str, batch: int, *, named: bool) -> None:
        """Append what the tasks staged. A name that the user gave (`named`) is scoped to the topic and its epoch, so
        that it may be used for other topics as well."""
        staged = sorted((m for m in messages if isinstance(m, Staged)), key=lambda m: m.task)
        if not staged:
            return
        topics = {(m.requested, m.topic) for m in staged}
        files = tuple(m.file for m in staged if m.file is not None)
        if len(topics) > 1:
            self._staging.discard(files)
            raise InvalidValue("topic", self._options.topic, "a topic that does not change during a write: try again")
        ((requested, topic),) = topics
        if named:
            scope = repr((producer, requested.name, requested.epoch))
            producer = f"named-{hashlib.sha256(scope.encode()).hexdigest()[:32]}"
        placing = None if self._options.by_column else [self._options.partitioner, self._options.hash]
        with blocking(self._options.log) as log:
            manifest = Manifest(producer, batch, topic.name, topic.epoch, files, {"placing": placing})
            log.wait(commit(log.log, self._staging, manifest))
        self._staging.clear_orphans()

    def _abort(self, messages: list[WriterCommitMessage | None]) -> None:
        self._staging.abort(m.file for m in messages if isinstance(m, Staged) and m.file is not None)


def _partition_column(data: pa.RecordBatch, topic: Topic) -> PartitionIndexes:
    """The partitions that the frame's own column names."""
    if "partition" not in data.schema.names:
        raise InvalidValue("option 'partitioner'", "column", "a frame with a column 'partition'")
    column = data["partition"]
    indexes: PartitionIndexes = pc.fill_null(column, -1).to_numpy().astype(np.int32)
    if len(indexes) and not 0 <= indexes.min() <= indexes.max() < topic.receiving:
        wrong = indexes[(indexes < 0) | (indexes >= topic.receiving)][0]
        raise InvalidValue("column 'partition'", int(wrong), f"partitions 0 to {topic.receiving - 1} of {topic.name!r}")
    return indexes


class BatchSink(_Sink, DataSourceArrowWriter):
    """Writes a batch: once, however often it is run, if the producer has a name; otherwise once in every run."""

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        named = self._options.producer
        producer = f"spark-{uuid.uuid4().hex}" if named is None else named
        try:
            self._commit(messages, producer, 0, named=named is not None)
        finally:
            if named is None:  # no later run finishes what this one has begun
                self._staging.forget(producer)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        self._abort(messages)


class StreamSink(_Sink, DataSourceStreamArrowWriter):
    """Writes a streaming query, each of its micro-batches once. The id in its checkpoint identifies the query."""

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 Spark's name
        checkpoint, name = self._options.checkpoint, self._options.producer
        if checkpoint is None and name is None:
            expected = "a checkpointLocation as an option, or a producer's name to be used as long as the checkpoint"
            raise InvalidValue("option 'producer'", None, expected)
        producer = name if name is not None else f"query-{query_id(str(checkpoint))}"
        self._commit(messages, producer, batchId, named=name is not None)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: ARG002, N803 Spark's name
        self._abort(messages)


def query_id(checkpoint: str) -> str:
    """The id that Spark gave a query when it created the checkpoint. A new checkpoint is a new query."""
    metadata = Path(urlparse(checkpoint).path) / "metadata"
    try:
        return str(json.loads(metadata.read_text())["id"])
    except (OSError, ValueError, KeyError, TypeError):
        expected = "a folder with a query's checkpoint; if it is not on a mounted disk, set the option 'producer'"
        raise InvalidValue("option 'checkpointLocation'", checkpoint, expected) from None
