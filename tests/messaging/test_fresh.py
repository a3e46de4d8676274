"""What a server has just appended is read from memory, and never anything that the log does not have there."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from shardyard.log import Log, open_log
from shardyard.messaging import fresh
from shardyard.messaging.fresh import FreshRecords
from shardyard.model import Partition, Record

PARTITION = Partition("inbox", 0)


class CountingLog:
    """A log that notes where it was read."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self.reads: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)

    async def read(self, partition: Partition, offset: int, **options: Any) -> Any:
        self.reads.append(offset)
        return await self._log.read(partition, offset, **options)


class Yard:
    """A log, and what reads it."""

    def __init__(self, log: Log) -> None:
        self.log = CountingLog(log)
        self.fresh = FreshRecords(cast(Log, self.log))

    async def append(self, *texts: str, is_ours: bool = True) -> None:
        for text in texts:
            record = Record(text, b"key", text.encode(), (), 1)
            appended = await self.log.append(PARTITION, [record])
            if is_ours:
                self.fresh.add(appended, record)

    async def read(self, offset: int, **options: Any) -> list[str]:
        """The ids of what is read, and the offsets are checked."""
        batch = await self.fresh.read(PARTITION, offset, **options)
        assert list(batch.offsets()) == list(range(offset, offset + len(batch)))
        assert batch.end == offset + len(batch)
        assert batch.epoch == (await self.log.span(PARTITION)).epoch
        return [record.id for record in batch.records()]


def run(scenario: Callable[[Yard], Awaitable[None]]) -> None:
    async def whole() -> None:
        async with open_log("memory://") as log:
            await log.create_topic("inbox", 1)
            await scenario(Yard(log))

    asyncio.run(whole())


def test_what_was_appended_here_is_not_read_from_the_log() -> None:
    async def scenario(yard: Yard) -> None:
        await yard.append("a")
        assert await yard.read(0) == ["a"]
        await yard.append("b", "c", "d")
        assert await yard.read(1) == ["b", "c", "d"]
        assert await yard.read(2, max_records=1) == ["c"]
        assert yard.log.reads == [0]
        assert await yard.read(0) == ["a", "b", "c", "d"]
        assert await yard.read(4) == []
        assert yard.log.reads == [0, 0, 4]

    run(scenario)


def test_what_others_have_appended_in_between_is_read_from_the_log() -> None:
    async def scenario(yard: Yard) -> None:
        assert await yard.read(0) == []
        await yard.append("a", "b")
        await yard.append("theirs", is_ours=False)
        await yard.append("c", "d")
        assert await yard.read(0) == ["a", "b", "theirs", "c", "d"]
        assert await yard.read(3) == ["c", "d"]
        assert yard.log.reads == [0, 0]

    run(scenario)


def test_a_topic_that_was_created_again_has_nothing_of_the_old_one() -> None:
    async def scenario(yard: Yard) -> None:
        await yard.read(0)
        await yard.append("old", "older")
        await yard.log.delete_topic("inbox")
        epoch = (await yard.log.create_topic("inbox", 1)).epoch
        await yard.append("new")
        assert await yard.read(0, epoch=epoch) == ["new"]
        await yard.append("newer", is_ours=False)
        assert await yard.read(1, epoch=epoch) == ["newer"]

    run(scenario)


@pytest.mark.parametrize(("most", "size"), [("MOST_RECORDS", 2), ("MOST_BYTES", 4)])
def test_a_partition_whose_reader_is_far_behind_is_forgotten_until_it_is_read_again(
    most: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fresh, most, size)

    async def scenario(yard: Yard) -> None:
        await yard.read(0)
        await yard.append("r0", "r1", "r2", "r3")
        assert not yard.fresh._kept
        assert await yard.read(2) == ["r2", "r3"]
        await yard.append("r4")
        assert await yard.read(4) == ["r4"]
        assert yard.log.reads == [0, 2]

    run(scenario)


def test_what_was_read_is_not_kept() -> None:
    async def scenario(yard: Yard) -> None:
        await yard.read(0)
        await yard.append("a", "b", "c")
        assert await yard.read(0) == ["a", "b", "c"]
        assert await yard.read(3) == []
        (kept,) = yard.fresh._kept.values()
        assert (len(kept.records), kept.bytes) == (0, 0)

    run(scenario)
