"""One partition in a member's hands, on a log that answers when it is told to: what is read ahead, and what is not."""

import asyncio
import contextlib
import gc
import math
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any

import pytest

from shardyard.groups import OwnedBatch
from shardyard.groups.partition_reader import AHEAD_SECONDS, PartitionReader
from shardyard.groups.protocol import Grant
from shardyard.log.memory import MemoryLog
from shardyard.model import Busy, Fence, Fenced, OffsetTrimmed, Partition, Position, Record, ShardyardError, WrongEpoch
from shardyard.model.batch import Batch
from shardyard.runtime.clock import SystemClock
from tests.groups.test_reader import TOPIC, Story, Yard, take, tell

__all__ = ["tell"]  # the fixture

P0 = Partition(TOPIC, 0)
PATIENCE_SECONDS = 10.0


class JumpingClock(SystemClock):
    """The system clock, which a test can set forward."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.ahead


class ScriptedLog(MemoryLog):
    """Its reads wait while it is held up, fail when they are to, and are slow to end when they are cancelled."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[int] = []
        """The offset of each read."""
        self.running = 0
        self._held_from: float = math.inf
        self._flowing = asyncio.Event()
        self.failures: dict[int, ShardyardError] = {}
        """By the offset of the read that fails; the next one of the same offset does not."""
        self.left_out: set[int] = set()
        """Offsets whose records are not for this group."""
        self.answered: Callable[[], None] = lambda: None
        """Called when a read is over."""

    def hold(self, offset: int) -> None:
        """Let reads from this offset on wait."""
        self._held_from = offset

    def flow(self) -> None:
        """Let all go on."""
        self._held_from = math.inf
        self._flowing.set()
        self._flowing.clear()

    async def read(self, partition: Partition, offset: int, **options: Any) -> Batch:
        self.begun.append(offset)
        self.running += 1
        try:
            if offset >= self._held_from:
                await self._flowing.wait()
            if offset in self.failures:
                raise self.failures.pop(offset)
            batch = await super().read(partition, offset, **options)
            if len(batch) and offset in self.left_out:
                return Batch(partition, batch.epoch, offset, batch.data.slice(0, 0), stop=batch.end)
            return batch
        finally:
            try:
                for _ in range(5):
                    await asyncio.sleep(0)
            finally:
                self.running -= 1
                self.answered()


class Setup:
    """A claim that is served, one record a batch, and what came of it."""

    def __init__(self, log: ScriptedLog, committed: Position | None = None) -> None:
        self.log = log
        self.batches: asyncio.Queue[OwnedBatch] = asyncio.Queue()
        self.noted: list[int] = []
        self.clock = JumpingClock()
        self.claim = PartitionReader(
            P0, Grant(1, committed, revoked=False), log, Fence("billing/orders/0", 1), self._commit, self.clock
        )
        self.serving = asyncio.create_task(self.claim.run(self._deliver, "earliest", 1, 1000, 5.0))

    def _deliver(self, batch: OwnedBatch) -> None:
        batch.delivered_at = 0.0
        self.batches.put_nowait(batch)

    async def _commit(self, positions: Mapping[Partition, tuple[int, Position]]) -> None:
        self.noted += [position.offset for _, position in positions.values()]

    async def next(self) -> OwnedBatch:
        async with asyncio.timeout(PATIENCE_SECONDS):
            return await self.batches.get()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not condition():  # noqa: ASYNC110 every turn of the loop is looked at
                await asyncio.sleep(0)

    async def read_ahead(self, reads: int = 2) -> None:
        """Until that many reads were begun, and none runs."""
        await self.until(lambda: len(self.log.begun) == reads and self.log.running == 0)


@contextlib.asynccontextmanager
async def a_desk(*ids: str) -> AsyncIterator[Setup]:
    """Nothing runs when it is left, and nothing was raised that nobody heard of."""
    unheard: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: unheard.append(context))
    async with ScriptedLog() as log:
        await log.create_topic(TOPIC, 1)
        if ids:
            await log.append(P0, [Record(i, None, b"") for i in ids])
        desk = Setup(log)
        yield desk
        desk.serving.cancel()
        await asyncio.gather(desk.serving, return_exceptions=True)
        assert log.running == 0
        assert asyncio.all_tasks() == {asyncio.current_task()}
        desk.claim._ahead = None
        gc.collect()
        assert unheard == []


