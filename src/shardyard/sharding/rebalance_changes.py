"""The steps of a rebalance as pure functions of the topology; see `rebalancing`."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from shardyard.model import InvalidValue, RebalanceUndone
from shardyard.model.sharding import Queue, QueueState
from shardyard.sharding.slots import in_free_slots
from shardyard.sharding.topology import Rebalance, Topology


def begin(topology: Topology, exchange: str) -> Topology:
    """With a rebalance of an exchange under way, and a fresh slot reserved for each of its active shards."""
    kind = topology.exchange(exchange).type
    if not kind.is_hashing:
        expected = "a hashing type, because the others copy each message to all shards that match"
        raise InvalidValue(f"the type of exchange {exchange!r}", kind.value, expected)
    if any(binding.exchange == exchange for binding in topology.declared_bindings):
        expected = "an exchange that only its shards are bound to: unbind the queues that were declared"
        raise InvalidValue("exchange", exchange, expected)
    shards = [queue for queue in topology.shards(exchange) if queue.state is QueueState.ACTIVE]
    if not shards:
        raise InvalidValue("exchange", exchange, "a sharded exchange: set a policy that matches its name")
    targets, free = in_free_slots(topology, shards)
    rebalances = {**topology.rebalances, exchange: Rebalance(exchange, tuple(targets))}
    return replace(topology, rebalances=rebalances, free_slots=free)


def note_stopped(topology: Topology, exchange: str, shards: Iterable[str]) -> Topology:
    """With these shards known to be stopped. Nothing changes if no rebalance is under way."""
    rebalance = topology.rebalances.get(exchange)
    if rebalance is None:
        return topology
    after = replace(rebalance, stopped=rebalance.stopped | set(shards))
    return replace(topology, rebalances={**topology.rebalances, exchange: after})


def finish(topology: Topology, rebalance: Rebalance, ends: Mapping[Queue, int]) -> Topology:
    """With the active shards in their new slots, and without those that drained: everything in them was copied.

    `ends`: the shards whose messages were copied, each with the offset where they ended. `RebalanceUndone` if the
    exchange has other shards now.
    """
    exchange = rebalance.exchange
    if topology.rebalances.get(exchange) is None:
        raise RebalanceUndone(exchange, "another node has undone it")
    shards = topology.shards(exchange)
    is_as_copied = set(map(_identity, shards)) == set(map(_identity, ends))
    active = {queue.name for queue in shards if queue.state is QueueState.ACTIVE}
    if not is_as_copied or active != {target.name for target in rebalance.targets}:
        raise RebalanceUndone(exchange, "its shards have changed meanwhile")
    names = {queue.name for queue in shards}
    queues = {name: queue for name, queue in topology.queues.items() if name not in names}
    for target in rebalance.targets:
        moved = replace(topology.queues[target.name], slot=target.slot, first=target.first)
        queues[target.name] = replace(moved, incarnation=topology.version)
    freed = {queue.slot: end for queue, end in ends.items()}
    return replace(
        topology,
        queues=queues,
        free_slots={**topology.free_slots, **freed},
        rebalances=_without(topology.rebalances, exchange),
    )


def undo(topology: Topology, rebalance: Rebalance, ends: Mapping[int, int]) -> Topology:
    """Without the rebalance: its slots are free again, and the shards take messages where they were.

    `ends`: of each of its slots, the offset where the copies in it end.
    """
    exchange = rebalance.exchange
    if topology.rebalances.get(exchange) is None or topology.rebalances[exchange].targets != rebalance.targets:
        return topology
    queues = dict(topology.queues)
    for queue in topology.shards(exchange):  # a new incarnation: the fences of the old one were raised
        queues[queue.name] = replace(queue, incarnation=topology.version)
    return replace(
        topology,
        queues=queues,
        free_slots={**topology.free_slots, **ends},
        rebalances=_without(topology.rebalances, exchange),
    )


def _identity(queue: Queue) -> tuple[str, int, int, QueueState]:
    """What changes when a queue takes messages again above the fence that was raised."""
    return queue.name, queue.slot, queue.incarnation, queue.state


def _without(rebalances: Mapping[str, Rebalance], exchange: str) -> dict[str, Rebalance]:
    return {name: rebalance for name, rebalance in rebalances.items() if name != exchange}
