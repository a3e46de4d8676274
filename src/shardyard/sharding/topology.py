"""`Topology`: which exchanges, queues, bindings and policies there are, as one immutable value."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar, cast

from shardyard.model import UnknownExchange, UnknownQueue
from shardyard.model.sharding import Binding, Exchange, Policy, Queue, QueueKind, QueueState
from shardyard.sharding.patterns import matches

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Rebalance:
    """A rebalance of an exchange's backlog that is under way; see `rebalancing`."""

    exchange: str
    targets: tuple[Queue, ...]
    """The active shards as they are to be, in slots of their own that are not in use yet."""
    stopped: frozenset[str] = frozenset()
    """The shards that their owners do not deliver from any more, and whose state they have stored."""


@dataclass(frozen=True)
class Topology:
    """The topology at one time. Changes make a new one (`changes`, `shards`), and `rows` stores what differs."""

    version: int = 0
    """Rises with every change, and never repeats, also in a registry that was lost and set up again."""
    exchanges: Mapping[str, Exchange] = field(default_factory=dict)
    policies: Mapping[str, Policy] = field(default_factory=dict)
    queues: Mapping[str, Queue] = field(default_factory=dict)
    declared_bindings: frozenset[Binding] = frozenset()
    """Those that callers made. Shards are bound by their policy: see `bindings`."""
    nodes: frozenset[str] = frozenset()
    """Every node that ever joined and was not forgotten."""
    free_slots: Mapping[int, int] = field(default_factory=dict)
    """Slots whose queue was removed, and the offset where the next queue in it begins."""
    rebalances: Mapping[str, Rebalance] = field(default_factory=dict)
    """Those that are under way, by exchange."""

    def exchange(self, name: str) -> Exchange:
        """The exchange of that name; `UnknownExchange` if there is none."""
        try:
            return self.exchanges[name]
        except KeyError:
            raise UnknownExchange(name) from None

    def queue(self, name: str) -> Queue:
        """The queue of that name; `UnknownQueue` if there is none."""
        try:
            return self.queues[name]
        except KeyError:
            raise UnknownQueue(name) from None

    def effective_policy(self, exchange: str) -> Policy | None:
        """The policy that applies to an exchange: of those that match its name the one with the highest priority, and
        among equals the first by name. None if none does; `UnknownExchange` if there is no such exchange."""
        self.exchange(exchange)
        return self._effective_policies.get(exchange)

    def is_sharded(self, name: str) -> bool:
        """Whether this is the name of a sharded exchange, and so of a pseudo-queue."""
        return name in self._effective_policies

    def shards(self, exchange: str) -> tuple[Queue, ...]:
        """The shards of an exchange in the order of their names, also those that are draining, and also after the
        exchange was deleted."""
        return self._shards.get(exchange, ())

    def bindings(self, exchange: str) -> tuple[Binding, ...]:
        """How an exchange routes messages: the declared bindings and those of its active shards, in order."""
        return self._bindings.get(exchange, ())

    def derived(self, key: Hashable, build: Callable[[], T]) -> T:
        """What `build` returns, built once for this topology and `key`."""
        if key not in self._derived:
            self._derived[key] = build()
        return cast(T, self._derived[key])

    @cached_property
    def _derived(self) -> dict[Hashable, object]:
        return {}

    @cached_property
    def by_slot(self) -> Mapping[int, Queue]:
        """The queue that each slot stores."""
        return {queue.slot: queue for queue in self.queues.values()}

    @cached_property
    def _effective_policies(self) -> Mapping[str, Policy]:
        ranked = sorted(self.policies.values(), key=lambda policy: (-policy.priority, policy.name))
        found = {name: next((p for p in ranked if matches(p.pattern, name)), None) for name in self.exchanges}
        return {name: policy for name, policy in found.items() if policy is not None}

    @cached_property
    def _shards(self) -> Mapping[str, tuple[Queue, ...]]:
        by_exchange: defaultdict[str, list[Queue]] = defaultdict(list)
        for name in sorted(self.queues):
            queue = self.queues[name]
            if queue.kind is QueueKind.SHARD and queue.exchange is not None:
                by_exchange[queue.exchange].append(queue)
        return {exchange: tuple(queues) for exchange, queues in by_exchange.items()}

    @cached_property
    def _bindings(self) -> Mapping[str, tuple[Binding, ...]]:
        by_exchange: defaultdict[str, list[Binding]] = defaultdict(list)
        for binding in self.declared_bindings:
            by_exchange[binding.exchange].append(binding)
        for exchange, policy in self._effective_policies.items():
            by_exchange[exchange] += (
                Binding(exchange, shard.name, policy.routing_key)
                for shard in self.shards(exchange)
                if shard.state is QueueState.ACTIVE
            )
        return {exchange: tuple(sorted(bindings)) for exchange, bindings in by_exchange.items()}
