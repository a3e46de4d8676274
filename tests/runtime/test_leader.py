"""The loop of a leader."""

import asyncio
import logging

import pytest

from shardyard.model import Busy
from shardyard.runtime.clock import ManualClock
from shardyard.runtime.leader import LeaderLoop


class _Held:
    """A lease that is always held."""

    async def acquire(self) -> int:
        return 1

    async def release(self, _token: int) -> None: ...

    def lost(self) -> None: ...


def test_an_error_that_lasts_is_logged_once_and_so_is_its_end(caplog: pytest.LogCaptureFixture) -> None:
    outcomes = iter([Busy("the database", 1.0), Busy("the database", 2.0), None, Busy("the database", 1.0)])
    caplog.set_level(logging.INFO, "shardyard")

    async def story() -> None:
        done = asyncio.Event()

        async def work(_token: int) -> None:
            error = next(outcomes, done)
            if error is done:
                done.set()
            elif isinstance(error, Busy):
                raise error

        loop = LeaderLoop("cleaning up", _Held(), work, every=0.0, clock=ManualClock())
        running = asyncio.create_task(loop.run())
        await done.wait()
        await asyncio.sleep(0)  # the round that ended it is over
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(story())
    said = [record.getMessage().partition(":")[0] for record in caplog.records]
    assert said == [
        "cleaning up will be retried",
        "cleaning up works again",
        "cleaning up will be retried",
        "cleaning up works again",
    ]
