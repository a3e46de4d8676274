"""Work in the background: started again when it fails, and ended when it is cancelled."""

import asyncio

import pytest

from shardyard.model import Busy, RetryLater
from shardyard.runtime.background import RESTART_SECONDS, keep_running
from shardyard.runtime.clock import ManualClock
from shardyard.runtime.retry import retry


@pytest.mark.parametrize("error", [Busy("the disk", 1.0), RuntimeError("a bug")])
def test_work_that_fails_is_started_again(error: Exception) -> None:
    starts = 0

    async def fail() -> None:
        nonlocal starts
        starts += 1
        raise error

    async def scenario() -> None:
        clock = ManualClock()
        task = asyncio.create_task(keep_running("work", fail, clock))
        await asyncio.sleep(0)
        await clock.advance(RESTART_SECONDS)
        assert starts == 2
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())


@pytest.mark.parametrize("error", [Busy("the disk", 1.0), RuntimeError("a bug")])
def test_work_whose_cleanup_fails_ends_all_the_same_when_it_is_cancelled(error: Exception) -> None:
    async def fail_when_stopped() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise error

    async def scenario() -> None:
        task = asyncio.create_task(keep_running("work", fail_when_stopped, ManualClock()))
        await asyncio.sleep(0)
        task.cancel()
        done, _ = await asyncio.wait([task], timeout=10.0)
        assert done
        assert task.cancelled()

    asyncio.run(scenario())


def test_a_call_whose_cleanup_fails_is_not_retried_after_it_was_cancelled() -> None:
    calls = 0

    async def fail_when_stopped() -> None:
        nonlocal calls
        calls += 1
        try:
            await asyncio.Event().wait()
        finally:
            raise Busy("the disk", 1.0)

    async def scenario() -> None:
        task = asyncio.create_task(retry(fail_when_stopped, clock=ManualClock(), retry_on=RetryLater))
        await asyncio.sleep(0)
        task.cancel()
        done, _ = await asyncio.wait([task], timeout=10.0)
        assert done
        assert task.cancelled()
        assert calls == 1

    asyncio.run(scenario())


def test_a_cleanup_is_retried_although_its_task_is_cancelled() -> None:
    calls = 0

    async def leave() -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise Busy("the registry", 1.0)

    async def work(clock: ManualClock) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await retry(leave, clock=clock)

    async def scenario() -> None:
        clock = ManualClock()
        task = asyncio.create_task(work(clock))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.sleep(0)
        await clock.advance(1.0)
        await asyncio.wait([task])
        assert calls == 2

    asyncio.run(scenario())
