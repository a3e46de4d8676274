"""The rebalancer: on whichever node holds the lease, it keeps the assignments of all groups true."""

from collections.abc import Mapping
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
"""How often to look for expired sessions; a change in a group is noticed at once."""


class Rebalancer:
    """A candidate for the lease, and the leader while it holds it. If it dies at any point, the next one continues."""

    def __init__(
        self, log: Log, registry: Registry, transactions: TransactionBatcher, holder: str, clock: Clock
    ) -> None:
        """`holder`: the name of this node among the others."""
        self._log = log
        self._registry = registry
        self._transactions = transactions
        self._lease = RegistryLease(transactions, LEASE, holder, LEASE_SECONDS)
        self._clock = clock
        self._loop: LeaderLoop | None = None

    @property
    def leads(self) -> bool:
        return self._loop is not None and self._loop.leads

    async def run(self) -> None:
        """Until cancelled."""
        with ChangeSignal(self._registry, ANY_GROUP, self._clock) as changed:
            self._loop = LeaderLoop(
                "rebalancing",
                self._lease,
                self.rebalance_all,
                every=TICK_SECONDS,
                clock=self._clock,
                wait=changed.wait,
            )
            await self._loop.run()

    async def rebalance_all(self, token: int) -> list[assignment.Decision]:
        """Rebalance every group that needs it, each in a transaction of its own that checks the lease."""
        topics = {topic.name: topic for topic in await self._log.topics()}
        due = await self._transactions.read(
            lambda tx: [row.name for row in tx.groups() if assignment.is_due(tx, row, topics)]
        )
        decisions = [
            await self._transactions.run(partial(rebalance_as_leader, group=group, topics=topics, token=token))
            for group in due
        ]
        made = [decision for decision in decisions if decision is not None]
        REBALANCES.add(len(made))
        return made


def rebalance_as_leader(
    tx: Transaction, *, group: str, topics: Mapping[str, Topic], token: int
) -> assignment.Decision | None:
    """Rebalance one group; `Fenced` if the lease was lost. A group that was deleted meanwhile needs nothing."""
    check(tx, LEASE, token)
    return None if tx.group(group) is None else assignment.rebalance(tx, group, topics)
