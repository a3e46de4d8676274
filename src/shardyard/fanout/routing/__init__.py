"""The routing table of fan-out: which inbox partitions have online members of a channel. It is built from the topics
`members` and `presence`, or from a snapshot and what was appended to them since.

Users, channels and memberships are flat arrays, which are memory-mapped from the snapshot where there is one; what has
changed since is kept beside them until it is much. Both directions are there: `counts` has the inbox partitions of a
channel, `memberships` the channels of a user, so that a change of presence is cheap.
"""

from shardyard.fanout.routing.flat import compile_loops
from shardyard.fanout.routing.manifest import Manifest, SnapshotFile
from shardyard.fanout.routing.snapshot import Snapshot, SnapshotPartition, SnapshotUsers, read_users
from shardyard.fanout.routing.table import RoutingTable, TableSize
from shardyard.fanout.routing.writing import finish_snapshot, new_version, write_partition, write_snapshot, write_users

__all__ = [
    "Manifest",
    "RoutingTable",
    "Snapshot",
    "SnapshotFile",
    "SnapshotPartition",
    "SnapshotUsers",
    "TableSize",
    "compile_loops",
    "finish_snapshot",
    "new_version",
    "read_users",
    "write_partition",
    "write_snapshot",
    "write_users",
]
