"""How the embedded log reads what is new in several partitions by one statement, and what it reads by itself."""

import asyncio
import gc
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from shardyard.log import Log
from shardyard.log.requests import AppendRequest, Outcomes, ReadRequest
from shardyard.log.sqlite import SqliteLog
from shardyard.log.sqlite.read_many import ManyReader
from shardyard.model import (
    Damaged,
    Fence,
    Fenced,
    OffsetTrimmed,
    Partition,
    Record,
    ShardyardError,
)
from shardyard.model.batch import Batch
from tests.log.samples import T0, T1, TIMEOUT_SECONDS, awaited, record, records

T2 = Partition("t", 2)
ALL = (T0, T1, T2)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The places in the requests whose partitions were read by one statement, for each time that any were."""
    found: list[list[int]] = []
    read_new = ManyReader._read_new

    def note(self: ManyReader, *arguments: Any) -> dict[int, Batch]:
        new = read_new(self, *arguments)
        if new:
            found.append(sorted(new))
        return new

    monkeypatch.setattr(ManyReader, "_read_new", note)
    return found


@pytest.fixture
def without_garbage_collection() -> Iterator[None]:
    assert gc.isenabled()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "log"


def opened(folder: Path) -> SqliteLog:
    return SqliteLog(folder, durability="process", maintain_every=None)


async def grow(log: Log, *batches: Sequence[Record], partitions: Sequence[Partition] = ALL) -> None:
    for partition in partitions:
        for batch in batches:
            await log.append(partition, batch)


async def known(log: Log) -> None:
    """Create a topic of three partitions, and read them, so that their ids are known."""
    await log.create_topic("t", len(ALL))
    assert await log.read_many(requests()) == {}


def requests(*offsets: int) -> list[ReadRequest]:
    """The partitions from these offsets on, or from their beginnings."""
    return [ReadRequest(partition, offset) for partition, offset in zip(ALL, offsets or (0, 0, 0), strict=True)]


def news(found: Outcomes) -> dict[int, object]:
    """The ids that were read of the partitions, or the kind of error."""
    return {
        partition.index: type(one) if isinstance(one, ShardyardError) else [each.id for each in one.records()]
        for partition, one in found.items()
    }


def tamper(folder: Path, statement: str, partition: Partition) -> None:
    those = "partition = (SELECT id FROM partitions WHERE topic = ? AND number = ?)"
    with closing(sqlite3.connect(folder / "log.db", isolation_level=None)) as db:
        assert db.execute(f"{statement} AND {those}", (partition.topic, partition.index)).rowcount == 1


# What is refused or damaged ----------------------------------------------------------------------------------------


@awaited
async def test_a_fence_that_has_risen_refuses_only_its_partition(folder: Path, at_once: list[list[int]]) -> None:
    async with opened(folder) as log:
        await log.create_topic("t", 3)
        fenced = [ReadRequest(partition, 0, fence=Fence(f"f{partition.index}", 1)) for partition in ALL]
        for each in fenced:
            assert each.fence is not None
            await log.set_fence(each.fence)
        assert await log.read_many(fenced) == {}
        await grow(log, records(0))
        assert news(await log.read_many(fenced)) == {0: ["r0"], 1: ["r0"], 2: ["r0"]}
        assert at_once == [[0, 1, 2]]
        await log.set_fence(Fence("f1", 2))
        assert news(await log.read_many(fenced)) == {0: ["r0"], 1: Fenced, 2: ["r0"]}


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE batches SET checksum = checksum + 1 WHERE first = 0",
        "UPDATE batches SET checksum = checksum + 1 WHERE first = 2",
        "UPDATE batches SET count = 1 WHERE first = 2",
        "DELETE FROM batches WHERE first = 0",
        "DELETE FROM batches WHERE first = 2",
    ],
)
@awaited
async def test_a_partition_that_is_damaged_has_its_error_and_the_others_are_read(
    folder: Path, statement: str, at_once: list[list[int]]
) -> None:
    async with opened(folder) as log:
        await known(log)
        await grow(log, records(0, 1), records(2, 3), records(4))
        tamper(folder, statement, T1)
        found = await log.read_many(requests())
        assert news(found) == {0: ["r0", "r1", "r2", "r3", "r4"], 1: Damaged, 2: ["r0", "r1", "r2", "r3", "r4"]}
        assert "t/1 is damaged" in str(found[T1])
        assert at_once == [[0, 2]]


@awaited
async def test_a_partition_whose_records_were_trimmed_has_its_error_and_the_others_are_read(
    folder: Path, at_once: list[list[int]]
) -> None:
    async with opened(folder) as log:
        await known(log)
        await grow(log, records(0, 1))
        await log.trim(T1, 1)
        assert news(await log.read_many(requests())) == {0: ["r0", "r1"], 1: OffsetTrimmed, 2: ["r0", "r1"]}
        assert news(await log.read_many(requests(0, 1, 0))) == {0: ["r0", "r1"], 1: ["r1"], 2: ["r0", "r1"]}
        assert at_once == [[0, 2], [0, 1, 2]]


# Which records are read --------------------------------------------------------------------------------------------


@awaited
async def test_the_records_of_a_topic_that_was_created_again_are_read_and_not_those_of_the_old_one(
    folder: Path, at_once: list[list[int]]
) -> None:
    async with opened(folder) as log:
        await known(log)
        await grow(log, records(0, 1))
        assert news(await log.read_many(requests())) == {number: ["r0", "r1"] for number in range(3)}
        await log.delete_topic("t")
        again = await log.create_topic("t", 3)
        await grow(log, records(7, 8))
        assert news(await log.read_many(requests()[:2])) == {0: ["r7", "r8"], 1: ["r7", "r8"]}
        assert at_once == [[0, 1, 2]]
        for _ in range(2):  # by themselves, and then at once
            found = await log.read_many(requests())
            assert news(found) == {number: ["r7", "r8"] for number in range(3)}
            assert {batch.epoch for batch in found.values() if isinstance(batch, Batch)} == {again.epoch}
        assert at_once == [[0, 1, 2], [0, 1, 2]]


@awaited
async def test_a_partition_that_is_asked_for_twice_is_read_as_it_would_be_by_itself(
    folder: Path, at_once: list[list[int]]
) -> None:
    async with opened(folder) as log:
        await known(log)
        await grow(log, records(0), records(1), records(2))
        found = await log.read_many([ReadRequest(T0, 0), ReadRequest(T1, 0), ReadRequest(T0, 1)])
        assert at_once == [[0, 1, 2]]
        assert news(found) == {0: ["r1", "r2"], 1: ["r0", "r1", "r2"]}
        batch = found[T0]
        assert isinstance(batch, Batch)
        assert (batch.first, batch.end) == (1, 3)


@pytest.mark.parametrize(
    ("max_records", "max_bytes"),
    [(1, 10_000), (3, 10_000), (1_000, 1), (1_000, 500), (1_000, 1_500), (7, 1_000)],
)
@awaited
async def test_reads_end_at_their_limits_and_the_next_ones_continue_there(
    folder: Path, max_records: int, max_bytes: int, at_once: list[list[int]]
) -> None:
    """They give exactly what reads of single partitions give."""
    async with opened(folder) as log, opened(folder) as other:
        await known(log)
        batches = [[record(i, size=100) for i in range(first, first + 4)] for first in range(0, 24, 4)]
        await grow(log, *batches)
        ends = [0, 0, 0]
        read: list[list[Record]] = [[], [], []]
        calls = 0
        while found := await log.read_many(requests(*ends), max_records=max_records, max_bytes=max_bytes):
            calls += 1
            for partition, batch in found.items():
                at = ends[partition.index]
                alone = await other.read(partition, at, max_records=max_records, max_bytes=max_bytes)
                assert isinstance(batch, Batch)
                assert (batch.first, batch.end, batch.records()) == (alone.first, alone.end, alone.records())
                read[partition.index] += batch.records()
                ends[partition.index] = batch.end
        assert read == [[each for batch in batches for each in batch]] * 3
        assert at_once[0] == [0, 1, 2]
        assert calls > 1


@awaited
async def test_batches_that_were_merged_since_the_last_look_are_read_from_an_offset_within_them(
    folder: Path, at_once: list[list[int]]
) -> None:
    async with opened(folder) as log:
        await known(log)
        await grow(log, *(records(i) for i in range(70)))
        wanted = {0: [f"r{i}" for i in range(30, 70)], 1: [f"r{i}" for i in range(50, 70)], 2: ["r69"]}
        assert news(await log.read_many(requests(30, 50, 69))) == wanted
        before = log._snapshots.run(lambda db: db.execute("SELECT count(*) FROM batches").fetchone())
        await log.maintain()
        assert log._snapshots.run(lambda db: db.execute("SELECT count(*) FROM batches").fetchone()) < before
        assert news(await log.read_many(requests(30, 50, 69))) == wanted
        assert at_once == [[0, 1, 2]] * 2


@awaited
async def test_a_waiting_read_gets_what_arrives_after_batches_were_merged(
    folder: Path, at_once: list[list[int]]
) -> None:
    async with opened(folder) as log, opened(folder) as other:
        await known(log)
        await grow(other, *(records(i) for i in range(70)))
        assert len(await log.read_many(requests())) == 3
        del at_once[:]
        reading = asyncio.create_task(log.read_many(requests(70, 70, 70), wait=TIMEOUT_SECONDS))
        while not log._tail.is_awaited(1):  # noqa: ASYNC110 there is no event for it
            await asyncio.sleep(0)
        await other.maintain()
        assert not reading.done()
        await other.append_many([AppendRequest(partition, records(70)) for partition in (T0, T2)])
        assert news(await reading) == {0: ["r70"], 2: ["r70"]}
        assert at_once == [[0, 2]]


@awaited
async def test_a_read_of_one_record_of_each_partition_does_not_fetch_the_others(
    folder: Path, at_once: list[list[int]]
) -> None:
    async with opened(folder) as log:
        await known(log)
        await grow(log, *(records(i) for i in range(50)))
        fetched: list[tuple[Any, ...]] = []

        def note(_: sqlite3.Cursor, row: tuple[Any, ...]) -> tuple[Any, ...]:
            fetched.append(row)
            return row

        log._snapshots.run(lambda db: setattr(db, "row_factory", note))  # of the connection that reads in this thread
        assert news(await log.read_many(requests(), max_records=1)) == {0: ["r0"], 1: ["r0"], 2: ["r0"]}
        assert at_once == [[0, 1, 2]]
        assert len([row for row in fetched if isinstance(row[-1], bytes)]) == 3


# What is left behind -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("without_garbage_collection")
@awaited
async def test_a_read_after_one_that_has_met_damage_sees_what_was_appended_since(folder: Path) -> None:
    """The error is kept all the while, and what it refers to as well."""
    async with opened(folder) as log:
        await known(log)
        await grow(log, records(0), records(1), partitions=[T0])
        await grow(log, records(0), partitions=[T1])
        tamper(folder, "UPDATE batches SET checksum = checksum + 1 WHERE first = 0", T0)
        found = await log.read_many([ReadRequest(T0, 0), ReadRequest(T1, 1)])
        assert news(found) == {0: Damaged}
        await grow(log, records(1), partitions=[T1])
        assert news(await log.read_many([ReadRequest(T1, 1)])) == {1: ["r1"]}
        assert isinstance(found[T0], Damaged)
