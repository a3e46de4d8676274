"""Fills logs for tests and reads them back."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from shardyard.groups import Node, Reader
from shardyard.log import open_log
from shardyard.model import Partition, Record, Topic
from shardyard.model.batch import SCHEMA
from shardyard.pipeline.blocking import blocking
from shardyard.placement import partitioner_named
from shardyard.registry import open_registry


def url(folder: Path) -> str:
    return f"sqlite:///{folder / 'log'}"


def create(log: str, topic: str, partitions: int) -> Topic:
    with blocking(log, create=True) as opened:
        return opened.wait(opened.log.create_topic(topic, partitions))


def append(log: str, topic: str, partition: int, records: list[Record] | pa.RecordBatch) -> None:
    with blocking(log) as opened:
        opened.wait(opened.log.append(Partition(topic, partition), records))


def fill(log: str, topic: str, count: int, *, keys: int = 50, first: int = 0, batch: int = 1000) -> None:
    """Append `count` records `id-<n>` with the key `key-<n % keys>` and the value n, a millisecond apart."""
    with blocking(log) as opened:
        described = opened.wait(opened.log.topic(topic))
        partitioner = partitioner_named(described.partitioner, described.partitions, described.hash)
        for start in range(first, first + count, batch):
            data = numbered(range(start, min(start + batch, first + count)), keys)
            indexes = partitioner.place_array(data["key"]).to_numpy()
            for partition in np.unique(indexes).tolist():
                part = data.take(pa.array(np.flatnonzero(indexes == partition)))
                opened.wait(opened.log.append(Partition(topic, partition), part))


def numbered(numbers: Iterable[int], keys: int, start_ms: int = 1_760_000_000_000) -> pa.RecordBatch:
    n = pa.array(numbers, pa.int64())
    text = n.cast(pa.string())
    count = len(n)
    residues = pa.array(n.to_numpy() % keys).cast(pa.string())
    return pa.RecordBatch.from_arrays(
        [
            pc.binary_join_element_wise("id-", text, ""),
            pc.binary_join_element_wise("key-", residues, "").cast(pa.binary()),
            text.cast(pa.binary()),
            pa.nulls(count, SCHEMA.field("headers").type),
            pc.add(n, start_ms),
        ],
        schema=SCHEMA,
    )


def contents(log: str, topic: str) -> list[list[Record]]:
    """The records of each partition."""
    with blocking(log) as opened:
        partitions = []
        for partition in opened.wait(opened.log.topic(topic)):
            at = opened.wait(opened.log.span(partition)).first
            records: list[Record] = []
            while (batch := opened.wait(opened.log.read(partition, at, max_records=100_000))).end > at:
                records += batch.records()
                at = batch.end
            partitions.append(records)
        return partitions


def by_key(partitions: list[list[Record]]) -> dict[bytes | None, list[str]]:
    """The ids of each key, in order. Asserts that each key is on one partition only."""
    found: dict[bytes | None, list[str]] = {}
    for records in partitions:
        here: dict[bytes | None, list[str]] = {}
        for record in records:
            here.setdefault(record.key, []).append(record.id)
        assert not here.keys() & found.keys()
        found |= here
    return found


def ids(partitions: list[list[Record]]) -> list[str]:
    """Of all records, sorted."""
    return sorted(record.id for records in partitions for record in records)


async def consume(log: str, registry: str, topic: str, count: int, seen: list[str]) -> None:
    """Consume as the group `billing` until `count` records have been processed in total."""
    with open_registry(registry) as rows:
        async with (
            open_log(log) as opened,
            Node(opened, rows) as node,
            Reader("billing", [topic], node=node, max_records=7) as member,
        ):
            async for batch in member:
                seen.extend(record.id for record in batch.records())
                await batch.commit()
                if len(seen) >= count:
                    return
