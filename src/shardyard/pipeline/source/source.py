"""The data source `shardyard`: topics as frames, batch and streaming. A thin adapter; the work is done elsewhere."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from shardyard.model import InvalidValue, OffsetBeyondEnd, OffsetTrimmed, Partition, UnknownTopic, WrongEpoch
from shardyard.pipeline.blocking import BlockingLog, blocking
from shardyard.pipeline.source import offset_lookup, offsets
from shardyard.pipeline.source.columns import COLUMNS, check_writable, chosen, to_spark
from shardyard.pipeline.source.offsets import DataLost, Extent, Offsets, Range
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
        return BatchReader(read_options(self.options, streaming=False), chosen(schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 Spark's name
        return StreamReader(read_options(self.options, streaming=True), chosen(schema))

    def writer(self, schema: StructType, overwrite: bool) -> "BatchSink":
        from shardyard.pipeline.source.sink import BatchSink  # noqa: PLC0415 placement takes time, and readers need none

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
            raise InvalidValue("mode", "overwrite", "append: a topic is only ever appended to")


@dataclass
class RangePartition(InputPartition):
    """What one task reads."""

    range: Range


class BatchReader(DataSourceReader):
    """What the topics hold between two places, as of the planning."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema

    def partitions(self) -> Sequence[InputPartition]:
        with blocking(self._options.log) as log:
            known = log.wait(offset_lookup.extents(log.log, self._options.topics))
            start = log.wait(offset_lookup.locate(log.log, known, self._options.start))
            end = log.wait(offset_lookup.locate(log.log, known, self._options.end))
        return _tasks(start, end, self._options)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _read(partition, self._options, self._schema)


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The same without an end, trigger by trigger. Lives in one process of the driver for the life of a query."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        self._opened: BlockingLog | None = None
        self._until: Offsets | None = None

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 Spark's name
        log = self._log()
        known = log.wait(offset_lookup.extents(log.log, self._options.topics))
        return log.wait(offset_lookup.locate(log.log, known, self._options.start)).to_json()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 Spark's name
        most = self._options.max_records_per_trigger
        return ReadMaxRows(most) if most is not None else ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 Spark's name
        self._until = self._latest()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802 Spark's name
        begin, known = self._reconciled(start)
        end = offsets.latest(known)
        if self._until is not None:
            end = offsets.capped(end, self._until)
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        reached = offsets.advance(begin, offsets.at_least(end, begin), most)
        return reached.to_json()

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802 Spark's name
        return self._latest().to_json()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        begin, known = self._reconciled(start)
        planned = Offsets.from_json(end)
        if not self._options.fail_on_data_loss:
            planned = offsets.as_far_as(planned, known)
        return _tasks(begin, planned, self._options)

    def _reconciled(self, start: dict[str, Any]) -> tuple[Offsets, dict[str, Extent]]:
        log, fail = self._log(), self._options.fail_on_data_loss
        known = log.wait(offset_lookup.extents(log.log, self._options.topics, fail=fail))
        return offsets.reconcile(Offsets.from_json(start), known, fail=fail), known

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _read(partition, self._options, self._schema)

    def commit(self, end: dict[str, Any]) -> None:
        """Nothing: the checkpoint knows how far the query is, and the log keeps what others may want."""

    def stop(self) -> None:
        if self._opened is not None:
            self._opened.close()

    def _latest(self) -> Offsets:
        log = self._log()
        fail = self._options.fail_on_data_loss
        return offsets.latest(log.wait(offset_lookup.extents(log.log, self._options.topics, fail=fail)))

    def _log(self) -> BlockingLog:
        """Opened when first used, since a reader is also sent to the tasks."""
        if self._opened is None:
            self._opened = BlockingLog(self._options.log)
        return self._opened


def _tasks(start: Offsets, end: Offsets, options: ReadOptions) -> list[InputPartition]:
    return [RangePartition(r) for r in offsets.split(offsets.ranges(start, end), options.records_per_task)]


def _read(partition: InputPartition, options: ReadOptions, schema: StructType) -> Iterator[pa.RecordBatch]:
    if not isinstance(partition, RangePartition):  # Spark's way to say that there is nothing to read
        return
    r = partition.range
    place, at = Partition(r.topic, r.partition), r.start
    with blocking(options.log) as log:
        while at < r.end:
            try:
                most = min(READ_RECORDS, r.end - at)
                batch = log.wait(log.log.read(place, at, epoch=r.epoch, max_records=most, max_bytes=READ_BYTES))
            except OffsetTrimmed as error:
                if options.fail_on_data_loss:
                    raise DataLost(str(error)) from None
                at = min(error.first, r.end)
                continue
            except (WrongEpoch, UnknownTopic, OffsetBeyondEnd) as error:
                if options.fail_on_data_loss:
                    raise DataLost(str(error)) from None
                return
            if not len(batch):  # its end is known from the planning, so it was made anew in between
                raise DataLost(f"{place} ends at {at}, before {r.end}")
            yield from to_spark(batch, schema)
            at = batch.end
