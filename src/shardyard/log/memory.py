"""The log's in-memory twin: the same contract without a disk, for tests, yours too."""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pyarrow as pa
import pyarrow.compute as pc

from shardyard.log.port import (
    DEFAULT_RETENTION,
    READ_BYTES,
    READ_RECORDS,
    Log,
    check_marks,
    check_move,
    check_offset,
    check_open,
    check_partition,
    check_placement,
    check_receives,
    check_retention,
    check_same_batch,
    contracted,
    expanded,
    without_closing,
)
from shardyard.model import (
    SEQUENCE_WINDOW,
    Appended,
    Closed,
    Fence,
    Fenced,
    OffsetBeyondEnd,
    Partition,
    PartitionOutOfRange,
    Position,
    Record,
    Retention,
    SequenceTooOld,
    Span,
    Stamp,
    Topic,
    TopicExists,
    TopicKind,
    UnknownTopic,
    whole_number,
)
from shardyard.model.batch import SCHEMA, Batch, cut, from_records, now_ms
from shardyard.model.checks import check_int64, check_text
from shardyard.model.limits import Limits, check_batch, check_partitions, check_records, check_topic_name


@dataclass(slots=True)
class _Held:
    """What a partition holds. One that was dropped is kept, empty, in case that it comes back."""

    batches: list[tuple[int, pa.RecordBatch]] = field(default_factory=list)
    first: int = 0
    end: int = 0
    stamps: defaultdict[str, dict[int, tuple[int, int]]] = field(default_factory=lambda: defaultdict(dict))


