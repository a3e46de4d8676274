"""What the log's tests are made of."""

import asyncio
import functools
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pyarrow as pa

from shardyard.log import Log
from shardyard.model import Partition, Record
from shardyard.model.batch import SCHEMA

PATIENCE = 20.0
"""Seconds that a test waits for what must come soon."""
T0, T1 = Partition("t", 0), Partition("t", 1)


def awaited(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """An async test as pytest can call it; the log it was given is closed at its end."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        async def whole() -> None:
            try:
                await asyncio.wait_for(test(**fixtures), 3 * PATIENCE)
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


async def contents(log: Log, partition: Partition, max_records: int = 10_000, max_bytes: int = 2**20) -> list[Record]:
    """All records of a partition, and that they lie at consecutive offsets."""
    has = await log.span(partition)
    found: list[Record] = []
    while has.first + len(found) < has.end:
        batch = await log.read(partition, has.first + len(found), max_records=max_records, max_bytes=max_bytes)
        assert (batch.partition, batch.epoch, batch.first) == (partition, has.epoch, has.first + len(found))
        assert len(batch)
        assert batch.end == batch.first + len(batch)
        found += batch.records()
    return found
