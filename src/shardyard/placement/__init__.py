"""Pure functions without I/O: hash keys, partition them, assign partitions to members, plan moves, measure balance.

What hashes keys is imported when it is used: the groups of a client need only the assignors.
"""

from typing import TYPE_CHECKING

from shardyard.model.extras import lazy_exports
from shardyard.placement.assignors import ASSIGNORS, assign
from shardyard.placement.balance import Balance, balance
from shardyard.placement.names import DEFAULT_HASH, HASH_NAMES, ID_KINDS, PARTITIONERS
from shardyard.placement.plan import Plan, plan

if TYPE_CHECKING:
    from shardyard.placement.hashes import HASHES, Hash, Key, hash_named, key_bytes, phash2
    from shardyard.placement.ids import generate_ids
    from shardyard.placement.partitioners import Jump, Modulus, Partitioner, RoundRobin, jump, partitioner_named

__all__ = [
    "ASSIGNORS",
    "DEFAULT_HASH",
    "HASHES",
    "HASH_NAMES",
    "ID_KINDS",
    "PARTITIONERS",
    "Balance",
    "Hash",
    "Jump",
    "Key",
    "Modulus",
    "Partitioner",
    "Plan",
    "RoundRobin",
    "assign",
    "balance",
    "generate_ids",
    "hash_named",
    "jump",
    "key_bytes",
    "partitioner_named",
    "phash2",
    "plan",
]

_MODULES = {
    "shardyard.placement.hashes": ("HASHES", "Hash", "Key", "hash_named", "key_bytes", "phash2"),
    "shardyard.placement.ids": ("generate_ids",),
    "shardyard.placement.partitioners": (
        "Jump",
        "Modulus",
        "Partitioner",
        "RoundRobin",
        "jump",
        "partitioner_named",
    ),
}

__getattr__ = lazy_exports(
    __name__, {name: module for module, names in _MODULES.items() for name in names}, "numpy", "pyarrow", "xxhash"
)
