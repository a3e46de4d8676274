"""Writing a frame to a topic: what Spark calls in its tasks, and in the driver when all of them are done."""

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
from shardyard.pipeline.placing import Placing
from shardyard.pipeline.source.columns import from_spark
from shardyard.pipeline.source.options import WriteOptions
from shardyard.pipeline.source.staging import Manifest, Places, Staging, commit, folder_of


@dataclass(frozen=True)
class Staged(WriterCommitMessage):
    """What a task put aside, for the topic as it was then."""

    task: int
    file: str | None
    asked: Topic
    """The topic that the options name ..."""
    topic: Topic
    """... and where it goes on, if it has moved."""


class _Sink:
    """What batch and streaming have in common."""

    def __init__(self, options: WriteOptions) -> None:
        self._options = options
        self._staging = Staging(folder_of(options.log))

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        context = TaskContext.get()
        task = context.partitionId() if context is not None else 0
        with blocking(self._options.log) as log:
            asked = log.wait(log.log.topic(self._options.topic))
            topic = log.wait(current_topic(log.log, asked.name))
        return Staged(task, self._staging.put(self._placed(iterator, topic, task)), asked, topic)

    def _placed(
        self, batches: Iterator[pa.RecordBatch], topic: Topic, task: int
    ) -> Iterator[tuple[pa.RecordBatch, Places]]:
        placing = None if self._options.by_column else Placing.of(topic, self._options.partitioner, self._options.hash)
        prefix, turn = f"{uuid.uuid4().hex}-", task
        for data in batches:
            numbers = np.arange(turn, turn + len(data))
            ids = pc.binary_join_element_wise(prefix, pa.array(numbers).cast(pa.string()), "")
            records = from_spark(data, ids)
            places = _named(data, topic) if placing is None else placing.places(records["key"], numbers)
            yield records, places
            turn += len(data)

    def _commit(self, messages: list[WriterCommitMessage | None], producer: str, batch: int, *, named: bool) -> None:
        """`named`: the producer's name is a user's, and stands for this topic, in this life of it, alone."""
        staged = sorted((m for m in messages if isinstance(m, Staged)), key=lambda m: m.task)
        if not staged:
            return
        topics = {(m.asked, m.topic) for m in staged}
        files = tuple(m.file for m in staged if m.file is not None)
        if len(topics) > 1:
            self._staging.discard(files)
            raise InvalidValue("topic", self._options.topic, "a topic that stays as it is during a write: try again")
        ((asked, topic),) = topics
        if named:
            producer = f"named-{hashlib.sha256(repr((producer, asked.name, asked.epoch)).encode()).hexdigest()[:32]}"
        placing = None if self._options.by_column else [self._options.partitioner, self._options.hash]
        with blocking(self._options.log) as log:
            manifest = Manifest(producer, batch, topic.name, topic.epoch, files, {"placing": placing})
            log.wait(commit(log.log, self._staging, manifest))
        self._staging.clear_orphans()

    def _discard(self, messages: list[WriterCommitMessage | None]) -> None:
        self._staging.discard(m.file for m in messages if isinstance(m, Staged) and m.file is not None)


def _named(data: pa.RecordBatch, topic: Topic) -> Places:
    """The partitions that the frame itself names."""
    if "partition" not in data.schema.names:
        raise InvalidValue("option 'partitioner'", "column", "a frame with a column 'partition'")
    column = data["partition"]
    places: Places = pc.fill_null(column, -1).to_numpy().astype(np.int32)
    if len(places) and not 0 <= places.min() <= places.max() < topic.receiving:
        wrong = places[(places < 0) | (places >= topic.receiving)][0]
        raise InvalidValue("column 'partition'", int(wrong), f"partitions 0 to {topic.receiving - 1} of {topic.name!r}")
    return places


class BatchSink(_Sink, DataSourceArrowWriter):
    """A batch: with a producer's name it is written once, however often it is run again; else each run is a new one."""

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        named = self._options.producer
        producer = f"spark-{uuid.uuid4().hex}" if named is None else named
        self._commit(messages, producer, 0, named=named is not None)
        if named is None:
            self._staging.forget(producer)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        self._discard(messages)


class StreamSink(_Sink, DataSourceStreamArrowWriter):
    """A streaming query: each of its batches is written once. The query is known by the id in its checkpoint."""

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 Spark's name
        checkpoint, name = self._options.checkpoint, self._options.producer
        if checkpoint is None and name is None:
            expected = "a checkpointLocation as an option, or a producer's name that lasts as long as the checkpoint"
            raise InvalidValue("option 'producer'", None, expected)
        producer = name if name is not None else f"query-{query_id(str(checkpoint))}"
        self._commit(messages, producer, batchId, named=name is not None)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: ARG002, N803 Spark's name
        self._discard(messages)


def query_id(checkpoint: str) -> str:
    """The id that Spark gave a query when its checkpoint was made: a new checkpoint is a new query."""
    metadata = Path(urlparse(checkpoint).path) / "metadata"
    try:
        return str(json.loads(metadata.read_text())["id"])
    except (OSError, ValueError, KeyError, TypeError):
        expected = "a folder with a query's checkpoint; elsewhere than on a mounted disk, set the option 'producer'"
        raise InvalidValue("option 'checkpointLocation'", checkpoint, expected) from None