def told(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(story())


def ids(batch: OwnedBatch) -> list[str]:
    return [record.id for record in batch.records()]


# What was read ahead


def test_the_next_batch_is_there_when_the_last_is_committed_however_slow_the_log_is() -> None:
    async def story() -> None:
        async with a_desk("a", "b", "c") as desk:
            first = await desk.next()
            await desk.read_ahead()
            desk.log.hold(0)
            assert desk.batches.empty(), "not before the commit"
            await first.commit()
            assert ids(await desk.next()) == ["b"]
            assert desk.log.begun[:2] == [0, 1], "each was read once"

    told(story)


def test_a_read_that_was_begun_ahead_is_waited_for_and_not_begun_again() -> None:
    async def story() -> None:
        async with a_desk("a", "b") as desk:
            desk.log.hold(1)
            first = await desk.next()
            await desk.until(lambda: len(desk.log.begun) == 2)
            await first.commit()
            await desk.until(lambda: desk.claim._ahead is None)  # it is asked for
            assert desk.batches.empty()
            assert desk.log.begun == [0, 1]
            desk.log.flow()
            assert ids(await desk.next()) == ["b"]

    told(story)


@pytest.mark.parametrize(("seconds", "comes"), [(0.0, "b"), (AHEAD_SECONDS + 0.1, "c")])
def test_what_was_read_too_long_ago_is_read_anew(seconds: float, comes: str) -> None:
    async def story() -> None:
        async with a_desk("a", "b", "c") as desk:
            first = await desk.next()
            await desk.read_ahead()
            await desk.log.trim(P0, 2)
            desk.clock.ahead += seconds
            await first.commit()
            assert ids(await desk.next()) == [comes]

    told(story)


def test_what_is_set_while_a_batch_is_in_hand_for_long_counts_for_the_next() -> None:
    async def story() -> None:
        async with a_desk("a", "b", "c") as desk:
            first = await desk.next()
            await desk.read_ahead()
            desk.log.left_out = {1}
            desk.clock.ahead += AHEAD_SECONDS + 0.1
            await first.commit()
            assert ids(await desk.next()) == ["c"]
            assert desk.noted == [1, 2]

    told(story)


def test_nothing_is_read_in_vain_while_batches_take_long() -> None:
    async def story() -> None:
        async with a_desk("a", "b", "c", "d") as desk:
            first = await desk.next()
            await desk.read_ahead()
            desk.clock.ahead += AHEAD_SECONDS
            await first.commit()
            second = await desk.next()
            await desk.until(lambda: desk.log.running == 0)
            assert desk.log.begun == [0, 1, 1], "what was read ahead was too old, and nothing more was read ahead"
            await second.commit()
            third = await desk.next()
            await desk.read_ahead(5)
            assert desk.log.begun == [0, 1, 1, 2, 3], "as the second was quick"
            await third.commit()
            assert ids(await desk.next()) == ["d"]

    told(story)


def test_records_that_are_not_for_the_group_are_passed_over_only_after_the_commit() -> None:
    async def story() -> None:
        async with a_desk("a", "b", "c") as desk:
            desk.log.left_out = {1}
            first = await desk.next()
            await desk.read_ahead()
            assert desk.noted == []
            await first.commit()
            assert ids(await desk.next()) == ["c"]
            assert desk.noted == [1, 2]
            assert desk.log.begun[:3] == [0, 1, 2]

    told(story)


def test_reading_ahead_is_no_progress() -> None:
    async def story() -> None:
        async with a_desk("a", "b") as desk:
            first = await desk.next()
            await desk.read_ahead()
            assert not desk.claim.made_progress(others_did=True)
            await first.commit()
            assert desk.claim.made_progress(others_did=False)
            await desk.next()
            assert not desk.claim.made_progress(others_did=True)

    told(story)


@pytest.mark.parametrize("seed", range(20))
def test_each_record_comes_once_and_in_order_whatever_goes_wrong_ahead(seed: int) -> None:
    async def story() -> None:
        chance = random.Random(seed)
        sent = [str(i) for i in range(30)]
        async with a_desk(*sent) as desk:
            to_fail = {offset: Busy("log", 0.0) for offset in range(1, 30) if chance.random() < 0.3}
            desk.log.failures |= to_fail
            got: list[str] = []
            while len(got) < len(sent):
                batch = await desk.next()
                got += ids(batch)
                if chance.random() < 0.3:
                    desk.log.hold(batch.end + 1)
                    asyncio.get_running_loop().call_later(0.001, desk.log.flow)
                for _ in range(chance.randrange(8)):
                    await asyncio.sleep(0)
                if chance.random() < 0.2:
                    await batch.commit(upto=batch.first)
                await batch.commit()
            assert got == sent
            assert to_fail
            assert desk.log.failures == {}

    told(story)


# When reading ahead fails


@pytest.mark.parametrize("error", [Busy("log", 0.0), Fenced("gone"), OffsetTrimmed(P0, 1, 2)])
def test_an_error_of_reading_ahead_does_no_harm_if_it_has_passed(error: ShardyardError) -> None:
    async def story() -> None:
        async with a_desk("a", "b") as desk:
            desk.log.failures = {1: error}
            first = await desk.next()
            await desk.read_ahead()
            await first.commit()
            assert ids(await desk.next()) == ["b"]
            assert desk.log.begun[:3] == [0, 1, 1]

    told(story)


def test_one_that_has_not_passed_is_raised_by_reading_anew() -> None:
    async def story() -> None:
        async with a_desk("a", "b") as desk:
            first = await desk.next()
            await desk.read_ahead()
            await desk.log.set_fence(Fence("billing/orders/0", 2))
            await first.commit()
            second = await desk.next()  # it was read as the owner
            await desk.read_ahead(3)
            assert not desk.serving.done(), "what is in hand may be finished"
            await second.commit()
            with pytest.raises(Fenced):
                await desk.serving

    told(story)


@pytest.mark.parametrize("made_anew", [True, False])
def test_it_goes_on_where_there_is_something_when_what_was_to_come_is_gone(made_anew: bool) -> None:
    async def story() -> None:
        async with a_desk("a") as desk:
            desk.log.hold(1)
            first = await desk.next()
            await desk.until(lambda: len(desk.log.begun) == 2)
            if made_anew:
                await desk.log.delete_topic(TOPIC)
                await desk.log.create_topic(TOPIC, 1)
            await desk.log.append(P0, [Record(i, None, b"") for i in "bc"])
            if not made_anew:
                await desk.log.trim(P0, 2)
            desk.log.flow()
            await desk.read_ahead()
            assert desk.claim._ahead is not None
            assert isinstance(desk.claim._ahead.exception(), WrongEpoch if made_anew else OffsetTrimmed)
            await first.commit()
            assert ids(await desk.next()) == ["b" if made_anew else "c"]

    told(story)


@pytest.mark.parametrize("lost", [True, False])
def test_an_error_of_reading_ahead_that_nobody_waits_for_is_not_complained_of(lost: bool) -> None:
    async def story() -> None:
        async with a_desk("a", "b") as desk:
            desk.log.failures = {1: Fenced("gone")}
            first = await desk.next()
            await desk.read_ahead()
            desk.claim.stop(lost=lost)
            if not lost:
                await first.commit()
            await desk.serving
            assert desk.batches.empty()

    told(story)


# When it ends


@pytest.mark.parametrize("end", ["lost", "revoked", "cancelled"])
@pytest.mark.parametrize("asked_for", [True, False])
def test_nothing_runs_on_when_a_partition_was_given_up(end: str, asked_for: bool) -> None:
    async def story() -> None:
        async with a_desk("a", "b") as desk:
            desk.log.hold(1)
            first = await desk.next()
            await desk.until(lambda: len(desk.log.begun) == 2)
            if asked_for:
                await first.commit()
                await desk.until(lambda: desk.claim._ahead is None)
            if end == "cancelled":
                desk.serving.cancel()
            else:
                desk.claim.stop(lost=end == "lost")
            if end == "revoked" and not asked_for:
                await desk.until(lambda: desk.log.running == 0)
                assert not desk.serving.done(), "what is in hand may be finished"
                await first.commit()
            await asyncio.gather(desk.serving, return_exceptions=True)
            assert desk.log.running == 0
            assert asyncio.all_tasks() == {asyncio.current_task()}
            assert desk.batches.empty()

    told(story)


@pytest.mark.parametrize("left_out", [True, False])
def test_what_comes_in_the_moment_of_stopping_is_neither_delivered_nor_passed_over(left_out: bool) -> None:
    async def story() -> None:
        async with a_desk("a", "b") as desk:
            desk.log.hold(1)
            first = await desk.next()
            await desk.until(lambda: len(desk.log.begun) == 2)
            desk.log.left_out = {1} if left_out else set()
            await first.commit()
            await desk.until(lambda: desk.claim._ahead is None)
            desk.log.answered = desk.claim.stop
            desk.log.flow()
            await desk.serving
            assert desk.batches.empty()
            assert desk.noted == [1]
            assert desk.log.begun == [0, 1]

    told(story)


def test_a_member_that_left_leaves_no_reading_behind(tell: Callable[[Story], None]) -> None:
    async def story(yard: Yard) -> None:
        before = asyncio.all_tasks()
        for partition in range(4):
            await yard.send(partition, "a", "b", "c")
        async with yard.member("m1", max_records=1) as member:
            batches = await take(member, 4)
            await batches[0].commit()
            await take(member, 1)
            assert any("ahead" in task.get_name() for task in asyncio.all_tasks())
        assert {task.get_name() for task in asyncio.all_tasks() - before} == set()

    tell(story)
