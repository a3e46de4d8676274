"""The engines' clock is injected: tests and simulations decide when a wait is over and how old a record is."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from shardyard.log import Log, open_log
from shardyard.log.memory import MemoryLog
from shardyard.log.postgresql import PostgresqlLog
from shardyard.log.sqlite import SqliteLog
from shardyard.model import Record, Retention
from shardyard.runtime.clock import ManualClock
from tests.log.samples import T0, TIMEOUT_SECONDS, arrow, awaited, contents, records

MAINTAIN_SECONDS = 60.0


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(params=["memory", "sqlite", pytest.param("postgresql", marks=pytest.mark.server)])
def log(request: pytest.FixtureRequest, tmp_path: Path, clock: ManualClock) -> Log:
    if request.param == "postgresql":
        return PostgresqlLog(request.getfixturevalue("postgresql_log_url"), maintain_every=None, clock=clock)
    if request.param == "memory":
        return MemoryLog(clock=clock)
    return SqliteLog(tmp_path, durability="process", maintain_every=None, clock=clock)


async def settled(log: Log, *tasks: "asyncio.Future[Any]") -> None:
    """Give readers in other threads time to come to their next wait."""
    for _ in range(20):
        await log.span(T0)
        await asyncio.sleep(0)
    assert not any(task.done() for task in tasks)


@awaited
async def test_a_waiting_read_ends_when_its_time_has_passed_on_the_clock(log: Log, clock: ManualClock) -> None:
    await log.create_topic("t", 1)
    reader = asyncio.ensure_future(log.read(T0, 0, wait=3600))
    while not clock._sleepers:  # noqa: ASYNC110 there is no event for it
        await asyncio.sleep(0.001)
    await settled(log, reader)
    await clock.advance(3599)
    await settled(log, reader)
    await clock.advance(1)
    assert len(await asyncio.wait_for(reader, TIMEOUT_SECONDS)) == 0


@awaited
async def test_a_waiting_read_gets_its_record_although_no_time_passes(log: Log) -> None:
    await log.create_topic("t", 1)
    reader = asyncio.ensure_future(log.read(T0, 0, wait=3600))
    await settled(log, reader)
    await log.append(T0, records(0))
    assert (await asyncio.wait_for(reader, TIMEOUT_SECONDS)).records() == records(0)
    reader = asyncio.ensure_future(log.read(T0, 1, wait=3600))
    await settled(log, reader)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader


@awaited
async def test_timestamps_and_retention_are_those_of_the_clock(log: Log, clock: ManualClock) -> None:
    topic = await log.create_topic("t", 1, retention=Retention(age_ms=60_000))
    assert topic.epoch == int(clock.now() * 1000)
    await log.append(T0, [Record("a", None, b"")])
    await clock.advance(30)
    await log.append(T0, arrow([Record("b", None, b"")]))
    first, second = await contents(log, T0)
    assert (first.timestamp, second.timestamp) == (topic.epoch, topic.epoch + 30_000)
    await clock.advance(30)
    await log.maintain()
    assert [r.id for r in await contents(log, T0)] == ["a", "b"]
    await clock.advance(1)
    await log.maintain()
    assert [r.id for r in await contents(log, T0)] == ["b"]


@awaited
async def test_maintenance_in_the_background_goes_by_the_clock(tmp_path: Path) -> None:
    clock = ManualClock()
    async with SqliteLog(tmp_path, durability="process", maintain_every=MAINTAIN_SECONDS, clock=clock) as log:
        await log.create_topic("t", 1, retention=Retention(age_ms=1))
        await log.append(T0, [Record("a", None, b"")])
        await settled(log)
        assert (await log.span(T0)).first == 0
        await clock.advance(MAINTAIN_SECONDS)
        async with asyncio.timeout(TIMEOUT_SECONDS):
            while (await log.span(T0)).first == 0:  # noqa: ASYNC110 it is done in another thread
                await asyncio.sleep(0)


@awaited
async def test_a_log_that_is_opened_by_a_url_has_the_clock_too(tmp_path: Path) -> None:
    clock = ManualClock(now=5.0)
    for url in ("memory://", f"sqlite:///{tmp_path}/log"):
        async with open_log(url, clock=clock) as log:
            assert (await log.create_topic("t", 1)).epoch == 5000
