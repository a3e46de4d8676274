"""The cache of decoded batches, alone and under the embedded log."""

import asyncio
import functools
import random
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from shardyard.log import merging
from shardyard.log.batch_cache import BatchCache
from shardyard.log.sqlite import SqliteLog
from shardyard.log.stored_batches import LoadedBatch
from shardyard.model import Damaged, OffsetTrimmed, Record, UnknownTopic
from tests.log.samples import T0, T1, arrow, awaited

quiet = functools.partial(SqliteLog, durability="process", maintain_every=None)


def records(first: int, count: int, kind: str = "r") -> list[Record]:
    return [Record(f"{kind}{i}", None, b"%d" % i, timestamp=1 + i) for i in range(first, first + count)]


def loaded(first: int, count: int, size: int = 1000) -> LoadedBatch:
    return LoadedBatch(first, size, arrow(records(first, count)))


# Alone ---------------------------------------------------------------------------------------------------------------


def test_a_batch_is_found_by_each_of_its_offsets_and_by_no_other() -> None:
    cache = BatchCache()
    batch = loaded(10, 5)
    cache.add(T0, 1, batch)
    assert [cache.find(T0, 1, offset) for offset in (9, 10, 14, 15)] == [None, batch, batch, None]
    assert cache.find(T1, 1, 10) is None


def test_the_cache_is_bounded_and_drops_the_batch_that_was_not_used_for_longest() -> None:
    cache = BatchCache(most_bytes=40_000)
    for first in range(0, 30, 10):
        cache.add(T0, 1, loaded(first, 10, size=10_000))
    assert cache.find(T0, 1, 0)
    cache.add(T1, 1, loaded(0, 10, size=10_000))
    assert [bool(cache.find(T0, 1, first)) for first in (0, 10, 20)] == [True, False, True]
    assert cache.bytes <= 40_000
    cache.add(T1, 1, loaded(10, 10, size=50_000))
    assert cache.find(T1, 1, 10) is None, "a batch that is too large for the cache is not kept"
    assert cache.find(T1, 1, 0)


def test_a_merged_batch_replaces_its_parts() -> None:
    cache = BatchCache()
    for first in range(0, 40, 10):
        cache.add(T0, 1, loaded(first, 10))
    before = cache.bytes
    cache.add(T0, 1, merged := loaded(10, 20, size=2000))
    assert [cache.find(T0, 1, offset) for offset in (10, 15, 20, 29)] == [merged] * 4
    assert cache.find(T0, 1, 9)
    assert cache.find(T0, 1, 30)
    assert cache.bytes < before
    cache.add(T0, 1, again := loaded(10, 20, size=2000))
    assert cache.find(T0, 1, 10) is again
    cache.add(T0, 1, old_part := loaded(20, 10))
    assert cache.find(T0, 1, 20) is old_part, "whichever came last, as both are right"


def test_batches_of_a_deleted_topic_give_way_to_those_of_the_one_that_was_created_again() -> None:
    cache = BatchCache()
    cache.add(T0, 1, loaded(0, 10))
    cache.add(T0, 1, loaded(10, 10))
    cache.add(T0, 2, new := loaded(0, 5))
    assert cache.find(T0, 2, 0) is new
    assert cache.find(T0, 1, 0) is cache.find(T0, 2, 10) is None
    cache.add(T0, 1, loaded(10, 10))
    assert cache.find(T0, 1, 10) is None, "a late reader of the old topic changes nothing"


def test_a_read_is_covered_if_it_ends_within_a_cached_batch() -> None:
    cache = BatchCache()
    cache.add(T0, 1, loaded(0, 10, size=1000))
    assert cache.covers(T0, 0, 10, 10**6)
    assert cache.covers(T0, 4, 6, 10**6)
    assert cache.covers(T0, 4, 100, 500)
    assert not cache.covers(T0, 4, 7, 10**6)
    assert not cache.covers(T0, 4, 100, 600)
    assert not cache.covers(T0, 10, 1, 1)
    assert not cache.covers(T1, 0, 1, 1)


# Under the log -------------------------------------------------------------------------------------------------------


