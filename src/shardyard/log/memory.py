"""The log's in-memory twin: the same contract without a disk, for tests, including those of users."""

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from shardyard.log import rules
from shardyard.log.port import (
    DEFAULT_RETENTION,
    READ_BYTES,
    READ_RECORDS,
    SEAL_SECONDS,
    Capabilities,
    Log,
)
from shardyard.log.waiting import wait_at_most
from shardyard.model import (
    SEQUENCE_WINDOW,
    Appended,
    Closed,
    Fence,
    OffsetBeyondEnd,
    Partition,
    PartitionOutOfRange,
    Position,
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
from shardyard.model.batch import SCHEMA, Batch, cut, from_records
from shardyard.model.checks import check_int64, check_text
from shardyard.model.limits import Limits, Records, check_partitions, check_topic_name, validate
from shardyard.runtime.clock import Clock, SystemClock

Offsets = npt.NDArray[np.int64]


@dataclass(slots=True)
class _Stored:
    """What a partition stores. A dropped partition is kept, without records, in case that it is added again."""

    batches: list[tuple[Offsets, pa.RecordBatch]] = field(default_factory=list)
    first: int = 0
    end: int = 0
    stamps: defaultdict[str, dict[int, tuple[int, int]]] = field(default_factory=lambda: defaultdict(dict))
    readers: set["asyncio.Future[None]"] = field(default_factory=set)
    """Those that wait for the partition to change."""

    def wake(self) -> None:
        for reader in self.readers:
            if not reader.done():
                reader.set_result(None)


class MemoryLog(Log):
    """A log that lasts as long as its process."""

    def __init__(self, *, limits: Limits | None = None, clock: Clock | None = None) -> None:
        self._limits = limits or Limits()
        self._clock = clock or SystemClock()
        self._topics: dict[str, Topic] = {}
        self._seals: dict[str, rules.Seal] = {}
        self._stored: dict[Partition, _Stored] = {}
        self._fences: dict[str, int] = {}
        self._last_number = 0
        """The last epoch, generation or version of the catalog that was given out."""
        self._closed = False

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(contraction=True, stamps_across_processes=True, atomic_batches=True, dense_offsets=True)

    # Topics

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
        self._check_not_closed()
        wanted = Topic(
            check_topic_name(name, self._limits),
            check_partitions(partitions, self._limits),
            kind,
            rules.check_retention(retention),
            0,
            *rules.check_placement(partitioner, partitions, hash_),
        )
        if name in self._topics:
            raise TopicExists(name, self._topics[name].partitions)
        epoch = self._next_number()
        return self._put(replace(wanted, epoch=epoch, generation=epoch))

    async def expand_topic(self, name: str, partitions: int) -> Topic:
        partitions = check_partitions(partitions, self._limits)
        before = self._topic(name)
        return self._change(before, rules.expanded(before, partitions))

    async def contract_topic(self, name: str, partitions: int) -> Topic:
        rules.check_contraction(self.capabilities)
        partitions = whole_number("partitions", partitions, at_least=1)
        before = self._topic(name)
        return self._change(before, rules.contracted(before, partitions))

    async def drop_partitions(self, name: str, partitions: int) -> Topic:
        rules.check_contraction(self.capabilities)
        partitions = whole_number("partitions", partitions, at_least=1)
        before = self._topic(name)
        after = self._change(before, rules.without_draining(before, partitions))
        for index in range(after.partitions, before.partitions):
            stored = self._stored[Partition(name, index)]
            stored.first, stored.batches = stored.end, []
            stored.wake()
        return after

    async def set_retention(self, name: str, retention: Retention) -> Topic:
        rules.check_retention(retention)
        topic = replace(self._topic(name), retention=retention)
        self._next_number()
        return self._put(topic)

    async def seal_topic(self, name: str, holder: str, *, seconds: float = SEAL_SECONDS) -> Topic:
        duration = rules.check_seal(holder, seconds)
        topic, now = self._topic(name), self._now()
        rules.check_sealable(topic, self._seals.get(name), holder, now)
        self._seals[name] = rules.Seal(holder, now, now + duration)
        return self._change(topic, replace(topic, sealed=True))

    async def unseal_topic(self, name: str, holder: str) -> Topic:
        check_text("holder", holder)
        topic = self._topic(name)
        rules.check_open(name, sealed=False, successor=topic.successor)
        if (seal := self._seals.get(name)) is None or seal.holder != holder:
            return topic
        del self._seals[name]
        return self._change(topic, replace(topic, sealed=False))

    async def move_topic(self, name: str, successor: str, *, holder: str, generation: int) -> Topic:
        check_text("successor", successor)
        check_text("holder", holder)
        topic = self._topic(name)
        if topic.successor == successor:
            return topic
        rules.check_open(name, sealed=False, successor=topic.successor)
        rules.check_move(topic, self._topic(successor), self._seals.get(name), holder, generation, self._now())
        del self._seals[name]
        return self._change(topic, replace(topic, sealed=True, successor=successor))

    async def delete_topic(self, name: str) -> None:
        self._topic(name)
        gone = {partition: stored for partition, stored in self._stored.items() if partition.topic == name}
        del self._topics[name]
        self._seals.pop(name, None)
        self._next_number()
        for partition, stored in gone.items():
            del self._stored[partition]
            stored.wake()

    async def topic(self, name: str) -> Topic:
        return self._topic(name)

    async def topics(self) -> list[Topic]:
        self._check_not_closed()
        return [self._topic(name) for name in sorted(self._topics)]

    async def catalog_version(self) -> int:
        self._check_not_closed()
        return self._last_number

    # Records

    async def append(
        self,
        partition: Partition,
        records: Records,
        *,
        stamp: Stamp | None = None,
        fence: Fence | Sequence[Fence] | None = None,
        generation: int | None = None,
    ) -> Appended:
        now = self._now()
        rows = validate(records, self._limits, now).rows
        data = rows if isinstance(rows, pa.RecordBatch) else from_records(rows, now)
        rules.check_append_options(stamp, fence, generation)
        topic, stored = self._find(partition)
        fences = rules.all_fences(fence)
        for one in fences:
            self._check_fence(one)
        known = stored.stamps[stamp.producer] if stamp is not None else {}
        if stamp is not None and known and stamp.sequence <= (last := max(known)) - SEQUENCE_WINDOW:
            raise SequenceTooOld(partition, stamp.producer, stamp.sequence, last)
        if stamp is not None and stamp.sequence in known:
            rules.check_same_batch(stamp, known[stamp.sequence][1], len(data))
        else:
            rules.check_receives(
                partition, topic.sealed, topic.successor, topic.receiving, topic.generation, generation
            )
        self._fences.update({one.name: one.epoch for one in fences})
        if stamp is not None and stamp.sequence in known:
            first, count = known[stamp.sequence]
            return Appended(partition, Position(topic.epoch, first), count, duplicate=True)
        offsets, end = self._place(stored.end, len(data))
        first = int(offsets[0])
        if stamp is not None:
            known[stamp.sequence] = (first, len(data))
            stored.stamps[stamp.producer] = {s: at for s, at in known.items() if s > max(known) - SEQUENCE_WINDOW}
        stored.batches.append((offsets, data))
        stored.end = end
        stored.wake()
        return Appended(partition, Position(topic.epoch, first), len(data))

    def _place(self, end: int, count: int) -> tuple[Offsets, int]:
        """The offsets of the next `count` records of a partition that ends at `end`, and its new end."""
        return np.arange(end, end + count), end + count

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
            topic, stored = self._find(partition)
            self._check_fence(fence)
            rules.check_offset(partition, Span(topic.epoch, stored.first, stored.end), offset, epoch)
            return _read(partition, topic.epoch, stored, offset, max_records, max_bytes)

        await asyncio.sleep(0)  # other tasks run in between, as they do with a log on a disk
        batch = fetch()
        if batch.end == offset and wait > 0:
            await self._wait_for_change(partition, wait)
            batch = fetch()
        return batch

    async def _wait_for_change(self, partition: Partition, seconds: float) -> None:
        readers = self._find(partition)[1].readers
        changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        readers.add(changed)
        try:
            await wait_at_most(changed, seconds, self._clock)
        finally:
            readers.discard(changed)

    async def span(self, partition: Partition) -> Span:
        topic, stored = self._find(partition)
        return Span(topic.epoch, stored.first, stored.end)

    async def ends(self, topic: str, *, dropped: bool = False) -> dict[int, Span]:
        found = self._topic(topic)
        count = found.partitions
        while dropped and Partition(topic, count) in self._stored:
            count += 1
        stored = ((index, self._stored[Partition(topic, index)]) for index in range(count))
        return {index: Span(found.epoch, has.first, has.end) for index, has in stored}

    async def count(self, partition: Partition, start: int, end: int) -> int:
        start = whole_number("start", start, at_least=0)
        end = whole_number("end", end, at_least=0)
        _, stored = self._find(partition)
        start = max(start, stored.first)
        between = (np.searchsorted(offsets, [start, max(start, end)]) for offsets, _ in stored.batches)
        return sum(int(after - before) for before, after in between)

    async def offset_at(self, partition: Partition, timestamp: int) -> int:
        timestamp = check_int64("timestamp", timestamp)
        _, stored = self._find(partition)
        for offsets, data in stored.batches:
            late = offsets[(data["timestamp"].to_numpy() >= timestamp) & (offsets >= stored.first)]
            if len(late):
                return int(late[0])
        return stored.end

    async def trim(self, partition: Partition, before: int) -> Span:
        before = whole_number("before", before, at_least=0)
        topic, stored = self._find(partition)
        if before > stored.end:
            raise OffsetBeyondEnd(partition, before, stored.end)
        stored.first = max(stored.first, before)
        stored.batches = [(offsets, data) for offsets, data in stored.batches if offsets[-1] >= stored.first]
        return Span(topic.epoch, stored.first, stored.end)

    async def set_fence(self, fence: Fence) -> None:
        self._check_not_closed()
        self._check_fence(fence)
        self._fences[fence.name] = fence.epoch

    async def maintain(self) -> None:
        self._check_not_closed()
        for topic in self._topics.values():
            for partition in topic:
                await self.trim(partition, self._first_kept(topic.retention, self._stored[partition]))

    def _first_kept(self, retention: Retention, stored: _Stored) -> int:
        keep = stored.first
        if retention.age_ms:
            since = self._now() - retention.age_ms
            young = (int(offsets[0]) for offsets, data in stored.batches if pc.max(data["timestamp"]).as_py() >= since)
            keep = max(keep, next(young, stored.end))
        if retention.bytes_per_partition:
            total, within = 0, stored.end
            for offsets, data in reversed(stored.batches):
                total += data.nbytes
                if total > retention.bytes_per_partition and within < stored.end:
                    break
                within = int(offsets[0])
            keep = max(keep, within)
        return keep

    async def close(self) -> None:
        self._closed = True
        for stored in self._stored.values():
            stored.wake()

    # State

    def _now(self) -> int:
        return rules.milliseconds(self._clock)

    def _next_number(self) -> int:
        """For epochs, generations and versions of the catalog: higher than any before, also than those of a log that
        was lost."""
        self._last_number = max(self._last_number + 1, self._now())
        return self._last_number

    def _check_not_closed(self) -> None:
        if self._closed:
            raise Closed("the log")

    def _topic(self, name: str) -> Topic:
        self._check_not_closed()
        if name not in self._topics:
            raise UnknownTopic(name)
        seal = self._seals.get(name)
        if seal is not None and not seal.in_force(self._now()):
            # It has ended for good: a clock that is set back must not put it in force again.
            del self._seals[name]
            self._topics[name] = replace(self._topics[name], sealed=False)
        return self._topics[name]

    def _change(self, before: Topic, after: Topic) -> Topic:
        if rules.raises_generation(before, after):
            after = replace(after, generation=self._next_number())
        return self._put(after)

    def _put(self, topic: Topic) -> Topic:
        self._topics[topic.name] = topic
        for partition in topic:
            self._stored.setdefault(partition, _Stored())
        return topic

    def _find(self, partition: Partition) -> tuple[Topic, _Stored]:
        rules.check_partition(partition)
        topic = self._topic(partition.topic)
        if not 0 <= partition.index < topic.partitions:
            raise PartitionOutOfRange(partition, topic.partitions)
        return topic, self._stored[partition]

    def _check_fence(self, fence: Fence | None) -> None:
        if fence is not None:
            rules.check_fence(fence, self._fences.get(fence.name))


def _read(partition: Partition, epoch: int, stored: _Stored, offset: int, max_records: int, max_bytes: int) -> Batch:
    """The records from `offset` on that fit the limits."""
    chunks: list[pa.RecordBatch] = []
    places: list[Offsets] = []
    count = size = 0
    stop = stored.end
    for offsets, data in stored.batches:
        start = int(np.searchsorted(offsets, offset))
        if start == len(offsets):
            continue
        part = cut(data, data.nbytes, start, max_records - count, max_bytes - size, at_least=0 if chunks else 1)
        if len(part):
            chunks.append(part)
            places.append(offsets[start : start + len(part)])
        count, size = count + len(part), size + data.nbytes * len(part) // len(data)
        if start + len(part) < len(data):
            stop = int(places[-1][-1]) + 1
            break
    table = pa.Table.from_batches(chunks, SCHEMA)
    if stop == offset + count:
        return Batch(partition, epoch, offset, table)
    return Batch(partition, epoch, offset, table, np.concatenate([np.empty(0, np.int64), *places]), stop)
