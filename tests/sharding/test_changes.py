"""Any sequence of changes keeps the topology sound: a model test of the pure functions."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from shardyard.model import ShardyardError
from shardyard.model.sharding import (
    NO_LIMITS,
    Binding,
    Exchange,
    ExchangeType,
    Policy,
    Queue,
    QueueKind,
    QueueState,
    shard_name,
)
from shardyard.sharding import changes, rebalance_changes
from shardyard.sharding.shards import with_shards
from shardyard.sharding.slots import slots_used, without_queues
from shardyard.sharding.topology import Rebalance, Topology

names = st.sampled_from(["a", "b", "images", "videos"])
node_names = st.sampled_from(["n1", "n2", "n3"])
patterns = st.sampled_from(["^images$", "^(a|b)$", "", "videos", "s$"])


class Changes(RuleBasedStateMachine):
    """Applies changes as transactions do, and remembers what the log knows of each slot."""

    def __init__(self) -> None:
        super().__init__()
        self.topology = Topology(version=1)
        self.fences: dict[int, int] = {}
        """By slot, the highest incarnation that was used."""
        self.ends: dict[int, int] = {}
        """By slot, the end of its partition."""

    @initialize()
    def start_sharded(self) -> None:
        self.register_node("n1")
        self.declare_exchange("images", ExchangeType.MODULUS_HASH)
        self.set_policy("a", "^images$", 2, 0)

    def apply(self, after: Topology) -> None:
        before, self.topology = self.topology, with_shards(after)
        for queue in self.topology.queues.values():
            known = before.queues.get(queue.name)
            if known is None or known.slot != queue.slot:
                assert queue.incarnation > self.fences.get(queue.slot, 0), "messages for its predecessor are refused"
                assert queue.first >= self.ends.get(queue.slot, 0), "it does not begin with those of its predecessor"
            self.fences[queue.slot] = max(self.fences.get(queue.slot, 0), queue.incarnation)
            self.ends[queue.slot] = self.ends.get(queue.slot, 0) + 1  # a message

    @property
    def next(self) -> Topology:
        return replace(self.topology, version=self.topology.version + 1)

    @rule(name=names, kind=st.sampled_from(ExchangeType))
    def declare_exchange(self, name: str, kind: ExchangeType) -> None:
        self.attempt(lambda: changes.declare_exchange(self.next, Exchange(name, kind)))

    @rule(name=names)
    def delete_exchange(self, name: str) -> None:
        self.attempt(lambda: changes.delete_exchange(self.next, name))

    @rule(name=names)
    def declare_queue(self, name: str) -> None:
        self.attempt(lambda: changes.declare_queue(self.next, name, NO_LIMITS))

    @rule(exchange=names, queue=names, key=st.sampled_from(["", "1", "x"]))
    def bind(self, exchange: str, queue: str, key: str) -> None:
        self.attempt(lambda: changes.bind(self.next, Binding(exchange, queue, key)))

    @rule(name=names, pattern=patterns, shards=st.integers(1, 3), priority=st.integers(0, 2))
    def set_policy(self, name: str, pattern: str, shards: int, priority: int) -> None:
        self.attempt(lambda: changes.set_policy(self.next, Policy(name, pattern, shards, priority=priority)))

    @rule(name=names)
    def clear_policy(self, name: str) -> None:
        self.attempt(lambda: changes.clear_policy(self.next, name))

    @rule(name=node_names)
    def register_node(self, name: str) -> None:
        self.attempt(lambda: changes.register_node(self.next, name))

    @rule(name=node_names)
    def forget_node(self, name: str) -> None:
        self.attempt(lambda: changes.forget_node(self.next, name))

    @rule(data=st.data())
    def remove_a_drained_queue(self, data: st.DataObject) -> None:
        draining = sorted(q.name for q in self.topology.queues.values() if q.state is QueueState.DRAINING)
        if draining:
            name = data.draw(st.sampled_from(draining))
            self.apply(without_queues(self.next, {name: self.ends[self.topology.queues[name].slot]}))

    @rule(data=st.data())
    def close_a_queue(self, data: st.DataObject) -> None:
        if self.topology.queues:
            name = data.draw(st.sampled_from(sorted(self.topology.queues)))
            self.attempt(lambda: changes.close_queue(self.next, name))

    @rule(exchange=st.sampled_from(["images", "a"]))
    def begin_a_rebalance(self, exchange: str) -> None:
        if exchange not in self.topology.rebalances:
            self.attempt(lambda: rebalance_changes.begin(self.next, exchange))

    @rule(exchange=st.sampled_from(["images", "a"]), is_finished=st.booleans())
    def end_a_rebalance(self, exchange: str, *, is_finished: bool) -> None:
        rebalance = self.topology.rebalances.get(exchange)
        if rebalance is None:
            return
        for target in rebalance.targets:  # copies
            self.ends[target.slot] = self.ends.get(target.slot, 0) + 1
        if is_finished:
            ends = {queue: self.ends[queue.slot] for queue in self.topology.shards(exchange)}
            self.attempt(lambda: self.finished(rebalance, ends))
        else:
            self.apply(
                rebalance_changes.undo(self.next, rebalance, {t.slot: self.ends[t.slot] for t in rebalance.targets})
            )

    @rule(exchange=st.sampled_from(["images", "a"]))
    def rebalance(self, exchange: str) -> None:
        self.begin_a_rebalance(exchange)
        self.end_a_rebalance(exchange, is_finished=True)

    def finished(self, rebalance: Rebalance, ends: Mapping[Queue, int]) -> Topology:
        after = rebalance_changes.finish(self.next, rebalance, ends)
        for target in rebalance.targets:  # the copies are where the queue begins
            self.ends[target.slot] = target.first
        return after

    def attempt(self, change: Callable[[], Topology]) -> None:
        before = self.topology
        try:
            after = change()
        except ShardyardError:
            assert self.topology is before
        else:
            self.apply(after)

    @invariant()
    def every_slot_has_one_use(self) -> None:
        topology = self.topology
        used = [queue.slot for queue in topology.queues.values()]
        used += [target.slot for rebalance in topology.rebalances.values() for target in rebalance.targets]
        used += topology.free_slots
        assert sorted(used) == list(range(slots_used(topology)))

    @invariant()
    def the_active_shards_are_those_that_policies_ask_for(self) -> None:
        topology = self.topology
        wanted = {
            shard_name(exchange, node, index)
            for exchange in topology.exchanges
            if (policy := topology.effective_policy(exchange)) is not None
            for node in topology.nodes
            for index in range(policy.shards_per_node)
        }
        shards = [queue for queue in topology.queues.values() if queue.kind is QueueKind.SHARD]
        assert {queue.name for queue in shards if queue.state is QueueState.ACTIVE} == wanted

    @invariant()
    def every_binding_leads_to_an_active_queue(self) -> None:
        topology = self.topology
        for exchange in topology.exchanges:
            assert all(topology.queues[b.queue].state is QueueState.ACTIVE for b in topology.bindings(exchange))
        assert all(binding.exchange in topology.exchanges for binding in topology.declared_bindings)
        assert not any(topology.is_sharded(name) for name in topology.queues), "pseudo-queues are no queues"


TestChanges = Changes.TestCase
TestChanges.settings = settings(
    stateful_step_count=30, max_examples=min(200, 2 * settings().max_examples), deadline=None
)
