"""Which shards there are to be: a pure function of exchanges, policies, nodes, and the shards that exist."""

from collections.abc import Iterator
from dataclasses import replace

from shardyard.model.sharding import Queue, QueueKind, QueueLimits, QueueState, shard_name
from shardyard.sharding.slots import with_queues
from shardyard.sharding.topology import Topology


def with_shards(topology: Topology) -> Topology:
    """The topology with the shards that its policies ask for.

    Missing ones are created, or take messages again if they are draining. Surplus ones drain. What changes gets the
    version of the topology as its incarnation.
    """
    wanted = {queue.name: queue for queue in _wanted(topology)}
    queues = dict(topology.queues)
    for queue in topology.queues.values():
        if queue.kind is QueueKind.SHARD and queue.name not in wanted:
            queues[queue.name] = drained(queue, topology.version)
    missing = []
    for name, shard in wanted.items():
        if (existing := queues.get(name)) is None:
            missing.append(shard)
        else:
            queues[name] = replace(active(existing, topology.version), limits=shard.limits)
    if queues != topology.queues:
        topology = replace(topology, queues=queues)
    return with_queues(topology, missing)


def drained(queue: Queue, version: int) -> Queue:
    """The queue as it takes no more messages. Those that are routed to it by an earlier topology are refused, once its
    new fence is set."""
    if queue.state is QueueState.DRAINING:
        return queue
    return replace(queue, state=QueueState.DRAINING, incarnation=version)


def active(queue: Queue, version: int) -> Queue:
    """The queue as it takes messages."""
    if queue.state is QueueState.ACTIVE:
        return queue
    return replace(queue, state=QueueState.ACTIVE, incarnation=version)


def _wanted(topology: Topology) -> Iterator[Queue]:
    """In the order in which they get slots."""
    for exchange in sorted(topology.exchanges):
        policy = topology.effective_policy(exchange)
        if policy is not None:
            for node in sorted(topology.nodes):
                for index in range(policy.shards_per_node):
                    yield _shard(exchange, node, index, policy.limits)


def _shard(exchange: str, node: str, index: int, limits: QueueLimits) -> Queue:
    """A shard that has no slot yet."""
    name = shard_name(exchange, node, index)
    return Queue(name, -1, -1, kind=QueueKind.SHARD, exchange=exchange, node=node, index=index, limits=limits)
