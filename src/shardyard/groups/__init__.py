"""Groups: membership, assignment, hand-over, committed positions, and the rebalancer.

A `Node` hosts the members of a process. A `Reader` is a member that reads its share of the partitions of some topics:

    async with Node(log, registry) as node, Reader("billing", ["orders"], node=node) as reader:
        async for batch in reader:
            ...
            await batch.commit()

A `Membership` is the floor below: it tells a `MembershipListener` which partitions the member owns, and a `Directory`
tells others.
"""

from shardyard.groups.config import GroupConfig
from shardyard.groups.coordinator import JoinRequest, MemberIdentity
from shardyard.groups.directory import Directory, Owner, Presence
from shardyard.groups.in_flight import InFlight
from shardyard.groups.membership import Membership, MembershipListener
from shardyard.groups.node import Node
from shardyard.groups.partition_reader import OwnedBatch
from shardyard.groups.position_reset import ResetTarget, reset, resolve_positions
from shardyard.groups.position_transfer import positions_on, transfer_positions
from shardyard.groups.protocol import Grant, configure
from shardyard.groups.reader import Reader
from shardyard.groups.status import PartitionStatus, status

__all__ = [
    "Directory",
    "Grant",
    "GroupConfig",
    "InFlight",
    "JoinRequest",
    "MemberIdentity",
    "Membership",
    "MembershipListener",
    "Node",
    "OwnedBatch",
    "Owner",
    "PartitionStatus",
    "Presence",
    "Reader",
    "ResetTarget",
    "configure",
    "positions_on",
    "reset",
    "resolve_positions",
    "status",
    "transfer_positions",
]
