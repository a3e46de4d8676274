"""The changes that callers make to a topology, as pure functions: each returns the topology afterwards, or raises and
so changes nothing. Shards follow from it by `shards.with_shards`."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from shardyard.model import (
    ExchangeExists,
    PseudoQueue,
    QueueExists,
    ShardManaged,
    UnknownExchange,
    UnknownNode,
    UnknownPolicy,
)
from shardyard.model.sharding import (
    Binding,
    Exchange,
    Policy,
    Queue,
    QueueKind,
    QueueLimits,
    QueueState,
    dead_letter_queue_name,
)
from shardyard.sharding.checks import check_binding, check_exchange, check_limits, check_node_name, check_policy
from shardyard.sharding.checks import check_queue_name as _check_queue_name
from shardyard.sharding.shards import active, drained
from shardyard.sharding.slots import with_queues
from shardyard.sharding.topology import Topology

T = TypeVar("T")


def declare_exchange(topology: Topology, exchange: Exchange) -> Topology:
    """With this exchange. Nothing changes if it exists with the same type and arguments; `ExchangeExists` if it has
    others."""
    exchange = check_exchange(exchange)
    existing = topology.exchanges.get(exchange.name)
    if existing is not None and existing != exchange:
        raise ExchangeExists(exchange.name, _how_declared(existing))
    return _checked(replace(topology, exchanges={**topology.exchanges, exchange.name: exchange}))


def delete_exchange(topology: Topology, name: str) -> Topology:
    """Without the exchange and its bindings; `UnknownExchange` if there is none."""
    if name not in topology.exchanges:
        raise UnknownExchange(name)
    left = frozenset(binding for binding in topology.declared_bindings if binding.exchange != name)
    return replace(topology, exchanges=_without(topology.exchanges, name), declared_bindings=left)


def declare_queue(topology: Topology, name: str, limits: QueueLimits) -> Topology:
    """With this queue. Nothing changes if it exists with the same limits; `QueueExists` if it has others. One that is
    being deleted takes messages again."""
    _check_queue(topology, name, "declared")
    check_limits(limits)
    existing = topology.queues.get(name)
    if existing is None:
        return with_queues(topology, [Queue(name, -1, -1, limits=limits)])
    if existing.limits != limits:
        raise QueueExists(name, "with other limits: declare it with the same ones, or delete it")
    return replace(topology, queues={**topology.queues, name: active(existing, topology.version)})


def declare_dead_letter_queue(topology: Topology, source: str) -> Topology:
    """With the queue for the dead letters of an exchange or a queue."""
    name = dead_letter_queue_name(source)
    existing = topology.queues.get(name)
    if existing is None:
        return with_queues(topology, [Queue(name, -1, -1, kind=QueueKind.DEAD)])
    return replace(topology, queues={**topology.queues, name: active(existing, topology.version)})


def close_queue(topology: Topology, name: str) -> Topology:
    """With the queue draining, and without its bindings: the first step of deleting it. `UnknownQueue` if there is
    none; an active shard is refused, because its policy would create it again."""
    if topology.is_sharded(name):
        raise PseudoQueue(name, "deleted")
    queue = topology.queue(name)
    if queue.kind is QueueKind.SHARD and queue.state is QueueState.ACTIVE:
        raise ShardManaged(name, "deleted")
    left = frozenset(binding for binding in topology.declared_bindings if binding.queue != name)
    queues = {**topology.queues, name: drained(queue, topology.version)}
    return replace(topology, queues=queues, declared_bindings=left)


def bind(topology: Topology, binding: Binding) -> Topology:
    """With this binding. Nothing changes if it exists."""
    _check_queue(topology, binding.queue, "bound")
    exchange = topology.exchange(binding.exchange)
    queue = topology.queue(binding.queue)
    check_binding(binding, exchange.type)
    if queue.state is QueueState.DRAINING:
        raise QueueExists(binding.queue, "and is being deleted: declare it again first")
    return replace(topology, declared_bindings=topology.declared_bindings | {binding})


def unbind(topology: Topology, binding: Binding) -> Topology:
    """Without this binding. Nothing changes if there is none, as long as exchange and queue exist."""
    _check_queue(topology, binding.queue, "unbound")
    topology.exchange(binding.exchange)
    topology.queue(binding.queue)
    return replace(topology, declared_bindings=topology.declared_bindings - {binding})


def set_policy(topology: Topology, policy: Policy) -> Topology:
    """With this policy, which replaces one of the same name."""
    policy = check_policy(policy)
    return _checked(replace(topology, policies={**topology.policies, policy.name: policy}))


def clear_policy(topology: Topology, name: str) -> Topology:
    """Without the policy; `UnknownPolicy` if there is none."""
    if name not in topology.policies:
        raise UnknownPolicy(name)
    return _checked(replace(topology, policies=_without(topology.policies, name)))


def register_node(topology: Topology, name: str) -> Topology:
    """With this node."""
    return replace(topology, nodes=topology.nodes | {check_node_name(name)})


def forget_node(topology: Topology, name: str) -> Topology:
    """Without the node; `UnknownNode` if there is none."""
    if name not in topology.nodes:
        raise UnknownNode(name)
    return replace(topology, nodes=topology.nodes - {name})


def _check_queue(topology: Topology, name: str, operation: str) -> None:
    _check_queue_name(name, operation)
    if topology.is_sharded(name):
        raise PseudoQueue(name, operation)


def _checked(topology: Topology) -> Topology:
    """The topology, unless a queue has the name of a sharded exchange: that name stands for its shards."""
    for name in topology.exchanges:
        if name in topology.queues and topology.is_sharded(name):
            raise QueueExists(
                name,
                f"and the exchange {name!r} would be sharded, so that its name stands for its shards: delete the queue",
            )
    return topology


def _how_declared(exchange: Exchange) -> str:
    arguments = {"hash-header": exchange.hash_header, "hash-property": exchange.hash_property}
    return " ".join([f"as {exchange.type}", *(f"with {name} {value!r}" for name, value in arguments.items() if value)])


def _without(items: Mapping[str, T], name: str) -> dict[str, T]:
    return {key: item for key, item in items.items() if key != name}
