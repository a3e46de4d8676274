"""Reading one partition that a member owns, on a scripted log: what is read ahead, and what is not."""

import asyncio
import contextlib
import gc
import math
import random
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import pytest

from shardyard.groups import OwnedBatch
from shardyard.groups.partition_reader import AHEAD_SECONDS, PartitionReader
from shardyard.groups.protocol import Grant
from shardyard.log.memory import MemoryLog
from shardyard.model import Busy, Fence, Fenced, OffsetTrimmed, Partition, Position, Record, ShardyardError, WrongEpoch
from shardyard.model.batch import Batch
from shardyard.runtime.clock import SystemClock
from tests.groups.test_reader import TOPIC, Environment, Run, run, take

__all__ = ["run"]  # the fixture

P0 = Partition(TOPIC, 0)
TIMEOUT_SECONDS = 60.0


class JumpingClock(SystemClock):
    """The system clock, which a test can set forward."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.ahead


class ScriptedLog(MemoryLog):
    """A log whose reads can be held and made to fail, and take a while to end when they are cancelled."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[int] = []
        """The offset of each read."""
        self.running = 0
        self._held_from: float = math.inf
        self._released = asyncio.Event()
        self.failures: dict[int, ShardyardError] = {}
        """By the offset of the read that fails; the next one of the same offset does not."""
        self.filtered: set[int] = set()
        """Offsets whose records are not for this group."""
        self.on_read: Callable[[], None] = lambda: None
        """Called when a read is over."""

    def hold(self, offset: int) -> None:
        """Let reads from this offset on wait."""
        self._held_from = offset

    def release(self) -> None:
        """Let all held reads continue."""
        self._held_from = math.inf
        self._released.set()
        self._released.clear()

    async def read(self, partition: Partition, offset: int, **options: Any) -> Batch:
        self.started.append(offset)
        self.running += 1
        try:
            if offset >= self._held_from:
                await self._released.wait()
            if offset in self.failures:
                raise self.failures.pop(offset)
            batch = await super().read(partition, offset, **options)
            if len(batch) and offset in self.filtered:
                return Batch(partition, batch.epoch, offset, batch.data.slice(0, 0), stop=batch.end)
            return batch
        finally:
            try:
                for _ in range(5):
                    await asyncio.sleep(0)
            finally:
                self.running -= 1
                self.on_read()


class Setup:
    """A reader that runs with one record per batch, and what it delivered and committed."""

    def __init__(self, log: ScriptedLog, committed: Position | None = None) -> None:
        self.log = log
        self.batches: asyncio.Queue[OwnedBatch] = asyncio.Queue()
        self.committed: list[int] = []
        self.clock = JumpingClock()
        self.reader = PartitionReader(
            P0, Grant(1, committed, revoked=False), log, Fence("billing/orders/0", 1), self._commit, self.clock
        )
        self.task = asyncio.create_task(self.reader.run(self._deliver, "earliest", 1, 1000, 5.0))

    def _deliver(self, batch: OwnedBatch) -> None:
        batch.delivered_at = 0.0
        self.batches.put_nowait(batch)

    async def _commit(self, positions: Mapping[Partition, tuple[int, Position]]) -> None:
        self.committed += [position.offset for _, position in positions.values()]

    async def next(self) -> OwnedBatch:
        async with asyncio.timeout(TIMEOUT_SECONDS):
            return await self.batches.get()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(TIMEOUT_SECONDS):
            while not condition():  # noqa: ASYNC110 checked in every iteration of the loop
                await asyncio.sleep(0)

    async def read_ahead(self, reads: int = 2) -> None:
        """Wait until that many reads were started, and none is running."""
        await self.until(lambda: len(self.log.started) == reads and self.log.running == 0)


