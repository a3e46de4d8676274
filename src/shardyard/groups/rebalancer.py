"""The rebalancer: on whichever node holds the lease, it keeps the assignments of all groups true."""

import asyncio
import math
from collections.abc import Mapping, Sequence
from functools import partial

from shardyard.groups import assignment
from shardyard.groups.protocol import ANY_GROUP
from shardyard.log import Log
from shardyard.model import Topic
from shardyard.registry import ChangeSignal, Registry, Transaction, TransactionBatcher
from shardyard.registry.lease import RegistryLease, check
from shardyard.runtime.clock import Clock
from shardyard.runtime.leader import LeaderLoop
from shardyard.runtime.metrics import REBALANCES

LEASE = "rebalancer"
LEASE_SECONDS = 0.8
"""Shorter than the shortest session, so that after the death of a leader the next one evicts dead members in time."""
TICK_SECONDS = 0.1
"""How often to look for a change of the topics; a change in a group is noticed at once."""
LOOK_SECONDS = 2.0
"""The longest time between two looks at the groups: should the clock be set back, sessions would last too long."""
REST_FACTOR = 4
"""The pause after a rebalance, as a multiple of its duration."""
MAX_REST_SECONDS = 0.5
"""The longest such pause."""
TOGETHER = 32
"""Groups that are rebalanced at a time: commits and heartbeats wait for that long at most."""


class Rebalancer:
    """A candidate for the lease, and the leader while it holds it. If it dies at any point, the next one continues.

    It looks at the groups when one of them has changed, when the topics have changed, when the next session expires,
    and otherwise rarely.
    """

    def __init__(
        self, log: Log, registry: Registry, transactions: TransactionBatcher, holder: str, clock: Clock
    ) -> None:
        """`holder`: the name of this node among the others."""
        self._log = log
        self._registry = registry
        self._transactions = transactions
        self._lease = RegistryLease(transactions, LEASE, holder, LEASE_SECONDS, trusted=clock)
        self._clock = clock
        self._loop: LeaderLoop | None = None
        self._token = -1
        """Of the lease under which it last looked."""
        self._version = -1
        """Of the catalog, when the topics were last read."""
        self._topics: Mapping[str, Topic] = {}
        self._known: Mapping[str, Topic] | None = None
        """The topics for which all groups were rebalanced under this lease."""
        self._look_at = -math.inf
        """When to look next, on the monotonic clock."""
        self._rest = 0.0
        """Seconds to wait after a change: many members that join at the same time are rebalanced together."""

    @property
    def leads(self) -> bool:
        return self._loop is not None and self._loop.leads

    async def run(self) -> None:
        """Until cancelled."""
        with ChangeSignal(self._registry, ANY_GROUP, self._clock) as changes:

            async def wait(seconds: float) -> None:
                if await changes.wait(seconds):
                    await self._clock.sleep(self._rest)
                    self._look_at = -math.inf

            self._loop = LeaderLoop(
                "rebalancing", self._lease, self.rebalance_all, every=TICK_SECONDS, clock=self._clock, wait=wait
            )
            await self._loop.run()

    async def rebalance_all(self, token: int) -> list[assignment.Decision]:
        """Rebalance every group that needs it, each in a transaction of its own that checks the lease."""
        if token != self._token:  # what other leaders did meanwhile is unknown
            self._token, self._known = token, None
        if (version := await self._log.catalog_version()) != self._version:
            self._topics = {topic.name: topic for topic in await self._log.topics()}
            self._version = version
        topics, known = self._topics, self._known
        if topics is known and self._clock.monotonic() < self._look_at:
            return []
        started = self._clock.monotonic()
        outlook = await self._transactions.read(lambda tx: assignment.look(tx, topics, known))
        decisions = []
        for start in range(0, len(outlook.due), TOGETHER):
            decisions += await self._rebalance(outlook.due[start : start + TOGETHER], token)
        self._known = topics
        wait = LOOK_SECONDS if outlook.seconds is None else min(outlook.seconds, LOOK_SECONDS)
        now = self._clock.monotonic()
        self._look_at = now + wait
        self._rest = min(REST_FACTOR * (now - started), MAX_REST_SECONDS) if decisions else 0.0
        REBALANCES.add(len(decisions))
        return decisions

    async def _rebalance(self, groups: Sequence[str], token: int) -> list[assignment.Decision]:
        work = [partial(rebalance_as_leader, group=group, topics=self._topics, token=token) for group in groups]
        outcomes = await asyncio.gather(*map(self._transactions.run, work), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return [outcome for outcome in outcomes if isinstance(outcome, assignment.Decision)]


def rebalance_as_leader(
    tx: Transaction, *, group: str, topics: Mapping[str, Topic], token: int
) -> assignment.Decision | None:
    """Rebalance one group; `Fenced` if the lease was lost. A group that was deleted meanwhile needs nothing."""
    check(tx, LEASE, token)
    return None if tx.group(group) is None else assignment.rebalance(tx, group, topics)
