"""The rebalancer: on whichever node holds the lease, it keeps assignments true."""

import asyncio
import contextlib
import logging
from collections.abc import Mapping

from shardyard.groups import protocol
from shardyard.log import Log
from shardyard.model import Fenced, ShardyardError, Topic
from shardyard.registry import Registry, lease
from shardyard.registry.change_signal import ChangeSignal
from shardyard.runtime.clock import Clock, SystemClock
from shardyard.runtime.metrics import REBALANCES

_log = logging.getLogger(__name__)

REBALANCER = "rebalancer"
"""The name of its lease."""
LEASE_SECONDS = 0.8
"""Shorter than the shortest session, so that a dead leader is followed by one who puts out the dead members."""
TICK_SECONDS = 0.1
"""How often to look for sessions that expired; a change in a group is noticed at once."""


def rebalance_all(registry: Registry, token: int, topics: Mapping[str, Topic]) -> list[protocol.Decision]:
    """Rebalance every group that needs it, each in a transaction of its own that checks the lease."""
    with registry.snapshot() as tx:
        due = [row.name for row in tx.groups() if protocol.is_due(tx, row, topics)]
    decisions = []
    for group in due:
        with registry.transaction() as tx:
            lease.check(tx, REBALANCER, token)
            if tx.group(group) is not None and (decision := protocol.rebalance(tx, group, topics)) is not None:
                decisions.append(decision)
                REBALANCES.add()
    return decisions


class Rebalancer:
    """A candidate for the lease, and the leader while it has it. If it dies at any point, the next one goes on."""

    def __init__(self, log: Log, registry: Registry, name: str, clock: Clock | None = None) -> None:
        self._log = log
        self._registry = registry
        self._name = name
        self._clock = clock or SystemClock()
        self._token: int | None = None

    @property
    def leads(self) -> bool:
        return self._token is not None

    async def run(self) -> None:
        """Until cancelled."""
        with ChangeSignal(self._registry, protocol.ANY_GROUP) as changed:
            try:
                while True:
                    try:
                        await self._look()
                    except Fenced:
                        self._token = None
                    except ShardyardError as error:
                        _log.warning("rebalancing put off: %s", error)
                    except Exception:  # noqa: BLE001 groups must not be left alone for an error in one of them
                        _log.exception("rebalancing failed")
                    await changed.wait(TICK_SECONDS)
            finally:
                await self._give_up()

    async def _look(self) -> None:
        self._token = await asyncio.to_thread(self._acquire)
        if self._token is not None:
            topics = {topic.name: topic for topic in await self._log.topics()}
            await asyncio.to_thread(rebalance_all, self._registry, self._token, topics)

    def _acquire(self) -> int | None:
        with self._registry.snapshot() as tx:  # nearly always there is nothing to write
            row, now = tx.lease(REBALANCER), tx.now
        if row is not None and now < row.expires_at <= now + LEASE_SECONDS:
            if row.holder != self._name:
                return None
            if row.token == self._token and row.expires_at > now + LEASE_SECONDS / 2:
                return self._token
        with self._registry.transaction() as tx:
            return lease.acquire(tx, REBALANCER, self._name, LEASE_SECONDS)

    async def _give_up(self) -> None:
        token = self._token
        if token is not None:
            self._token = None
            with contextlib.suppress(ShardyardError):
                await asyncio.to_thread(self._hand_back, token)

    def _hand_back(self, token: int) -> None:
        with self._registry.transaction() as tx:
            lease.release(tx, REBALANCER, token)
