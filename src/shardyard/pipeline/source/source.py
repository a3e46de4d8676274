"""The data source `shardyard`: topics as frames, batch and streaming. A thin adapter around functions without Spark."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from shardyard.model import (
    InvalidValue,
    OffsetBeyondEnd,
    OffsetTrimmed,
    Partition,
    PartitionOutOfRange,
    UnknownTopic,
    WrongEpoch,
)
from shardyard.pipeline.blocking import BlockingLog, blocking
from shardyard.pipeline.source import offset_lookup, offsets
from shardyard.pipeline.source.columns import COLUMNS, check_readable, check_writable, to_spark
from shardyard.pipeline.source.offsets import DataLost, Offsets, Range, TopicSpans
from shardyard.pipeline.source.options import ReadOptions, read_options, write_options

if TYPE_CHECKING:
    from shardyard.pipeline.source.sink import BatchSink, StreamSink

READ_RECORDS = 50_000
READ_BYTES = 16 * 1024 * 1024


class Shardyard(DataSource):
    """Topics of a Shardyard log. `docs/pipeline.md` has the options."""

    @classmethod
    def name(cls) -> str:
        return "shardyard"

    def schema(self) -> StructType:
        return COLUMNS

    def reader(self, schema: StructType) -> DataSourceReader:
        return BatchReader(read_options(self.options, streaming=False), check_readable(schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 Spark's name
        return StreamReader(read_options(self.options, streaming=True), check_readable(schema))

    def writer(self, schema: StructType, overwrite: bool) -> "BatchSink":
        from shardyard.pipeline.source.sink import BatchSink  # noqa: PLC0415 slow to import, and a read needs no placement

        self._check(schema, overwrite)
        return BatchSink(write_options(self.options, streaming=False))

    def streamWriter(self, schema: StructType, overwrite: bool) -> "StreamSink":  # noqa: N802 Spark's name
        from shardyard.pipeline.source.sink import StreamSink  # noqa: PLC0415 as above

        self._check(schema, overwrite)
        return StreamSink(write_options(self.options, streaming=True))

    @staticmethod
    def _check(schema: StructType, overwrite: bool) -> None:
        check_writable(schema)
        if overwrite:
            raise InvalidValue("mode", "overwrite", "append: records of a topic are never replaced")


@dataclass
class RangePartition(InputPartition):
    """The range of records that one task reads."""

    range: Range


class BatchReader(DataSourceReader):
    """Reads the records between two bounds, both of which are fixed when the read is planned."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema

    def partitions(self) -> Sequence[InputPartition]:
        with blocking(self._options.log) as log:
            spans = log.wait(offset_lookup.topic_spans(log.log, self._options.topics))
            start = log.wait(offset_lookup.resolve(log.log, spans, self._options.start))
            end = log.wait(offset_lookup.resolve(log.log, spans, self._options.end))
        return _tasks(start, end, self._options)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _read(partition, self._options, self._schema)


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads without an end, trigger by trigger. One instance lives in a process of the driver as long as the query."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        self._opened: BlockingLog | None = None
        self._available_now: Offsets | None = None
        """Where to stop, for a query with the trigger `availableNow`."""

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 Spark's name
        log = self._log()
        spans = log.wait(offset_lookup.topic_spans(log.log, self._options.topics))
        return log.wait(offset_lookup.resolve(log.log, spans, self._options.start)).to_json()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 Spark's name
        limit = self._options.max_records_per_trigger
        return ReadMaxRows(limit) if limit is not None else ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 Spark's name
        self._available_now = self._latest()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802 Spark's name
        at, spans = self._reconcile(start)
        end = offsets.latest(spans)
        if self._available_now is not None:
            end = offsets.cap(end, self._available_now)
        max_records = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        return offsets.advance(at, offsets.not_before(end, at), max_records).to_json()

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802 Spark's name
        return self._latest().to_json()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        at, spans = self._reconcile(start)
        planned = Offsets.from_json(end)
        if not self._options.fail_on_data_loss:
            planned = offsets.still_available(planned, spans)
        return _tasks(at, planned, self._options)

    def _reconcile(self, start: dict[str, Any]) -> tuple[Offsets, dict[str, TopicSpans]]:
        log, fail = self._log(), self._options.fail_on_data_loss
        spans = log.wait(offset_lookup.topic_spans(log.log, self._options.topics, fail=fail, dropped=True))
        return offsets.reconcile(Offsets.from_json(start), spans, fail=fail), spans

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _read(partition, self._options, self._schema)

    def commit(self, end: dict[str, Any]) -> None:
        """Do nothing: the checkpoint holds the query's offsets, and the log keeps its records for other readers."""

    def stop(self) -> None:
        if self._opened is not None:
            self._opened.close()

    def _latest(self) -> Offsets:
        log = self._log()
        fail = self._options.fail_on_data_loss
        spans = log.wait(offset_lookup.topic_spans(log.log, self._options.topics, fail=fail, dropped=True))
        return offsets.latest(spans)

    def _log(self) -> BlockingLog:
        """The log, opened on first use: the reader is also pickled and sent to tasks, before that."""
        if self._opened is None:
            self._opened = BlockingLog(self._options.log)
        return self._opened


def _tasks(start: Offsets, end: Offsets, options: ReadOptions) -> list[InputPartition]:
    return [RangePartition(r) for r in offsets.split(offsets.ranges(start, end), options.records_per_task)]


def _read(partition: InputPartition, options: ReadOptions, schema: StructType) -> Iterator[pa.RecordBatch]:
    if not isinstance(partition, RangePartition):  # what Spark passes if there is nothing to read
        return
    r = partition.range
    source, at = Partition(r.topic, r.partition), r.start
    with blocking(options.log) as log:
        while at < r.end:
            try:
                limit = min(READ_RECORDS, r.end - at)
                batch = log.wait(log.log.read(source, at, epoch=r.epoch, max_records=limit, max_bytes=READ_BYTES))
            except OffsetTrimmed as error:
                if options.fail_on_data_loss:
                    raise DataLost(str(error)) from None
                at = min(error.first, r.end)
                continue
            except (WrongEpoch, UnknownTopic, PartitionOutOfRange, OffsetBeyondEnd) as error:
                if options.fail_on_data_loss:
                    raise DataLost(str(error)) from None
                return
            if batch.end <= at:  # the read reached the end of the partition
                span = log.wait(log.log.span(source))
                if span.epoch != r.epoch or span.end < r.end:
                    raise DataLost(f"{source} ends at {span.end}, but {r.end} was its end when the read was planned")
                return  # the rest of the range is a gap
            yield from to_spark(batch, schema, r.end)
            at = batch.end
