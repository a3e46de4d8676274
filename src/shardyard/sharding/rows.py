"""The topology in the registry: each exchange, policy, queue, binding and node is a setting."""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import msgspec

from shardyard.model import Damaged
from shardyard.model.sharding import SHARD_PREFIX, Binding, Exchange, Policy, Queue
from shardyard.registry import SettingRow, Snapshot, Transaction
from shardyard.sharding.topology import Rebalance, Topology

T = TypeVar("T")

EXCHANGES = "sharding/exchange"
POLICIES = "sharding/policy"
QUEUES = "sharding/queue"
BINDINGS = "sharding/binding"
NODES = "sharding/node"
FREE_SLOTS = "sharding/slot"
REBALANCES = "sharding/rebalance"
VERSION = "sharding/topology"
"""The scopes of the settings."""
OF_SLOTS = (FREE_SLOTS, REBALANCES)
"""Scopes whose settings name offsets, which mean nothing in a copy of the log."""
VERSION_NAME = "version"
WATCH_NAME = f"setting/{VERSION}"
"""Touched by every change of the topology."""


def read_version(tx: Snapshot) -> int:
    """The version of the topology; 0 if nothing was ever declared."""
    row = tx.setting(VERSION, VERSION_NAME)
    return 0 if row is None else _converted(row, int)


def read_topology(tx: Snapshot) -> Topology:
    """The topology as it is stored."""
    return Topology(
        version=read_version(tx),
        exchanges={row.name: _converted(row, Exchange) for row in tx.settings(EXCHANGES)},
        policies={row.name: _converted(row, Policy) for row in tx.settings(POLICIES)},
        queues={row.name: _converted(row, Queue) for row in tx.settings(QUEUES)},
        declared_bindings=frozenset(_converted(row, Binding) for row in tx.settings(BINDINGS)),
        nodes=frozenset(row.name for row in tx.settings(NODES)),
        free_slots={int(row.name): _converted(row, int) for row in tx.settings(FREE_SLOTS)},
        rebalances={row.name: _converted(row, Rebalance) for row in tx.settings(REBALANCES)},
    )


def read_shards(tx: Snapshot) -> Mapping[str, list[Queue]]:
    """The shards of each exchange in the order of their names, also those that are draining."""
    found: defaultdict[str, list[Queue]] = defaultdict(list)
    for row in tx.settings(QUEUES):
        if row.name.startswith(SHARD_PREFIX):
            queue = _converted(row, Queue)
            found[queue.exchange or ""].append(queue)
    return found


def next_version(topology: Topology, now: float) -> int:
    """The version of the topology after the next change. The first one is the time, so that versions lie above those
    of a lost registry: fences in the log know them."""
    return topology.version + 1 if topology.version else int(now * 1000)


def store(tx: Transaction, before: Topology, after: Topology) -> bool:
    """Store what differs. Returns whether anything does, besides the version."""
    is_changed = False
    rows_before, rows_after = dict(_scopes(before)), dict(_scopes(after))
    for scope, rows in rows_after.items():
        earlier = rows_before[scope]
        for name in earlier.keys() - rows.keys():
            tx.delete_setting(scope, name)
            is_changed = True
        for name, item in rows.items():
            if name not in earlier or earlier[name] != item:
                tx.put_setting(scope, name, msgspec.to_builtins(item))
                is_changed = True
    if is_changed:
        tx.put_setting(VERSION, VERSION_NAME, after.version)
    return is_changed


def _scopes(topology: Topology) -> Iterator[tuple[str, Mapping[str, Any]]]:
    yield EXCHANGES, topology.exchanges
    yield POLICIES, topology.policies
    yield QUEUES, topology.queues
    yield BINDINGS, {_binding_name(binding): binding for binding in topology.declared_bindings}
    yield NODES, dict.fromkeys(topology.nodes, True)
    yield FREE_SLOTS, {str(slot): first for slot, first in topology.free_slots.items()}
    yield REBALANCES, topology.rebalances


def _binding_name(binding: Binding) -> str:
    return json.dumps([binding.exchange, binding.queue, binding.routing_key], ensure_ascii=False)


def _converted(row: SettingRow, kind: type[T]) -> T:
    try:
        return msgspec.convert(row.value, kind)
    except msgspec.ValidationError as error:
        raise Damaged(f"the setting {row.scope}/{row.name}", str(error)) from None
