"""A lease in the registry, as a leader holds it."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any
from unittest import mock

from shardyard.registry import TransactionBatcher, lease
from shardyard.registry.lease import RegistryLease
from shardyard.registry.memory import MemoryRegistry
from shardyard.runtime.clock import ManualClock

NAME, SECONDS = "rebalancer", 8.0


class Candidates:
    """Two processes that compete for a lease: one that trusts its clock, and one that always asks the registry."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.registry = MemoryRegistry(self.clock)
        self.transactions = TransactionBatcher(self.registry)
        self.trusting = RegistryLease(self.transactions, NAME, "trusting", SECONDS, trusted=self.clock)
        self.asking = RegistryLease(self.transactions, NAME, "asking", SECONDS)

    def holder(self) -> str:
        row = self.registry.read(lambda tx: tx.lease(NAME))
        assert row is not None
        return row.holder

    def take_away(self) -> None:
        """As if its time had passed on the registry's clock alone."""
        row = self.registry.read(lambda tx: tx.lease(NAME))
        assert row is not None
        self.registry.run(lambda tx: lease.release(tx, NAME, row.token))


def tell(story: Callable[[Candidates], Coroutine[Any, Any, None]]) -> None:
    candidates = Candidates()
    try:
        asyncio.run(story(candidates))
    finally:
        candidates.transactions.close()


def test_a_trusted_clock_keeps_a_lease_for_longer_than_its_time_by_renewing_it() -> None:
    async def story(c: Candidates) -> None:
        for _ in range(10):
            assert await c.trusting.acquire() == 1
            assert await c.asking.acquire() is None
            await c.clock.advance(SECONDS / 4)
        await c.clock.advance(SECONDS)
        assert await c.asking.acquire() == 2
        assert await c.trusting.acquire() is None

    tell(story)


def test_a_trusted_lease_that_was_lost_is_noticed_when_half_of_its_time_has_passed() -> None:
    async def story(c: Candidates) -> None:
        assert await c.trusting.acquire() == 1
        c.take_away()
        assert await c.asking.acquire() == 2
        await c.clock.advance(SECONDS / 2 - 1)
        assert await c.trusting.acquire() == 1
        await c.clock.advance(1)
        assert await c.trusting.acquire() is None
        assert c.holder() == "asking"

    tell(story)


def test_a_trusted_lease_is_looked_at_as_soon_as_its_token_was_refused() -> None:
    async def story(c: Candidates) -> None:
        assert await c.trusting.acquire() == 1
        c.take_away()
        assert await c.asking.acquire() == 2
        c.trusting.lost()
        assert await c.trusting.acquire() is None

    tell(story)


def test_a_trusted_lease_that_was_released_is_acquired_under_a_new_token() -> None:
    async def story(c: Candidates) -> None:
        assert await c.trusting.acquire() == 1
        await c.trusting.release(1)
        assert await c.trusting.acquire() == 2

    tell(story)


def test_a_trusted_lease_is_renewed_in_one_transaction() -> None:
    async def story(c: Candidates) -> None:
        assert await c.trusting.acquire() == 1
        await c.clock.advance(SECONDS / 2)
        with (
            mock.patch.object(c.registry, "read", wraps=c.registry.read) as read,
            mock.patch.object(c.registry, "run", wraps=c.registry.run) as run,
        ):
            assert await c.trusting.acquire() == 1
        assert (read.call_count, run.call_count) == (0, 1)

    tell(story)
