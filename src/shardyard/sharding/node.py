"""`ShardingNode`: a node among the others that serve sharded queues."""

import asyncio
import contextlib
import logging
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

from shardyard.groups import Directory, JoinRequest, Membership, Node, Owner
from shardyard.model import MemberExists, NodeNameTaken, NotOwner
from shardyard.model.sharding import NODES_GROUP, SHARDS_TOPIC, QueueState
from shardyard.runtime.background import keep_running
from shardyard.runtime.retry import Backoff, first_only, retry
from shardyard.sharding.administration import Administration
from shardyard.sharding.attachments import Attachments
from shardyard.sharding.config import DEFAULT_CONFIG, ShardingConfig
from shardyard.sharding.dead_letter_publishing import DeadLetterPublisher
from shardyard.sharding.ownership import Ownership
from shardyard.sharding.publishing import Publisher
from shardyard.sharding.queue import ShardQueue
from shardyard.sharding.rebalancing import Rebalancing
from shardyard.sharding.state_store import StateStore, count_unsettled
from shardyard.sharding.stopping import Stopping
from shardyard.sharding.topology import Topology
from shardyard.sharding.topology_cache import TopologyCache

_log = logging.getLogger(__name__)

DRAIN_SECONDS = 0.25
"""How often draining queues are looked at."""
LOOK_SECONDS = 1.0
"""How often the others are looked at, whether they drain."""
JOIN_BACKOFF = Backoff(first=0.1, longest=0.5)


class ShardingNode:
    """A broker process as a node: it owns slots, serves the queues in them, and publishes to all exchanges.

    From entering the block to leaving it. Its name is stable over restarts, because shards are named by it. Before it
    joins the others, its shards exist. While no exchange is sharded, it is little more than a membership.
    """

    def __init__(self, node: Node, *, name: str, address: str | None, config: ShardingConfig = DEFAULT_CONFIG) -> None:
        """`address`: where clients and other nodes reach this one."""
        self.name = name
        self.address = address
        self.node = node
        self.config = config
        self.administration = Administration(node, lambda queue: count_unsettled(node.log, queue))
        self.topology_cache = TopologyCache(node)
        self.directory = Directory(node, NODES_GROUP)
        self.publisher = Publisher(node.log, self.topology_cache, node.clock)
        letters = DeadLetterPublisher(self.publisher, self.administration, self.topology_cache, name)
        states = StateStore(node.log, node.clock, seconds=config.store_seconds)
        self._ownership = Ownership(node.log, node.clock, config, self.topology_cache, states, letters)
        self.attachments = Attachments(node, self.topology_cache, self.directory, lambda: self._ownership.identity)
        self.rebalancing = Rebalancing(node, self.administration, self.topology_cache)
        self._stopping = Stopping(
            node, name, self.administration, self.topology_cache, self.rebalancing, lambda: self.queues
        )
        self._stack = AsyncExitStack()

    @property
    def topology(self) -> Topology:
        """Exchanges, queues, bindings and policies, as far as this node knows; at most some milliseconds old."""
        return self.topology_cache.current

    def queue(self, name: str) -> ShardQueue:
        """The queue as this node serves it. `NotOwner` names the address of the node that does, `UnknownQueue` if there
        is no such queue."""
        return self._ownership.queue(self.topology.queue(name)) or self._raise_not_owner(name)

    def owner_of(self, name: str) -> Owner | None:
        """Who serves a queue now; None if nobody does. `UnknownQueue` if there is no such queue."""
        return self.directory.owner_of(self.topology.queue(name).partition)

    @property
    def queues(self) -> list[ShardQueue]:
        """The queues that this node serves."""
        return self._ownership.queues

    async def failure(self) -> BaseException:
        """Return when this node can't be a member any more, with the reason: then it has to be started again."""
        return await self._ownership.failure()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await self.administration.register_node(self.name)
            await stack.enter_async_context(self.topology_cache)
            await stack.enter_async_context(self.directory)
            stack.push_async_callback(self._ownership.close)
            await self._join()
            await stack.enter_async_context(self.attachments)
            task = asyncio.create_task(self._run(), name=f"queues of {self.name}")
            stack.push_async_callback(_cancelled, task)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Store what was settled, and leave the other nodes: they serve its queues from now on."""
        await self._stack.aclose()

    async def _join(self) -> None:
        """An earlier process of this name, that was killed, is a member until its session is over."""
        request = JoinRequest(
            *(NODES_GROUP, self.name, [SHARDS_TOPIC]),
            session_timeout=self.config.session_timeout,
            address=self.address,
        )

        async def join() -> None:
            try:
                await self._ownership.join(Membership(self.node, request, self._ownership))
            except MemberExists:
                raise NodeNameTaken(self.name) from None

        await retry(
            join,
            clock=self.node.clock,
            deadline=self.node.clock.monotonic() + 2 * self.config.session_timeout,
            backoff=JOIN_BACKOFF,
            retry_on=NodeNameTaken,
            on_retry=first_only(lambda error: _log.warning("joining will be retried: %s", error)),
        )

    async def _run(self) -> None:
        clock = self.node.clock
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(keep_running("queues that this node owns", self._ownership.follow, clock))
            tasks.create_task(keep_running("rebalances", self._stopping.follow, clock))
            tasks.create_task(keep_running("removal of drained queues", self._remove_drained, clock))

    async def _remove_drained(self) -> None:
        """Remove queues that receive no more messages, as soon as they are empty."""
        while True:
            draining = [served for served in self.queues if served.queue.state is QueueState.DRAINING]
            for served in draining:
                with contextlib.suppress(NotOwner):
                    end = await served.drained_before()
                    if end is not None and await self.administration.remove_if_drained(served.queue, end):
                        _log.info("queue %s was drained and is gone", served.name)
                        await self.topology_cache.refresh()
            await self.node.clock.sleep(DRAIN_SECONDS if draining else LOOK_SECONDS)

    def _raise_not_owner(self, name: str) -> ShardQueue:
        owner = self.owner_of(name)
        address = None if owner is None or owner.member == self.name else owner.address
        raise NotOwner(name, address)


async def _cancelled(task: "asyncio.Task[None]") -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
