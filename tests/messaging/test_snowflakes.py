"""Ids of messages: unique, ascending, and made under a number that no other process has."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardyard.messaging import snowflakes
from shardyard.messaging.snowflakes import (
    GENERATORS,
    LEASE_SECONDS,
    RENEW_SECONDS,
    START_MS,
    LeasedSnowflakes,
    Snowflakes,
    id_at,
    ms_of,
)
from shardyard.model import RetryLater
from shardyard.registry import Registry, TransactionBatcher, open_registry
from shardyard.runtime.clock import ManualClock
from tests.queues.engines import ENGINES, POSTGRESQL

NOW = START_MS + 1_000_000


@given(
    st.lists(st.integers(-5, 5), max_size=300),
    st.lists(st.integers(0, GENERATORS - 1), min_size=2, max_size=4, unique=True),
)
def test_ids_are_unique_over_generators_and_ascend_whatever_the_clock_does(
    steps: list[int], numbers: list[int]
) -> None:
    now = NOW
    made: dict[int, list[int]] = {number: [] for number in numbers}
    generators = {number: Snowflakes(number, lambda: now) for number in numbers}
    for step in steps:
        now += step
        for number, generator in generators.items():
            made[number].append(generator.next())
    for ids in made.values():
        assert ids == sorted(ids)
    everything = [id_ for ids in made.values() for id_ in ids]
    assert len(set(everything)) == len(everything)


def test_an_id_says_when_it_was_made_and_is_at_least_the_smallest_of_its_moment() -> None:
    ids = Snowflakes(255, lambda: NOW)
    first = ids.next()
    assert ms_of(first) == NOW
    assert id_at(NOW) <= first < id_at(NOW + 1)
    assert id_at(0) == 0
    assert ms_of(2**63 - 1) > NOW
    assert first < 2**63


def test_more_ids_than_a_millisecond_has_run_ahead_of_the_clock() -> None:
    ids = Snowflakes(3, lambda: NOW)
    made = [ids.next() for _ in range(40_000)]
    assert made == sorted(set(made))
    assert ms_of(made[-1]) == NOW + 2


# Leases


def run(
    folder: Path, engine: str, scenario: Callable[[TransactionBatcher, ManualClock, Registry], Awaitable[None]]
) -> None:
    clock = ManualClock(NOW / 1000)
    registry = (
        open_registry("memory://", clock=clock) if engine == "memory" else ENGINES[engine].open_registry(folder, clock)
    )
    with registry:
        batcher = TransactionBatcher(registry)
        try:
            asyncio.run(_awaited(scenario(batcher, clock, registry)))
        finally:
            batcher.close()


async def _awaited(work: Awaitable[None]) -> None:
    await work


@pytest.mark.parametrize("engine", ["memory", "sqlite", POSTGRESQL])
def test_no_two_processes_have_the_same_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
    monkeypatch.setattr(snowflakes, "GENERATORS", 3)

    async def scenario(transactions: TransactionBatcher, clock: ManualClock, _: Registry) -> None:
        made = [LeasedSnowflakes(transactions, f"server {n}", clock) for n in range(4)]
        for each in made[:3]:
            await each.acquire()
        assert sorted(each._generator for each in made[:3]) == [0, 1, 2]
        assert len({each.next() for each in made[:3]}) == 3
        with pytest.raises(RetryLater, match="all 3 numbers"):
            await made[3].acquire()
        with pytest.raises(RetryLater):
            made[3].next()
        await made[1].release()
        await made[3].acquire()
        assert made[3]._generator == made[1]._generator

    run(tmp_path, engine, scenario)


def test_a_lease_is_renewed_and_without_that_no_ids_are_made(tmp_path: Path) -> None:
    async def scenario(transactions: TransactionBatcher, clock: ManualClock, _: Registry) -> None:
        ids = LeasedSnowflakes(transactions, "server", clock)
        await ids.acquire()
        renewing = asyncio.create_task(ids.run())
        await asyncio.sleep(0)
        for _renewal in range(10):
            await clock.advance(RENEW_SECONDS)
            while ids._until <= clock.monotonic() + LEASE_SECONDS - RENEW_SECONDS:  # noqa: ASYNC110 the registry has a thread
                await asyncio.sleep(0.001)
            ids.next()
        renewing.cancel()
        await clock.advance(LEASE_SECONDS + 1)
        with pytest.raises(RetryLater, match="lost its number"):
            ids.next()

    run(tmp_path, "memory", scenario)


def test_a_process_that_was_stalled_takes_another_number_if_its_own_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snowflakes, "GENERATORS", 2)

    async def scenario(transactions: TransactionBatcher, clock: ManualClock, _: Registry) -> None:
        stalled, other = (LeasedSnowflakes(transactions, name, clock) for name in ("stalled", "other"))
        await stalled.acquire()
        await other.acquire()
        await clock.advance(LEASE_SECONDS + 1)
        assert stalled._generator != other._generator
        third = LeasedSnowflakes(transactions, "third", clock)
        await third.acquire()
        taken = stalled if third._generator == stalled._generator else other
        with pytest.raises(RetryLater):
            taken.next()
        renewing = asyncio.create_task(taken.run())
        await asyncio.sleep(0)
        await clock.advance(RENEW_SECONDS)
        while taken._generator == third._generator:  # noqa: ASYNC110 the registry has a thread
            await asyncio.sleep(0.001)
        assert taken.next() != third.next()
        renewing.cancel()

    run(tmp_path, "memory", scenario)