@contextlib.asynccontextmanager
async def open_setup(*ids: str) -> AsyncIterator[Setup]:
    """A running reader. At the end of the block, checks that no task is left and that no exception was lost."""
    lost_exceptions: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: lost_exceptions.append(context))
    async with ScriptedLog() as log:
        await log.create_topic(TOPIC, 1)
        if ids:
            await log.append(P0, [Record(i, None, b"") for i in ids])
        setup = Setup(log)
        yield setup
        setup.task.cancel()
        await asyncio.gather(setup.task, return_exceptions=True)
        assert log.running == 0
        assert asyncio.all_tasks() == {asyncio.current_task()}
        setup.reader._ahead = None
        gc.collect()
        assert lost_exceptions == []


def ids(batch: OwnedBatch) -> list[str]:
    return [record.id for record in batch.records()]


# What was read ahead


def test_the_next_batch_is_available_as_soon_as_the_last_is_committed_however_slow_the_log_is() -> None:
    async def scenario() -> None:
        async with open_setup("a", "b", "c") as setup:
            first = await setup.next()
            await setup.read_ahead()
            setup.log.hold(0)
            assert setup.batches.empty(), "not before the commit"
            await first.commit()
            assert ids(await setup.next()) == ["b"]
            assert setup.log.started[:2] == [0, 1], "each was read once"

    asyncio.run(scenario())


def test_a_read_that_was_started_ahead_is_awaited_and_not_repeated() -> None:
    async def scenario() -> None:
        async with open_setup("a", "b") as setup:
            setup.log.hold(1)
            first = await setup.next()
            await setup.until(lambda: len(setup.log.started) == 2)
            await first.commit()
            await setup.until(lambda: setup.reader._ahead is None)  # it is asked for
            assert setup.batches.empty()
            assert setup.log.started == [0, 1]
            setup.log.release()
            assert ids(await setup.next()) == ["b"]

    asyncio.run(scenario())


@pytest.mark.parametrize(("seconds", "expected"), [(0.0, "b"), (AHEAD_SECONDS + 0.1, "c")])
def test_what_was_read_too_long_ago_is_read_again(seconds: float, expected: str) -> None:
    async def scenario() -> None:
        async with open_setup("a", "b", "c") as setup:
            first = await setup.next()
            await setup.read_ahead()
            await setup.log.trim(P0, 2)
            setup.clock.ahead += seconds
            await first.commit()
            assert ids(await setup.next()) == [expected]

    asyncio.run(scenario())


def test_settings_changed_during_a_long_batch_apply_to_the_next_one() -> None:
    async def scenario() -> None:
        async with open_setup("a", "b", "c") as setup:
            first = await setup.next()
            await setup.read_ahead()
            setup.log.filtered = {1}
            setup.clock.ahead += AHEAD_SECONDS + 0.1
            await first.commit()
            assert ids(await setup.next()) == ["c"]
            assert setup.committed == [1, 2]

    asyncio.run(scenario())


def test_nothing_is_read_needlessly_while_batches_take_long() -> None:
    async def scenario() -> None:
        async with open_setup("a", "b", "c", "d") as setup:
            first = await setup.next()
            await setup.read_ahead()
            setup.clock.ahead += AHEAD_SECONDS
            await first.commit()
            second = await setup.next()
            await setup.until(lambda: setup.log.running == 0)
            assert setup.log.started == [0, 1, 1], "what was read ahead was too old, and nothing more was read ahead"
            await second.commit()
            third = await setup.next()
            await setup.read_ahead(5)
            assert setup.log.started == [0, 1, 1, 2, 3], "as the second was quick"
            await third.commit()
            assert ids(await setup.next()) == ["d"]

    asyncio.run(scenario())


def test_filtered_records_are_skipped_only_after_the_commit() -> None:
    async def scenario() -> None:
        async with open_setup("a", "b", "c") as setup:
            setup.log.filtered = {1}
            first = await setup.next()
            await setup.read_ahead()
            assert setup.committed == []
            await first.commit()
            assert ids(await setup.next()) == ["c"]
            assert setup.committed == [1, 2]
            assert setup.log.started[:3] == [0, 1, 2]

    asyncio.run(scenario())


