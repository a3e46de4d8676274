"""`Rebalancing`: moves the unread messages of an exchange to the shards where its routing leads now, in place.

    1. a transaction reserves a fresh slot for each active shard, and makes the rebalance known
    2. the fences of all shards are raised: publishers are refused, and wait
    3. the owners of the shards deliver nothing more, wait for acknowledgements for a while, and store their state
    4. the unsettled messages are copied to the fresh slots, in an order that keeps that of each routing key
    5. another transaction lets the shards continue in the fresh slots, and frees the old ones

Until step 5 nothing has changed for readers, so a rebalance that fails or whose process dies is undone: by itself, or
by another node once its lease is over. Publishers that wait longer than they want to get `RetryLater`. Messages that
were delivered and not acknowledged in time are delivered again. BCC was not stored, and is not considered.
"""

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from functools import partial

from shardyard.groups import Node
from shardyard.model import Fence, Fenced, RebalanceRunning, RebalanceUndone, ShardyardError
from shardyard.model.sharding import Queue, Rebalanced
from shardyard.registry import Snapshot, lease
from shardyard.runtime.clock import timeout
from shardyard.sharding import rebalance_changes
from shardyard.sharding.administration import Administration
from shardyard.sharding.backlog import backlog
from shardyard.sharding.backlog_copy import BacklogCopy
from shardyard.sharding.removal import drop_records
from shardyard.sharding.topology import Topology
from shardyard.sharding.topology_cache import TopologyCache

_log = logging.getLogger(__name__)

LEASE_SECONDS = 10.0
"""After this time without a sign of life, another node undoes a rebalance."""
STOP_SECONDS = 30.0
"""How long the owners of the shards may take to stop, all in all: one that has died is replaced in this time."""

Check = Callable[[Snapshot], None]
"""`Fenced` if the lease of the rebalance was lost."""


def lease_name(exchange: str) -> str:
    return f"sharding/rebalance/{exchange}"


