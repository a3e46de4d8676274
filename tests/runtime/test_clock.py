"""Time-outs on an injected clock."""

import asyncio
import contextlib

import pytest

from shardyard.runtime.clock import ManualClock, SystemClock, timeout


def test_a_timeout_ends_the_block_when_its_time_has_passed_on_the_clock() -> None:
    async def story() -> None:
        clock = ManualClock()

        async def wait() -> None:
            async with timeout(clock, 10.0):
                await asyncio.Event().wait()

        waiting = asyncio.create_task(wait())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await clock.advance(9.9)
        assert not waiting.done()
        await clock.advance(0.2)
        with pytest.raises(TimeoutError):
            await waiting

    asyncio.run(story())


@pytest.mark.parametrize("seconds", [None, 3600.0])
def test_a_timeout_that_is_not_reached_changes_nothing(seconds: float | None) -> None:
    async def story() -> None:
        async with timeout(SystemClock(), seconds) as limit:
            await asyncio.sleep(0)
        assert not limit.expired()
        with pytest.raises(ValueError, match="its own"):
            async with timeout(SystemClock(), seconds):
                raise ValueError("its own")
        assert asyncio.all_tasks() - {asyncio.current_task()} == set() or await settled()

    async def settled() -> bool:
        await asyncio.sleep(0)
        return asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(story())


@pytest.mark.parametrize("turns", range(4))
def test_a_timeout_that_is_left_at_the_moment_it_expires_is_no_error(turns: int) -> None:
    class StoppedClock(ManualClock):
        def __init__(self) -> None:
            super().__init__()
            self.passed = asyncio.Event()

        async def sleep(self, seconds: float) -> None:
            assert seconds == 1.0
            await self.passed.wait()

    async def story() -> list[object]:
        errors: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        clock = StoppedClock()
        with contextlib.suppress(TimeoutError):
            async with timeout(clock, 1.0):
                await asyncio.sleep(0)
                clock.passed.set()
                for _ in range(turns):
                    await asyncio.sleep(0)
        for _ in range(5):
            await asyncio.sleep(0)
        return errors

    assert asyncio.run(story()) == []
