"""Offsets with gaps: everything below Spark reads, stages and translates records by their own offsets."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import pyarrow as pa
import pytest

from shardyard.model import Partition, Retention, Span
from shardyard.model.batch import Batch
from shardyard.pipeline.blocking import BlockingLog
from shardyard.pipeline.partitioning import PartitionerSpec
from shardyard.pipeline.reshard import direct_rounds
from shardyard.pipeline.reshard.direct_rounds import DirectRounds
from shardyard.pipeline.reshard.job import Job
from shardyard.pipeline.reshard.offset_translation import Chunk
from shardyard.pipeline.reshard.positions import GroupPositions, skip
from shardyard.pipeline.reshard.spark_rounds import stage_task
from shardyard.pipeline.source import offsets, source
from shardyard.pipeline.source.columns import COLUMNS, offsets_of, to_spark
from shardyard.pipeline.source.offsets import DataLost, Range
from shardyard.pipeline.source.options import read_options
from shardyard.pipeline.source.staging import Staging
from tests.pipeline.logs import numbered

T = TypeVar("T")
EPOCH = 7
PARTITION = Partition("orders", 1)
OFFSETS = [3, 4, 8, 9, 10, 20, 21, 35, 50, 51]
"""Of the records, whose values are 0, 1, 2 and so on; the partition ends with a gap."""
END = 60


@dataclass
class GappyLog:
    """Reads of one partition with gaps, in batches of two chunks. Stands in for an opened log as well."""

    offsets: list[int]
    end: int
    skips_gaps: bool
    """Whether a batch ends behind the gap after its last record, or right behind that record."""
    records_per_read: int = 100

    @property
    def log(self) -> "GappyLog":
        return self

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run(work)

    async def span(self, _partition: Partition) -> Span:
        return Span(EPOCH, 0, self.end)

    async def read(
        self, partition: Partition, offset: int, *, epoch: int = EPOCH, max_records: int, max_bytes: int = 0
    ) -> Batch:
        assert (partition, epoch) == (PARTITION, EPOCH), max_bytes
        ahead = [n for n, at in enumerate(self.offsets) if at >= offset]
        limit = min(max_records, self.records_per_read)
        found, rest = ahead[:limit], ahead[limit:]
        places = np.array([self.offsets[n] for n in found], np.int64)
        stop = int(places[-1]) + 1 if found else offset
        if self.skips_gaps:
            stop = self.offsets[rest[0]] if rest else self.end
        data = numbered(found, 4)
        chunks = pa.Table.from_batches([data.slice(0, 1), data.slice(1)])
        return Batch(partition, epoch, offset, chunks, places, stop)


@pytest.fixture(params=[True, False], ids=["skips gaps", "stops before gaps"])
def log(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> GappyLog:
    """A log whose partition has gaps, which is opened instead of any other."""
    gappy = GappyLog(OFFSETS, END, request.param)

    @contextmanager
    def opened(_url: str) -> Iterator[GappyLog]:
        yield gappy

    monkeypatch.setattr(source, "blocking", opened)
    return gappy


def read(start: int, end: int, epoch: int = EPOCH) -> list[tuple[int, int]]:
    """Offset and value of each row that a task reads."""
    options = read_options({"log": "sqlite:////log", "topics": PARTITION.topic}, streaming=False)
    partition = source.RangePartition(Range(PARTITION.topic, PARTITION.index, epoch, start, end))
    batches = list(source._read(partition, options, COLUMNS))
    return [(row["offset"], int(row["value"])) for batch in batches for row in batch.to_pylist()]


def expected(start: int, end: int) -> list[tuple[int, int]]:
    return [(offset, n) for n, offset in enumerate(OFFSETS) if start <= offset < end]


def test_rows_have_the_offsets_of_their_records(log: GappyLog) -> None:
    batch = asyncio.run(log.read(PARTITION, 4, max_records=5))
    assert offsets_of(batch).tolist() == [4, 8, 9, 10, 20]
    rows = pa.Table.from_batches(to_spark(batch, COLUMNS, END))
    assert rows["offset"].to_pylist() == [4, 8, 9, 10, 20]
    assert rows["value"].to_pylist() == [b"1", b"2", b"3", b"4", b"5"]
    assert set(rows["partition"].to_pylist()) == {PARTITION.index}


def test_consecutive_offsets_need_not_be_listed() -> None:
    batch = Batch(PARTITION, EPOCH, 5, pa.Table.from_batches([numbered(range(3), 4)]))
    assert offsets_of(batch).tolist() == [5, 6, 7]


@pytest.mark.parametrize("end", [0, 4, 5, 9, 20, 21, 99])
def test_a_batch_is_cut_by_offset_wherever_its_chunks_end(log: GappyLog, end: int) -> None:
    batch = asyncio.run(log.read(PARTITION, 4, max_records=5))
    found = [offset for part in to_spark(batch, COLUMNS, end) for offset in part["offset"].to_pylist()]
    assert found == [offset for offset in [4, 8, 9, 10, 20] if offset < end]


@pytest.mark.parametrize("records_per_read", [1, 3, 100])
@pytest.mark.parametrize(("start", "end"), [(0, END), (0, 9), (4, 21), (5, 8), (11, 20), (22, 35), (35, 36), (52, END)])
def test_a_task_reads_exactly_the_records_in_its_range(
    log: GappyLog, start: int, end: int, records_per_read: int
) -> None:
    log.records_per_read = records_per_read
    assert read(start, end) == expected(start, end)


@pytest.mark.usefixtures("log")
@pytest.mark.parametrize("most", [1, 2, 7, 100])
def test_the_tasks_of_a_partition_read_every_record_once(most: int) -> None:
    whole = Range(PARTITION.topic, PARTITION.index, EPOCH, 0, END)
    assert [row for part in offsets.split([whole], most) for row in read(part.start, part.end)] == expected(0, END)


def test_a_partition_that_became_shorter_is_an_error_but_a_gap_at_the_end_is_none(log: GappyLog) -> None:
    assert read(0, END)[-1] == (51, 9)
    log.end = 55
    with pytest.raises(DataLost, match=r"orders/1 ends at 55, but 60 was its end when the read was planned"):
        read(0, END)


# Resharding


def job_for(spec: PartitionerSpec) -> Job:
    return Job(PARTITION.topic, EPOCH, "orders.2", EPOCH, spec, Retention())


def stage_by_spark(log: GappyLog, staging: Staging, spec: PartitionerSpec) -> tuple[Chunk, str]:
    batch = asyncio.run(log.read(PARTITION, 0, max_records=100))
    (staged,) = stage_task(staging, spec)(iter(to_spark(batch, COLUMNS, log.end)))
    (row,) = staged.to_pylist()
    return Chunk(row["partition"], row["start"], row["end"], tuple(row["counts"])), row["file"]


def stage_directly(log: GappyLog, staging: Staging, spec: PartitionerSpec) -> tuple[Chunk, str]:
    rounds = DirectRounds(cast(BlockingLog, log), staging, job_for(spec))
    done, (file,) = rounds.stage([0, 0], [0, log.end])
    assert done.ends == (0, log.end)
    (chunk,) = done.chunks
    return chunk, file


@pytest.mark.parametrize("stage", [stage_by_spark, stage_directly])
@pytest.mark.parametrize(
    "spec", [PartitionerSpec("modulus", "fnv1a32", 3), PartitionerSpec("round_robin", None, 3)], ids=str
)
def test_a_staged_chunk_and_any_part_of_it_are_counted_alike(
    log: GappyLog, spec: PartitionerSpec, stage: Callable[..., tuple[Chunk, str]], tmp_path: Path
) -> None:
    staging = Staging(tmp_path)
    chunk, file = stage(log, staging, spec)
    assert (chunk.partition, chunk.start, chunk.end) == (PARTITION.index, OFFSETS[0], OFFSETS[-1] + 1)
    assert sum(chunk.counts) == len(OFFSETS)
    written = pa.Table.from_batches(staging.read(file)).to_pylist()
    targets = {int(record["value"]): record["partition"] for record in written}
    log.records_per_read = 3
    positions = GroupPositions(cast(BlockingLog, log), job_for(spec), None)
    for end in [*range(OFFSETS[0], END), *range(OFFSETS[0], END, 7)]:  # forwards, and then from the start again
        done = [targets[n] for n, offset in enumerate(OFFSETS) if offset < end]
        counts = positions._count_targets("billing", PARTITION.index, chunk.start, end)
        assert counts == [done.count(q) for q in range(3)]


@pytest.mark.parametrize("stage", [stage_by_spark, stage_directly])
def test_round_robin_uses_all_partitions_even_if_every_second_offset_is_a_gap(
    stage: Callable[..., tuple[Chunk, str]], tmp_path: Path
) -> None:
    every_second = GappyLog(list(range(0, 16, 2)), 16, skips_gaps=True)
    chunk, _ = stage(every_second, Staging(tmp_path), PartitionerSpec("round_robin", None, 4))
    assert chunk.counts == (2, 2, 2, 2)


def test_a_direct_round_ends_where_its_limits_are_reached(
    log: GappyLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct_rounds, "ROUND_RECORDS", 3)
    rounds = DirectRounds(cast(BlockingLog, log), Staging(tmp_path), job_for(PartitionerSpec("round_robin", None, 3)))
    at, found = 0, []
    while at < END:
        done, _ = rounds.stage([0, at], [0, END])
        found.append(sum(sum(chunk.counts) for chunk in done.chunks))
        assert done.ends[1] > at
        at = done.ends[1]
    assert sum(found) == len(OFFSETS)
    assert max(found) == 4


@pytest.mark.parametrize("count", range(1, len(OFFSETS) + 1))
def test_the_offset_behind_some_records_is_found_by_reading_them(log: GappyLog, count: int) -> None:
    log.records_per_read = 3
    assert skip(cast(BlockingLog, log), PARTITION, 0, count) == OFFSETS[count - 1] + 1
