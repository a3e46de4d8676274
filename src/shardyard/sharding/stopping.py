"""What the nodes do while an exchange is rebalanced: owners stop its shards, and any node undoes an abandoned one."""

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence

from shardyard.groups import Node
from shardyard.model import RetryLater, ShardyardError
from shardyard.runtime.clock import timeout
from shardyard.sharding import rebalance_changes
from shardyard.sharding.administration import Administration
from shardyard.sharding.queue import ShardQueue
from shardyard.sharding.rebalancing import Rebalancing
from shardyard.sharding.topology_cache import TopologyCache

_log = logging.getLogger(__name__)

SETTLE_SECONDS = 5.0
"""How long consumers may take to acknowledge what was delivered, before it counts as failed."""
LOOK_SECONDS = 0.2
"""How often a rebalance that is under way is looked at: this node may serve more of its shards by then."""
IDLE_SECONDS = 5.0
"""How often one is looked for, if nothing was signalled."""


class Stopping:
    """Follows the rebalances that are under way."""

    def __init__(
        self,
        node: Node,
        name: str,
        administration: Administration,
        topology: TopologyCache,
        rebalancing: Rebalancing,
        served: Callable[[], Sequence[ShardQueue]],
    ) -> None:
        """`served`: the queues that this node serves now."""
        self._node = node
        self._name = name
        self._administration = administration
        self._topology = topology
        self._rebalancing = rebalancing
        self._served = served

    async def follow(self) -> None:
        """Until cancelled."""
        while True:
            rebalances = self._topology.current.rebalances
            if rebalances:
                await self._stop()
                for exchange in rebalances:
                    await self._rebalancing.undo_abandoned(exchange, self._name)
            with contextlib.suppress(TimeoutError):
                async with timeout(self._node.clock, LOOK_SECONDS if rebalances else IDLE_SECONDS):
                    await self._topology.changed()

    async def _stop(self) -> None:
        """Stop the shards of this node that are to be rebalanced, and say so."""
        rebalances = self._topology.current.rebalances
        to_stop = [
            served
            for served in self._served()
            if (rebalance := rebalances.get(served.queue.exchange or ""))
            and not (served.is_frozen and served.name in rebalance.stopped)
        ]
        outcomes = await asyncio.gather(*(served.freeze(SETTLE_SECONDS) for served in to_stop), return_exceptions=True)
        stopped: defaultdict[str, list[str]] = defaultdict(list)
        for served, outcome in zip(to_stop, outcomes, strict=True):
            if isinstance(outcome, ShardyardError):
                _log.info("%s was not stopped for its rebalance: %s", served.name, outcome)
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                stopped[served.queue.exchange or ""].append(served.name)
        for exchange, names in stopped.items():
            await self._note(exchange, names)

    async def _note(self, exchange: str, names: list[str]) -> None:
        try:
            await self._administration.change(
                lambda topology: rebalance_changes.note_stopped(topology, exchange, names),
                *(self._name, "stopped for a rebalance", exchange, names),
            )
        except RetryLater as error:
            _log.info("the shards of %s are stopped, which will be said later: %s", exchange, error)
