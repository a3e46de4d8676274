"""Pure functions without I/O: hash keys, partition them, assign partitions to members, plan moves, measure balance."""

from shardyard.placement.assignors import ASSIGNORS, assign
from shardyard.placement.balance import Balance, balance
from shardyard.placement.hashes import HASHES, Hash, Key, hash_named, key_bytes, phash2
from shardyard.placement.ids import ID_KINDS, generate_ids
from shardyard.placement.partitioners import (
    DEFAULT_HASH,
    PARTITIONERS,
    Jump,
    Modulus,
    Partitioner,
    RoundRobin,
    jump,
    partitioner_named,
)
from shardyard.placement.plan import Plan, plan

__all__ = [
    "ASSIGNORS",
    "DEFAULT_HASH",
    "HASHES",
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
