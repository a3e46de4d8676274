"""Rounds of a reshard without Spark: a moderate number of records is copied and compared in a fraction of a second."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from shardyard.log import Log
from shardyard.log.port import READ_BYTES
from shardyard.model import Damaged, Partition
from shardyard.model.batch import SCHEMA, Batch
from shardyard.pipeline.blocking import BlockingLog
from shardyard.pipeline.partitioning import PartitionerSpec
from shardyard.pipeline.reshard.job import Job, Round
from shardyard.pipeline.reshard.offset_translation import Chunk
from shardyard.pipeline.reshard.placing import ChunkPlacer
from shardyard.pipeline.source.staging import PartitionIndexes, Staging

ROUND_RECORDS = 50_000
ROUND_BYTES = 64 * 1024 * 1024
"""At most about so much is held in memory at a time; what is beyond it is left to the next round."""
CONCURRENT_READS = 8


@dataclass(frozen=True, slots=True)
class _Part:
    """The records that a round takes from one source partition."""

    end: int
    """The offset up to which the round has read the partition."""
    data: pa.RecordBatch
    chunk: Chunk | None
    """None if there are no records."""
    targets: PartitionIndexes


class DirectRounds:
    """Copies and compares rounds in this process."""

    def __init__(self, opened: BlockingLog, staging: Staging, job: Job) -> None:
        self._opened, self._staging, self._job = opened, staging, job
        ChunkPlacer(job.spec, 0, 0).place(pa.array([b""]))  # loads compiled code, which takes longer than the rest

    def stage(self, starts: Sequence[int], ends: Sequence[int]) -> tuple[Round, tuple[str, ...]]:
        """Stage the records from `starts` up to `ends`, or up to the limits of a round. Returns the round, which says
        how far it got, and its files."""
        parts = self._opened.wait(self._read_round(starts, ends, limited=True))
        chunks = tuple(part.chunk for part in parts if part.chunk is not None)
        file = self._staging.write([(part.data, part.targets) for part in parts])
        done = Round(tuple(starts), tuple(part.end for part in parts), chunks, is_direct=True)
        return done, () if file is None else (file,)

    def compare(self, done: Round, before: Sequence[int], after: Sequence[int]) -> None:
        """Raise `Damaged` unless each target partition holds, from `before` up to `after`, exactly the records of the
        round that belong there, in the order of the source."""
        job = self._job
        parts = self._opened.wait(self._read_round(done.starts, done.ends, limited=False))
        records = pa.Table.from_batches([part.data for part in parts], SCHEMA)
        targets = np.concatenate([np.empty(0, np.int32), *(part.targets for part in parts)])
        found = self._opened.wait(_read_ranges(self._opened.log, job.target, before, after))
        order = np.argsort(targets, kind="stable")
        records = records.take(pa.array(order))
        edges = np.searchsorted(targets[order], np.arange(len(found) + 1))
        for q, copied in enumerate(found):
            expected = records.slice(edges[q], edges[q + 1] - edges[q])
            if not copied.equals(expected):
                what = f"{len(copied)} records from offset {before[q]} on that are not the {len(expected)}"
                raise Damaged(job.target, f"partition {q} has {what} of {job.topic!r}: abort the reshard")

    async def _read_round(self, starts: Sequence[int], ends: Sequence[int], *, limited: bool) -> list[_Part]:
        """What a round takes from each source partition. If not `limited`, it is a round that was within the limits."""
        busy = max(1, sum(end > start for start, end in zip(starts, ends, strict=True)))
        records, size = (ROUND_RECORDS // busy + 1, ROUND_BYTES // busy + 1) if limited else (None, None)
        slots = asyncio.Semaphore(CONCURRENT_READS)

        async def read(index: int, start: int, end: int) -> _Part:
            async with slots:
                partition = Partition(self._job.topic, index)
                batches, reached = await _read(self._opened.log, partition, start, end, records, size)
            return _place(batches, self._job.spec, index, reached)

        ranges = zip(starts, ends, strict=True)
        return list(await asyncio.gather(*(read(index, start, end) for index, (start, end) in enumerate(ranges))))


async def count_records(log: Log, topic: str, starts: Sequence[int], ends: Sequence[int]) -> int:
    """How many records lie between these offsets, which may be none where they have gaps."""
    return sum(len(found) for found in await _read_ranges(log, topic, starts, ends))


def _place(batches: Sequence[Batch], spec: PartitionerSpec, index: int, reached: int) -> _Part:
    data = pa.Table.from_batches([part for batch in batches for part in batch.data.to_batches()], SCHEMA)
    rows = data.combine_chunks().to_batches()
    if not len(data):
        return _Part(reached, pa.RecordBatch.from_pylist([], SCHEMA), None, np.empty(0, np.int32))
    filled = [batch.offset_array() for batch in batches if len(batch)]
    start, end = int(filled[0][0]), int(filled[-1][-1]) + 1
    placer = ChunkPlacer(spec, index, start)
    targets = placer.place(rows[0]["key"])
    return _Part(reached, rows[0], Chunk(index, start, end, tuple(placer.counts.tolist())), targets)


async def _read_ranges(log: Log, topic: str, starts: Sequence[int], ends: Sequence[int]) -> list[pa.Table]:
    """The records of each partition between these offsets."""
    slots = asyncio.Semaphore(CONCURRENT_READS)

    async def read(index: int, start: int, end: int) -> pa.Table:
        async with slots:
            batches, _ = await _read(log, Partition(topic, index), start, end, None, None)
        return pa.Table.from_batches([part for batch in batches for part in batch.data.to_batches()], SCHEMA)

    ranges = zip(starts, ends, strict=True)
    return list(await asyncio.gather(*(read(index, start, end) for index, (start, end) in enumerate(ranges))))


async def _read(
    log: Log, partition: Partition, start: int, end: int, max_records: int | None, max_bytes: int | None
) -> tuple[list[Batch], int]:
    """The batches of a partition from `start` up to `end`, or until a limit is reached, and the offset behind them."""
    batches: list[Batch] = []
    at = start
    records = size = 0
    while at < end and (max_records is None or records < max_records) and (max_bytes is None or size < max_bytes):
        limit = end - at if max_records is None else min(end - at, max_records - records)
        most = READ_BYTES if max_bytes is None else min(READ_BYTES, max_bytes - size)
        batch = (await log.read(partition, at, max_records=limit, max_bytes=most)).before(end)
        if batch.end <= at:
            if (span := await log.span(partition)).end < end:
                raise Damaged(str(partition), f"it ends at {span.end} instead of {end}: abort the reshard")
            return batches, end  # there is a gap at the end
        batches.append(batch)
        at, records, size = batch.end, records + len(batch), size + batch.data.nbytes
    return batches, at