def test_reading_ahead_does_not_count_as_progress() -> None:
    async def scenario() -> None:
        async with open_setup("a", "b") as setup:
            first = await setup.next()
            await setup.read_ahead()
            assert not setup.reader.made_progress(others_did=True)
            await first.commit()
            assert setup.reader.made_progress(others_did=False)
            await setup.next()
            assert not setup.reader.made_progress(others_did=True)

    asyncio.run(scenario())


@pytest.mark.parametrize("seed", range(20))
def test_each_record_is_delivered_once_and_in_order_whatever_fails_while_reading_ahead(seed: int) -> None:
    async def scenario() -> None:
        chance = random.Random(seed)
        sent = [str(i) for i in range(30)]
        async with open_setup(*sent) as setup:
            to_fail = {offset: Busy("log", 0.0) for offset in range(1, 30) if chance.random() < 0.3}
            setup.log.failures |= to_fail
            got: list[str] = []
            while len(got) < len(sent):
                batch = await setup.next()
                got += ids(batch)
                if chance.random() < 0.3:
                    setup.log.hold(batch.end + 1)
                    asyncio.get_running_loop().call_later(0.001, setup.log.release)
                for _ in range(chance.randrange(8)):
                    await asyncio.sleep(0)
                if chance.random() < 0.2:
                    await batch.commit(upto=batch.first)
                await batch.commit()
            assert got == sent
            assert to_fail
            assert setup.log.failures == {}

    asyncio.run(scenario())


# When reading ahead fails


@pytest.mark.parametrize("error", [Busy("log", 0.0), Fenced("gone"), OffsetTrimmed(P0, 1, 2)])
def test_a_transient_error_while_reading_ahead_is_harmless(error: ShardyardError) -> None:
    async def scenario() -> None:
        async with open_setup("a", "b") as setup:
            setup.log.failures = {1: error}
            first = await setup.next()
            await setup.read_ahead()
            await first.commit()
            assert ids(await setup.next()) == ["b"]
            assert setup.log.started[:3] == [0, 1, 1]

    asyncio.run(scenario())


def test_an_outage_of_the_log_is_waited_out_and_no_record_comes_twice() -> None:
    async def scenario() -> None:
        async with open_setup("a", "b") as setup:
            failures = iter([Busy("log", 0.0)] * 4)

            def fail_again() -> None:
                if (error := next(failures, None)) is not None:
                    setup.log.failures = {1: error}

            fail_again()
            setup.log.on_read = fail_again
            first = await setup.next()
            await first.commit()
            second = await setup.next()
            assert (ids(second), second.epoch, setup.batches.empty()) == (["b"], first.epoch, True)
            assert setup.log.started[:5] == [0, 1, 1, 1, 1]
            assert next(failures, None) is None, "all failures were met"

    asyncio.run(scenario())


def test_a_reader_stops_at_once_while_it_waits_for_an_outage_to_end() -> None:
    async def scenario() -> None:
        async with open_setup("a") as setup:
            setup.log.failures = {1: Busy("log", 0.0)}
            setup.log.on_read = lambda: setup.log.failures.update({1: Busy("log", 0.0)})
            await (await setup.next()).commit()
            await setup.until(lambda: setup.log.started.count(1) >= 2)
            setup.reader.stop()
            await asyncio.wait([setup.task], timeout=TIMEOUT_SECONDS)
            assert setup.task.done()
            assert setup.batches.empty()

    asyncio.run(scenario())


def test_a_lasting_error_while_reading_ahead_is_raised_by_the_next_read() -> None:
    async def scenario() -> None:
        async with open_setup("a", "b") as setup:
            first = await setup.next()
            await setup.read_ahead()
            await setup.log.set_fence(Fence("billing/orders/0", 2))
            await first.commit()
            second = await setup.next()  # it was read as the owner
            await setup.read_ahead(3)
            assert not setup.task.done(), "what is in hand may be finished"
            await second.commit()
            with pytest.raises(Fenced):
                await setup.task

    asyncio.run(scenario())