class Rebalancing:
    """Carries out rebalances, and undoes those that another process left behind."""

    def __init__(self, node: Node, administration: Administration, topology: TopologyCache) -> None:
        self._node = node
        self._log = node.log
        self._administration = administration
        self._topology = topology

    async def rebalance(self, exchange: str, who: str) -> Rebalanced:
        """Distribute the unread messages of an exchange over its shards anew. `RebalanceRunning` if another call does
        so now; `RebalanceUndone` if it could not be finished: then everything is as it was."""
        async with self._leased(exchange) as token:
            check = partial(lease.check, name=lease_name(exchange), token=token)
            if exchange in (await self._topology.refresh()).rebalances:
                await self._undo(exchange, check, who)
            try:
                topology, _ = await self._administration.change(
                    lambda before: rebalance_changes.begin(before, exchange),
                    *(who, "rebalance began", exchange),
                    check=check,
                )
                return await self._carry_out(topology, exchange, check, who)
            except BaseException as error:
                try:
                    await asyncio.shield(self._undo(exchange, check, who))
                except ShardyardError as later:
                    _log.warning("the rebalance of %s will be undone by another node: %s", exchange, later)
                if isinstance(error, Fenced):
                    raise RebalanceUndone(exchange, "this node was out of touch for too long") from error
                raise

    async def undo_abandoned(self, exchange: str, who: str) -> None:
        """Undo a rebalance that is under way, unless its process is alive."""
        row, now = await self._node.transactions.read(lambda tx: (tx.lease(lease_name(exchange)), tx.now))
        if row is not None and row.expires_at > now:
            return
        with contextlib.suppress(RebalanceRunning):
            async with self._leased(exchange) as token:
                _log.warning("the rebalance of %s was abandoned, and is undone", exchange)
                await self._undo(exchange, partial(lease.check, name=lease_name(exchange), token=token), who)

    @contextlib.asynccontextmanager
    async def _leased(self, exchange: str) -> AsyncIterator[int]:
        """Holds the lease of the exchange's rebalance for the length of the block. If it is lost, the next transaction
        of the block is refused."""
        name, holder = lease_name(exchange), uuid.uuid4().hex
        acquire = partial(lease.acquire, name=name, holder=holder, seconds=LEASE_SECONDS)
        token = await self._node.transactions.run(acquire)
        if token is None:
            raise RebalanceRunning(exchange)

        async def renew() -> None:
            while True:
                await self._node.clock.sleep(LEASE_SECONDS / 4)
                with contextlib.suppress(ShardyardError):  # it is tried again, and checked when it matters
                    await self._node.transactions.run(acquire)

        renewing = asyncio.create_task(renew(), name=f"lease of the rebalance of {exchange}")
        try:
            yield token
        finally:
            renewing.cancel()
            await asyncio.gather(renewing, return_exceptions=True)
            await self._node.transactions.run(lambda tx: lease.release(tx, name, token))

    async def _carry_out(self, topology: Topology, exchange: str, check: Check, who: str) -> Rebalanced:
        rebalance = topology.rebalances[exchange]
        await self._raise_fences(topology.shards(exchange), topology.version)
        await self._until_stopped(exchange)
        shards = self._topology.current.shards(exchange)
        if any(queue.incarnation > topology.version for queue in shards):  # messages can be stored in it
            raise RebalanceUndone(exchange, "its shards have changed meanwhile")
        spans = {queue: await self._log.span(queue.partition) for queue in shards}
        states = {queue: await self._log.span(queue.state_partition) for queue in shards}
        ends = {queue: span.end for queue, span in spans.items()}
        copy = BacklogCopy(self._node, topology, rebalance)
        async for run in backlog(self._log, ends):
            await copy.add(run)
        await copy.store_failures()
        await self._administration.change(
            lambda before: rebalance_changes.finish(before, rebalance, ends),
            *(who, "rebalance finished", exchange, {"messages": sum(copy.counts.values())}),
            check=check,
        )
        for queue in shards:
            await drop_records(self._log, queue, ends[queue], states[queue].end)
        return Rebalanced(exchange, tuple((target.name, copy.counts[target.name]) for target in rebalance.targets))

    async def _raise_fences(self, queues: Sequence[Queue], version: int) -> None:
        """From now on nothing is stored in these queues by the incarnation that publishers know."""
        for queue in queues:
            with contextlib.suppress(Fenced):
                await self._log.set_fence(replace(queue, incarnation=version).routing_fence)

    async def _until_stopped(self, exchange: str) -> None:
        try:
            async with timeout(self._node.clock, STOP_SECONDS):
                while True:
                    changed = asyncio.ensure_future(self._topology.changed())
                    try:
                        topology = await self._topology.refresh()
                        rebalance = topology.rebalances.get(exchange)
                        if rebalance is None:
                            raise RebalanceUndone(exchange, "another node has undone it")
                        if {queue.name for queue in topology.shards(exchange)} <= rebalance.stopped:
                            return
                        await changed
                    finally:
                        changed.cancel()
        except TimeoutError:
            raise RebalanceUndone(exchange, f"its shards were not stopped within {STOP_SECONDS:g} s") from None

    async def _undo(self, exchange: str, check: Check, who: str) -> None:
        """Everything is as it was before. Copies that were made are dropped; nothing more can be added to them."""
        rebalance = (await self._topology.refresh()).rebalances.get(exchange)
        if rebalance is None:
            return
        spans = {}
        for target in rebalance.targets:
            with contextlib.suppress(Fenced):
                await self._log.set_fence(Fence(target.routing_fence.name, target.incarnation + 1))
            spans[target] = await self._log.span(target.partition)
        ends = {target.slot: span.end for target, span in spans.items()}
        await self._administration.change(
            lambda before: rebalance_changes.undo(before, rebalance, ends),
            *(who, "rebalance undone", exchange),
            check=check,
        )
        for target in rebalance.targets:
            await drop_records(self._log, target, ends[target.slot], 0)