def sql(folder: Path, statement: str) -> None:
    with closing(sqlite3.connect(folder / "log.db", isolation_level=None)) as db:
        db.execute(statement)


@awaited
async def test_small_reads_out_of_a_large_batch_load_it_once(tmp_path: Path) -> None:
    async with quiet(tmp_path) as log:
        await log.create_topic("t", 1)
        await log.append(T0, arrow(records(0, 1000)))
        assert (await log.read(T0, 0, max_records=10)).records() == records(0, 10)
        sql(tmp_path, "UPDATE batches SET data = x''")
        for offset in range(10, 1000, 10):
            batch = await log.read(T0, offset, max_records=10)
            assert (batch.first, batch.records()) == (offset, records(offset, 10))


@awaited
async def test_damage_is_found_when_a_batch_is_first_loaded_and_a_damaged_batch_is_not_kept(tmp_path: Path) -> None:
    async with quiet(tmp_path) as log:
        await log.create_topic("t", 1)
        await log.append(T0, arrow(records(0, 100)))
        sql(tmp_path, "UPDATE batches SET checksum = checksum + 1")
        for _ in range(2):
            with pytest.raises(Damaged, match="fails its checksum"):
                await log.read(T0, 0, max_records=10)
        sql(tmp_path, "UPDATE batches SET checksum = checksum - 1")
        assert (await log.read(T0, 0, max_records=10)).records() == records(0, 10)


@awaited
async def test_a_read_of_a_cached_batch_still_refuses_what_was_trimmed_deleted_or_created_again(tmp_path: Path) -> None:
    async with quiet(tmp_path) as log, quiet(tmp_path) as other:
        old = await log.create_topic("t", 1)
        await log.append(T0, arrow(records(0, 100)))
        assert (await log.read(T0, 0, max_records=10)).records() == records(0, 10)
        await other.trim(T0, 50)
        with pytest.raises(OffsetTrimmed):
            await log.read(T0, 10, max_records=10)
        assert (await log.read(T0, 50, max_records=10)).records() == records(50, 10)
        await other.delete_topic("t")
        with pytest.raises(UnknownTopic):
            await log.read(T0, 60, max_records=10)
        new = await other.create_topic("t", 1)
        await other.append(T0, arrow(records(0, 100, "new")))
        batch = await log.read(T0, 60, max_records=10)
        assert (batch.epoch, batch.records()) == (new.epoch, records(60, 10, "new"))
        assert new.epoch > old.epoch


@awaited
async def test_a_reader_that_takes_many_batches_from_the_cache_lets_other_tasks_run(tmp_path: Path) -> None:
    async with quiet(tmp_path) as log:
        await log.create_topic("t", 1)
        await log.append(T0, arrow(records(0, 1000)))
        await log.read(T0, 0, max_records=1)
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        counting = asyncio.create_task(count())
        for offset in range(1, 101):
            await log.read(T0, offset, max_records=1)
        counting.cancel()
        assert turns > 90


@pytest.mark.parametrize("seed", range(8))
@awaited
async def test_reads_of_any_size_between_appends_merges_and_trims_return_what_was_appended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    dice = random.Random(seed)
    monkeypatch.setattr(merging, "MERGE_BATCHES", 4)
    end = first = 0
    async with quiet(tmp_path) as log:
        await log.create_topic("t", 1)
        most_bytes = dice.choice([3_000, 20_000, 10**6])  # with few bytes batches are dropped all the time
        log._reading.cache = BatchCache(most_bytes)
        for _ in range(300):
            match dice.choice("aaarrrrrrrrrrrrtm"):
                case "a":
                    count = dice.choice([1, 2, 50])
                    await log.append(T0, arrow(records(end, count)) if dice.random() < 0.5 else records(end, count))
                    end += count
                case "t" if dice.random() < 0.3:
                    first = dice.randint(first, end)
                    await log.trim(T0, first)
                case "m":
                    await log.maintain()
                case _:
                    offset, most = dice.randint(first, end), dice.choice([1, 3, 20, 1000])
                    batch = await log.read(T0, offset, max_records=most)
                    assert batch.records() == records(offset, min(most, end - offset))
