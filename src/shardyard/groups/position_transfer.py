"""Groups whose topic moves: how far they got on it, and where they are to begin on its successor.

To be done while the topic is sealed and before it is moved: from then on members take up the successor. A group begins
on a partition of it that no position was carried over for as on any that it never committed.
"""

from collections.abc import Mapping
from dataclasses import replace

from shardyard.groups import protocol
from shardyard.model import Partition, Position, UnknownGroup
from shardyard.registry import OwnershipRow, Snapshot, Transaction


def positions_on(tx: Snapshot, topic: str) -> dict[str, dict[Partition, Position]]:
    """Every group that has committed on the topic, with its committed positions there."""
    found = {
        group.name: {
            row.partition: row.committed
            for row in tx.ownerships(group.name)
            if row.partition.topic == topic and row.committed is not None
        }
        for group in tx.groups()
    }
    return {group: positions for group, positions in found.items() if positions}


def transfer_positions(tx: Transaction, group: str, positions: Mapping[Partition, Position], who: str) -> None:
    """Let a group begin there on partitions that nobody in it owns yet; those that somebody owns are left alone.

    Never back: a position behind what is committed changes nothing, and neither does the same one once more.
    """
    if tx.group(group) is None:
        raise UnknownGroup(group)
    rows = []
    for partition, position in positions.items():
        row = tx.ownership(group, partition) or OwnershipRow(group, partition, progress_at=tx.now)
        if row.owner is None and (row.committed is None or row.committed < position):
            rows.append(replace(row, committed=position))
    if rows:
        tx.put_ownerships(rows)
        begins = {str(row.partition): row.committed.offset for row in rows if row.committed is not None}
        tx.audit(who, "positions carried over", group, begins)
        protocol.touch(tx, group)
