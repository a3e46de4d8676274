"""What the log's tests are made of."""

import asyncio
import functools
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa

from shardyard.log import Log
from shardyard.log.memory import MemoryLog
from shardyard.model import OutcomeUnknown, Partition, Record, Span, Topic
from shardyard.model.batch import SCHEMA
from tests.log.sparse import offset_of

TIMEOUT_SECONDS = 20.0
"""How long a test waits for what must happen soon."""
T0, T1 = Partition("t", 0), Partition("t", 1)
HOLDER = "holder"
"""Who seals topics in the tests."""


def awaited(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """An async test as pytest can call it; the log it was given is closed at its end."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        async def whole() -> None:
            try:
                await asyncio.wait_for(test(**fixtures), 3 * TIMEOUT_SECONDS)
            finally:
                if "log" in fixtures:
                    await fixtures["log"].close()

        asyncio.run(whole())

    return run


def record(i: int, *, timestamp: int = 1_000, size: int = 5) -> Record:
    return Record(f"r{i}", b"k%d" % (i % 3), b"%0*d" % (size, i), timestamp=timestamp)


def records(*numbers: int) -> list[Record]:
    return [record(i) for i in numbers]


def arrow(rows: Sequence[Record]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(
        [
            {"id": r.id, "key": r.key, "value": r.value, "headers": r.headers or None, "timestamp": r.timestamp}
            for r in rows
        ],
        schema=SCHEMA,
    )


async def move(log: Log, name: str, successor: str) -> Topic:
    """Seal a topic and move it at once."""
    sealed = await log.seal_topic(name, HOLDER)
    return await log.move_topic(name, successor, holder=HOLDER, generation=sealed.generation)


async def contents(log: Log, partition: Partition, max_records: int = 10_000, max_bytes: int = 2**20) -> list[Record]:
    """All records of a partition, and that their offsets are as the log promises."""
    return [record for _, record in await numbered(log, partition, max_records=max_records, max_bytes=max_bytes)]


async def numbered(
    log: Log, partition: Partition, max_records: int = 10_000, max_bytes: int = 2**20
) -> list[tuple[int, Record]]:
    """All records of a partition with their offsets."""
    has = await log.span(partition)
    found: list[tuple[int, Record]] = []
    at = has.first
    while at < has.end:
        batch = await log.read(partition, at, max_records=max_records, max_bytes=max_bytes)
        assert (batch.partition, batch.epoch, batch.first) == (partition, has.epoch, at)
        offsets = list(batch.offsets())
        assert offsets == sorted(set(offsets)), "they ascend"
        assert all(at <= offset < batch.end for offset in offsets)
        if log.capabilities.dense_offsets:
            assert len(batch)
            assert (batch.end, offsets) == (at + len(batch), list(range(at, at + len(batch))))
        assert batch.end > at
        found += zip(offsets, batch.records(), strict=True)
        at = batch.end
    assert at == has.end
    assert len(found) <= await log.count(partition, has.first, has.end)
    return found


def at(log: Log, number: int) -> int:
    """The offset of the record that was appended to a partition as number `number`, from 0 on."""
    return number if log.capabilities.dense_offsets else offset_of(number)


def end(log: Log, count: int) -> int:
    """The end of a partition that got `count` records."""
    return count if log.capabilities.dense_offsets else offset_of(count) - 1


def from_(log: Log, number: int, count: int) -> int:
    """Where to read, or to trim, to have all of `count` records but the first `number`."""
    return end(log, count) if number == count else at(log, number)


def spanned(log: Log, epoch: int, first: int, count: int) -> Span:
    """The span of a partition that got `count` records, the first `first` of which were trimmed."""
    return Span(epoch, from_(log, first, count) if first else 0, end(log, count))


def state(topic: Topic) -> Topic:
    """A topic without its generation, which every change raises."""
    return replace(topic, generation=0)


class LostResponses(MemoryLog):
    """Stores each batch, but says once that it does not know."""

    def __init__(self) -> None:
        super().__init__()
        self._losses = 1

    async def append(self, partition: Partition, records: Any, **options: Any) -> Any:
        appended = await super().append(partition, records, **options)
        if self._losses:
            self._losses -= 1
            raise OutcomeUnknown("the database", "the connection is lost")
        return appended
