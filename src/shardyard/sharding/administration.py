"""`Administration`: declares exchanges, queues and bindings, sets policies, and registers nodes.

Each change is one transaction of the registry. Queues that stop receiving by it drain, and nothing is ever stored in a
queue that was removed:

    1. the transaction marks the queue as draining, under a new incarnation: nodes that see it route nothing to it
    2. its fence is set to the new incarnation: the log refuses what others still route to it by the earlier topology
    3. when everything in it was acknowledged, another transaction removes it, and frees its slot

A process that dies in between leaves a draining queue, and its owner does the rest.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import msgspec

from shardyard.groups import Node
from shardyard.model import NodeRunning
from shardyard.model.sharding import (
    NO_LIMITS,
    NODES_GROUP,
    Binding,
    Exchange,
    Policy,
    Queue,
    QueueKind,
    QueueLimits,
    QueueState,
    Remaining,
    dead_letter_queue_name,
)
from shardyard.registry import Snapshot, Transaction
from shardyard.sharding import changes
from shardyard.sharding.patterns import matches
from shardyard.sharding.removal import CountUnread, Removal
from shardyard.sharding.rows import next_version, read_topology, store
from shardyard.sharding.shards import with_shards
from shardyard.sharding.slots import Slots, SlotsNeeded, slots_used
from shardyard.sharding.topology import Topology

Change = Callable[[Topology], Topology]


class Administration:
    """Changes the topology. Every method returns when the change is durable. One that raises has changed nothing, but
    after `RetryLater` queues that the change has closed may not be removed yet: their owners do that.

    `who`, in all methods, is for the audit log.
    """

    def __init__(self, node: Node, count_unread: CountUnread | None = None) -> None:
        """`count_unread`: counts the messages of a queue that were not acknowledged; see `Removal`."""
        self._node = node
        self._slots = Slots(node.log)
        self._removal = Removal(node, count_unread)

    async def topology(self) -> Topology:
        """The topology as it is stored now."""
        return await self._node.transactions.read(read_topology)

    # Exchanges, queues and bindings

    async def declare_exchange(self, exchange: Exchange, who: str) -> Exchange:
        """Declare an exchange. If a policy matches its name, its shards are created with it. Nothing changes if it
        exists; `ExchangeExists` if it does with another type or other arguments."""
        after, _ = await self.change(
            lambda topology: changes.declare_exchange(topology, exchange),
            *(who, "exchange declared", exchange.name, exchange),
        )
        return after.exchanges[exchange.name]

    async def delete_exchange(self, name: str, who: str, *, discard: bool = False) -> Remaining:
        """Delete an exchange. Its shards receive no more messages: empty ones are removed at once, the others are
        returned, with those that were draining before, can be consumed by their names, and go when they are empty.
        `discard`: remove these, too, and what is in them; only those are returned that take messages again, because the
        exchange was declared again meanwhile. The queue with its dead letters, if there are some, stays and is returned
        in any case."""
        after, _ = await self.change(
            lambda topology: changes.delete_exchange(topology, name),
            who,
            "exchange deleted",
            name,
            {"discard": discard},
        )
        closed = [queue for queue in _draining_shards(after) if queue.exchange == name]
        if discard:
            _, remaining = await self._removal.discard(closed, who)
        else:
            remaining = await self._removal.close(closed, who)
        return remaining + await self._dead_letters(after, [name])

    async def _dead_letters(self, topology: Topology, exchanges: Iterable[str]) -> Remaining:
        """The queues with dead letters of these exchanges. They stay."""
        names = map(dead_letter_queue_name, exchanges)
        return await self._removal.count(topology.queues[name] for name in names if name in topology.queues)

    async def declare_queue(self, name: str, who: str, limits: QueueLimits = NO_LIMITS) -> Queue:
        """Declare a queue. Nothing changes if it exists; `QueueExists` if it does with other limits. `PseudoQueue` if
        it is the name of a sharded exchange."""
        after, _ = await self.change(
            lambda topology: changes.declare_queue(topology, name, limits), who, "queue declared", name, limits
        )
        return after.queues[name]

    async def declare_dead_letter_queue(self, source: str, who: str) -> Queue:
        """The queue for the dead letters of an exchange or a queue, created if it does not exist."""
        name = dead_letter_queue_name(source)
        after, _ = await self.change(
            lambda topology: changes.declare_dead_letter_queue(topology, source), who, "queue declared", name
        )
        return after.queues[name]

    async def delete_queue(self, name: str, who: str) -> int:
        """Delete a queue with what is in it: one that was declared, one for dead letters, or a shard that drains.
        Returns how many messages were dropped with it at most."""
        after, _ = await self.change(lambda topology: changes.close_queue(topology, name), who, "queue deleted", name)
        dropped, _ = await self._removal.discard([after.queues[name]], who)
        return dropped

    async def bind(self, binding: Binding, who: str, *, declare: bool = False) -> None:
        """Bind a queue to an exchange. Nothing changes if it is. `declare`: declare the queue in the same transaction,
        if it does not exist."""

        def change(topology: Topology) -> Topology:
            if declare and binding.queue not in topology.queues:
                topology = changes.declare_queue(topology, binding.queue, NO_LIMITS)
            return changes.bind(topology, binding)

        await self.change(change, who, "queue bound", binding.queue, binding)

    async def unbind(self, binding: Binding, who: str) -> bool:
        """End a binding. Nothing changes if there is none. Returns whether there was."""
        was_bound = False

        def change(topology: Topology) -> Topology:
            nonlocal was_bound
            was_bound = binding in topology.declared_bindings
            return changes.unbind(topology, binding)

        await self.change(change, who, "queue unbound", binding.queue, binding)
        return was_bound

    # Policies

    async def set_policy(self, policy: Policy, who: str) -> Remaining:
        """Set a policy, or replace the one of that name. It applies to the exchanges that exist, and to later ones.
        With fewer shards than before, the surplus ones drain, as with `delete_exchange`."""
        return await self._change_policy(
            lambda topology: changes.set_policy(topology, policy), who, "policy set", policy.name, policy
        )

    async def clear_policy(self, name: str, who: str) -> Remaining:
        """Remove a policy. The shards of exchanges to which none applies now drain, as with `delete_exchange`. Their
        dead letters are returned, too."""
        return await self._change_policy(
            lambda topology: changes.clear_policy(topology, name), who, "policy cleared", name
        )

    async def _change_policy(
        self, change: Change, who: str, action: str, name: str, policy: Policy | None = None
    ) -> Remaining:
        """Returns what is left of all draining shards of the exchanges that the policy, as it was or as it is now,
        matches: also of those that were draining before."""
        earlier: Policy | None = None

        def noting(topology: Topology) -> Topology:
            nonlocal earlier
            earlier = topology.policies.get(name)
            return change(topology)

        after, _ = await self.change(noting, who, action, name, policy)
        patterns = {each.pattern for each in (earlier, policy) if each is not None}
        remaining = await self._removal.close(
            (
                queue
                for queue in _draining_shards(after)
                if any(matches(pattern, queue.exchange or "") for pattern in patterns)
            ),
            who,
        )
        if policy is not None:
            return remaining
        matched = (name for name in sorted(after.exchanges) if any(matches(pattern, name) for pattern in patterns))
        return remaining + await self._dead_letters(after, matched)

    # Nodes

    async def register_node(self, name: str) -> Topology:
        """Make a node known before it joins the group of nodes: its shards are created now. Returns the topology."""
        await self._slots.provide(1)  # the group has a topic, also before the first queue
        after, _ = await self.change(
            lambda topology: changes.register_node(topology, name), name, "node registered", name
        )
        return after

    async def forget_node(self, name: str, who: str) -> Remaining:
        """Forget a node that will not come back: its shards drain. `NodeRunning` while it is a member."""
        _, closed = await self.change(
            lambda topology: changes.forget_node(topology, name),
            *(who, "node forgotten", name),
            check=lambda tx: _check_not_running(tx, name),
        )
        return await self._removal.close(closed, who)

    # Draining

    async def remove_if_drained(self, queue: Queue, end: int) -> bool:
        """For the owner of a draining queue: remove it, if it holds nothing from the offset `end` on, before which
        everything was acknowledged. Returns whether it was removed; if not, there is more to read, or it takes messages
        again."""
        return await self._removal.remove_if_drained(queue, end, self._node.name)

    async def change(
        self,
        change: Change,
        who: str,
        action: str,
        subject: str,
        detail: object = None,
        *,
        check: Callable[[Snapshot], None] | None = None,
    ) -> tuple[Topology, list[Queue]]:
        """Carry out a change. Returns the topology then, and the queues that stopped receiving by it."""

        def work(tx: Transaction) -> tuple[Topology, list[Queue]]:
            if check is not None:
                check(tx)
            return apply(tx, change, self._slots.count, who, action, subject, detail)

        while True:
            try:
                return await self._node.transactions.run(work)
            except SlotsNeeded as needed:
                await self._slots.provide(needed.count)


def apply(
    tx: Transaction, change: Change, slots: int, who: str, action: str, subject: str, detail: object = None
) -> tuple[Topology, list[Queue]]:
    """Work for a transaction: change the topology, and create and drain shards as it then asks for.

    `slots`: how many there are; `SlotsNeeded` if that is too few. Nothing is audited if nothing changes.
    """
    before = read_topology(tx)
    after = with_shards(change(replace(before, version=next_version(before, tx.now))))
    if slots_used(after) > max(slots, slots_used(before)):
        raise SlotsNeeded(slots_used(after))
    if not store(tx, before, after):
        return before, []
    created = len(after.queues.keys() - before.queues.keys())
    closed = [queue for queue in after.queues.values() if _stops(before.queues.get(queue.name), queue)]
    audited = {"detail": msgspec.to_builtins(detail), "queues created": created, "queues draining": len(closed)}
    tx.audit(who, action, subject, {name: value for name, value in audited.items() if value})
    return after, closed


def _draining_shards(topology: Topology) -> Iterator[Queue]:
    for queue in topology.queues.values():
        if queue.kind is QueueKind.SHARD and queue.state is QueueState.DRAINING:
            yield queue


def _stops(before: Queue | None, after: Queue) -> bool:
    return before is not None and before.state is not QueueState.DRAINING and after.state is QueueState.DRAINING


def _check_not_running(tx: Snapshot, name: str) -> None:
    member = tx.member(NODES_GROUP, name)
    if member is not None and member.expires_at > tx.now:
        raise NodeRunning(name)