class MemoryLog(Log):
    """A log that is gone with its process."""

    def __init__(self, *, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        self._topics: dict[str, Topic] = {}
        self._held: dict[Partition, _Held] = {}
        self._fences: dict[str, int] = {}
        self._last_epoch = 0
        self._changed = asyncio.Condition()
        self._closed = False

    async def create_topic(
        self,
        name: str,
        partitions: int,
        *,
        kind: TopicKind = TopicKind.NORMAL,
        retention: Retention = DEFAULT_RETENTION,
        partitioner: str = "modulus",
        hash_: str | None = None,
    ) -> Topic:
        self._open()
        wanted = Topic(
            check_topic_name(name, self._limits),
            check_partitions(partitions, self._limits),
            kind,
            check_retention(retention),
            0,
            *check_placement(partitioner, partitions, hash_),
        )
        if name in self._topics:
            raise TopicExists(name, self._topics[name].partitions)
        self._last_epoch = max(self._last_epoch + 1, now_ms())
        return self._put(replace(wanted, epoch=self._last_epoch))

    async def expand_topic(self, name: str, partitions: int) -> Topic:
        partitions = check_partitions(partitions, self._limits)
        return self._put(expanded(self._topic(name), partitions))

    async def contract_topic(self, name: str, partitions: int) -> Topic:
        partitions = whole_number("partitions", partitions, at_least=1)
        return self._put(contracted(self._topic(name), partitions))

    async def drop_partitions(self, name: str, partitions: int) -> Topic:
        partitions = whole_number("partitions", partitions, at_least=1)
        before = self._topic(name)
        after = self._put(without_closing(before, partitions))
        for index in range(after.partitions, before.partitions):
            held = self._held[Partition(name, index)]
            held.first, held.batches = held.end, []
        await self._wake()
        return after

    async def set_retention(self, name: str, retention: Retention) -> Topic:
        check_retention(retention)
        return self._put(replace(self._topic(name), retention=retention))

    async def seal_topic(self, name: str) -> Topic:
        return self._seal(name, sealed=True)

    async def unseal_topic(self, name: str) -> Topic:
        return self._seal(name, sealed=False)

    def _seal(self, name: str, *, sealed: bool) -> Topic:
        topic = self._topic(name)
        check_open(name, sealed=False, successor=topic.successor)
        return self._put(replace(topic, sealed=sealed))

    async def move_topic(self, name: str, successor: str) -> Topic:
        check_text("successor", successor)
        topic = self._topic(name)
        if topic.successor != successor:
            check_open(name, sealed=False, successor=topic.successor)
            check_move(topic, self._topic(successor))
        return self._put(replace(topic, sealed=True, successor=successor))

    async def delete_topic(self, name: str) -> None:
        self._topic(name)
        self._held = {partition: held for partition, held in self._held.items() if partition.topic != name}
        del self._topics[name]
        await self._wake()

    async def topic(self, name: str) -> Topic:
        return self._topic(name)

    async def topics(self) -> list[Topic]:
        self._open()
        return [self._topics[name] for name in sorted(self._topics)]

    async def append(
        self,
        partition: Partition,
        records: Sequence[Record] | pa.RecordBatch,
        *,
        stamp: Stamp | None = None,
        fence: Fence | None = None,
        placed_on: Topic | None = None,
    ) -> Appended:
        if isinstance(records, pa.RecordBatch):
            data = check_batch(records, self._limits, now_ms())
        else:
            rows, _ = check_records(records, self._limits)
            data = from_records(rows, now_ms())
        check_marks(stamp, fence)
        topic, held = self._find(partition)
        self._check_fence(fence)
        known = held.stamps[stamp.producer] if stamp is not None else {}
        if stamp is not None and known and stamp.sequence <= (last := max(known)) - SEQUENCE_WINDOW:
            raise SequenceTooOld(partition, stamp.producer, stamp.sequence, last)
        if stamp is not None and stamp.sequence in known:
            check_same_batch(stamp, known[stamp.sequence][1], len(data))
        else:
            check_receives(partition, topic.sealed, topic.successor, topic.epoch, topic.receiving, placed_on)
        if fence is not None:
            self._fences[fence.name] = fence.epoch
        if stamp is not None:
            if stamp.sequence in known:
                first, count = known[stamp.sequence]
                return Appended(partition, Position(topic.epoch, first), count, duplicate=True)
            known[stamp.sequence] = (held.end, len(data))
            held.stamps[stamp.producer] = {s: at for s, at in known.items() if s > max(known) - SEQUENCE_WINDOW}
        first = held.end
        held.batches.append((first, data))
        held.end = first + len(data)
        await self._wake()
        return Appended(partition, Position(topic.epoch, first), len(data))

    async def read(
        self,
        partition: Partition,
        offset: int,
        *,
        epoch: int | None = None,
        max_records: int = READ_RECORDS,
        max_bytes: int = READ_BYTES,
        wait: float = 0.0,
        fence: Fence | None = None,
    ) -> Batch:
        offset = whole_number("offset", offset, at_least=0)
        max_records = whole_number("max_records", max_records, at_least=1)
        max_bytes = whole_number("max_bytes", max_bytes, at_least=1)

        def fetch() -> Batch:
            topic, held = self._find(partition)
            self._check_fence(fence)
            check_offset(partition, Span(topic.epoch, held.first, held.end), offset, epoch)
            return Batch(partition, topic.epoch, offset, _cut(held, offset, max_records, max_bytes))

        await asyncio.sleep(0)  # others get their turn, as they do beside a real log
        batch = fetch()
        if not len(batch) and wait > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait), self._changed:
                    await self._changed.wait_for(lambda: self._closed or self._find(partition)[1].end > offset)
            batch = fetch()
        return batch

    async def span(self, partition: Partition) -> Span:
        topic, held = self._find(partition)
        return Span(topic.epoch, held.first, held.end)

    async def offset_at(self, partition: Partition, timestamp: int) -> int:
        timestamp = check_int64("timestamp", timestamp)
        _, held = self._find(partition)
        for first, data in held.batches:
            for i in pc.indices_nonzero(pc.greater_equal(data["timestamp"], timestamp)).to_pylist():
                if first + i >= held.first:
                    return int(first + i)
        return held.end

    async def trim(self, partition: Partition, before: int) -> Span:
        before = whole_number("before", before, at_least=0)
        topic, held = self._find(partition)
        if before > held.end:
            raise OffsetBeyondEnd(partition, before, held.end)
        held.first = max(held.first, before)
        held.batches = [(first, data) for first, data in held.batches if first + len(data) > held.first]
        return Span(topic.epoch, held.first, held.end)

    async def set_fence(self, fence: Fence) -> None:
        self._open()
        self._check_fence(fence)
        self._fences[fence.name] = fence.epoch

    async def maintain(self) -> None:
        self._open()
        for topic in self._topics.values():
            for partition in topic:
                await self.trim(partition, self._first_kept(topic.retention, self._held[partition]))

    def _first_kept(self, retention: Retention, held: _Held) -> int:
        keep = held.first
        if retention.age_ms:
            since = now_ms() - retention.age_ms
            young = (first for first, data in held.batches if pc.max(data["timestamp"]).as_py() >= since)
            keep = max(keep, next(young, held.end))
        if retention.bytes_per_partition:
            total, within = 0, held.end
            for first, data in reversed(held.batches):
                total += data.nbytes
                if total > retention.bytes_per_partition and within < held.end:
                    break
                within = first
            keep = max(keep, within)
        return keep

    async def close(self) -> None:
        self._closed = True
        await self._wake()

    async def _wake(self) -> None:
        """Let those who wait look again."""
        async with self._changed:
            self._changed.notify_all()

    def _open(self) -> None:
        if self._closed:
            raise Closed("the log")

    def _topic(self, name: str) -> Topic:
        self._open()
        if name not in self._topics:
            raise UnknownTopic(name)
        return self._topics[name]

    def _put(self, topic: Topic) -> Topic:
        self._topics[topic.name] = topic
        for partition in topic:
            self._held.setdefault(partition, _Held())
        return topic

    def _find(self, partition: Partition) -> tuple[Topic, _Held]:
        check_partition(partition)
        topic = self._topic(partition.topic)
        if not 0 <= partition.index < topic.partitions:
            raise PartitionOutOfRange(partition, topic.partitions)
        return topic, self._held[partition]

    def _check_fence(self, fence: Fence | None) -> None:
        if fence is not None and (known := self._fences.get(fence.name, fence.epoch)) > fence.epoch:
            raise Fenced(f"epoch {fence.epoch} of {fence.name} is over: the current one is {known}")


def _cut(held: _Held, offset: int, max_records: int, max_bytes: int) -> pa.Table:
    chunks: list[pa.RecordBatch] = []
    count = size = 0
    for first, data in held.batches:
        if first + len(data) <= offset:
            continue
        start = max(offset - first, 0)
        part = cut(data, data.nbytes, start, max_records - count, max_bytes - size, at_least=0 if chunks else 1)
        if not len(part):
            break
        chunks.append(part)
        count, size = count + len(part), size + data.nbytes * len(part) // len(data)
    return pa.Table.from_batches(chunks, SCHEMA)
