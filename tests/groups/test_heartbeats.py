"""Heartbeats that a server stores together."""

import asyncio

import pytest

from shardyard.groups import protocol
from shardyard.groups.heartbeats import INTERVAL_SECONDS, Heartbeats
from shardyard.model import Closed, Fenced
from shardyard.registry import Heartbeat, TransactionBatcher
from tests.registry.test_batcher import RecordingRegistry

MEMBERS = 20


def test_heartbeats_soon_after_others_share_a_transaction_and_a_stranger_fails_alone() -> None:
    async def scenario() -> None:
        registry = RecordingRegistry()
        transactions = TransactionBatcher(registry)
        taking = Heartbeats(transactions)
        rows = [
            await transactions.run(lambda tx, name=f"m{i}": protocol.join(tx, "billing", name))  # type: ignore[misc]
            for i in range(MEMBERS)
        ]
        registry.opened.clear()

        started = asyncio.get_running_loop().time()
        await taking.take(Heartbeat("billing", "m0", rows[0].epoch, frozenset()))
        outcomes = await asyncio.gather(
            *(taking.take(Heartbeat("billing", row.name, row.epoch, frozenset())) for row in rows),
            taking.take(Heartbeat("billing", "stranger", 1, frozenset())),
            return_exceptions=True,
        )
        assert asyncio.get_running_loop().time() - started >= INTERVAL_SECONDS
        assert outcomes[:-1] == [None] * MEMBERS
        assert isinstance(outcomes[-1], Fenced)
        assert registry.opened == ["transaction", "transaction"]

        transactions.close()
        with pytest.raises(Closed):
            await taking.take(Heartbeat("billing", "m0", rows[0].epoch, frozenset()))

    asyncio.run(scenario())
