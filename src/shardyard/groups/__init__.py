"""Membership, leases, assignment, positions, and the rebalancer.

`Node` is a process's place among the others, `Member` shares the partitions of some topics with the rest of its group:

    async with Node(log, registry) as node, Member("billing", ["orders"], node=node) as member:
        async for batch in member:
            ...
            await batch.commit()
"""

from shardyard.groups.claim import OwnedBatch
from shardyard.groups.member import Member
from shardyard.groups.moving import carry_over, positions_on
from shardyard.groups.node import Node
from shardyard.groups.protocol import configure
from shardyard.groups.resetting import To, reset, resolve
from shardyard.groups.status import PartitionStatus, status

__all__ = [
    "Member",
    "Node",
    "OwnedBatch",
    "PartitionStatus",
    "To",
    "carry_over",
    "configure",
    "positions_on",
    "reset",
    "resolve",
    "status",
]
