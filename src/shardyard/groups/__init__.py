"""Membership, leases, assignment, positions, and the rebalancer.

`Node` is a process's place among the others, `Reader` shares the partitions of some topics with the rest of its group:

    async with Node(log, registry) as node, Reader("billing", ["orders"], node=node) as reader:
        async for batch in reader:
            ...
            await batch.commit()
"""

from shardyard.groups.node import Node
from shardyard.groups.partition_reader import OwnedBatch
from shardyard.groups.position_reset import To, reset, resolve
from shardyard.groups.position_transfer import positions_on, transfer_positions
from shardyard.groups.protocol import GroupConfig, configure
from shardyard.groups.reader import Reader
from shardyard.groups.status import PartitionStatus, status

__all__ = [
    "GroupConfig",
    "Node",
    "OwnedBatch",
    "PartitionStatus",
    "Reader",
    "To",
    "configure",
    "positions_on",
    "reset",
    "resolve",
    "status",
    "transfer_positions",
]