@pytest.mark.parametrize("recreated", [True, False])
def test_it_continues_with_the_next_record_when_the_expected_one_is_gone(recreated: bool) -> None:
    async def scenario() -> None:
        async with open_setup("a") as setup:
            setup.log.hold(1)
            first = await setup.next()
            await setup.until(lambda: len(setup.log.started) == 2)
            if recreated:
                await setup.log.delete_topic(TOPIC)
                await setup.log.create_topic(TOPIC, 1)
            await setup.log.append(P0, [Record(i, None, b"") for i in "bc"])
            if not recreated:
                await setup.log.trim(P0, 2)
            setup.log.release()
            await setup.read_ahead()
            assert setup.reader._ahead is not None
            assert isinstance(setup.reader._ahead.exception(), WrongEpoch if recreated else OffsetTrimmed)
            await first.commit()
            assert ids(await setup.next()) == ["b" if recreated else "c"]

    asyncio.run(scenario())


@pytest.mark.parametrize("lost", [True, False])
def test_an_error_while_reading_ahead_that_nobody_awaits_is_not_logged(lost: bool) -> None:
    async def scenario() -> None:
        async with open_setup("a", "b") as setup:
            setup.log.failures = {1: Fenced("gone")}
            first = await setup.next()
            await setup.read_ahead()
            setup.reader.stop(lost=lost)
            if not lost:
                await first.commit()
            await setup.task
            assert setup.batches.empty()

    asyncio.run(scenario())


# When it ends


@pytest.mark.parametrize("end", ["lost", "revoked", "cancelled"])
@pytest.mark.parametrize("awaited", [True, False])
def test_no_task_is_left_when_a_partition_was_released(end: str, awaited: bool) -> None:
    async def scenario() -> None:
        async with open_setup("a", "b") as setup:
            setup.log.hold(1)
            first = await setup.next()
            await setup.until(lambda: len(setup.log.started) == 2)
            if awaited:
                await first.commit()
                await setup.until(lambda: setup.reader._ahead is None)
            if end == "cancelled":
                setup.task.cancel()
            else:
                setup.reader.stop(lost=end == "lost")
            if end == "revoked" and not awaited:
                await setup.until(lambda: setup.log.running == 0)
                assert not setup.task.done(), "what is in hand may be finished"
                await first.commit()
            await asyncio.gather(setup.task, return_exceptions=True)
            assert setup.log.running == 0
            assert asyncio.all_tasks() == {asyncio.current_task()}
            assert setup.batches.empty()

    asyncio.run(scenario())


@pytest.mark.parametrize("filtered", [True, False])
def test_a_batch_that_arrives_while_stopping_is_neither_delivered_nor_skipped(filtered: bool) -> None:
    async def scenario() -> None:
        async with open_setup("a", "b") as setup:
            setup.log.hold(1)
            first = await setup.next()
            await setup.until(lambda: len(setup.log.started) == 2)
            setup.log.filtered = {1} if filtered else set()
            await first.commit()
            await setup.until(lambda: setup.reader._ahead is None)
            setup.log.on_read = setup.reader.stop
            setup.log.release()
            await setup.task
            assert setup.batches.empty()
            assert setup.committed == [1]
            assert setup.log.started == [0, 1]

    asyncio.run(scenario())


def test_a_member_that_left_has_no_read_in_progress(run: Run) -> None:
    async def scenario(env: Environment) -> None:
        before = asyncio.all_tasks()
        for partition in range(4):
            await env.send(partition, "a", "b", "c")
        async with env.member("m1", max_records=1) as member:
            batches = await take(member, 4)
            await batches[0].commit()
            await take(member, 1)
            assert any("ahead" in task.get_name() for task in asyncio.all_tasks())
        assert {task.get_name() for task in asyncio.all_tasks() - before} == set()

    run(scenario)
