"""Retrying: until a deadline, and reported as often as the caller wants."""

import asyncio

import pytest

from shardyard.model import Busy
from shardyard.runtime.clock import ManualClock
from shardyard.runtime.retry import Backoff, first_only, retry


def test_a_call_is_retried_until_the_deadline_and_only_its_first_failure_is_reported() -> None:
    reported: list[str] = []
    attempts = 0

    async def scenario() -> None:
        clock = ManualClock()

        async def fail() -> None:
            nonlocal attempts
            attempts += 1
            raise Busy(f"attempt {attempts}", 1.0)

        def report(error: Busy) -> None:
            reported.append(error.what)

        retrying = asyncio.create_task(
            retry(
                fail,
                clock=clock,
                deadline=clock.monotonic() + 10.0,
                backoff=Backoff(first=1.0, longest=1.0),
                retry_on=Busy,
                on_retry=first_only(report),
            )
        )
        await asyncio.sleep(0)
        await clock.advance(11.0)
        with pytest.raises(Busy):
            await retrying

    asyncio.run(scenario())
    assert attempts > 5
    assert reported == ["attempt 1"]
