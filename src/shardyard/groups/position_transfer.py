"""Groups whose topic moves: how far they got on it, and where they are to start on its successor.

Transfer positions while the topic is sealed and before it is moved: from then on members read the successor. On a
partition of the successor without a transferred position a group starts as on any that it never committed.
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
    """Let a group start there on partitions that none of its members owns yet; those that are owned stay as they are.

    Positions never move back: one behind what is committed changes nothing, and transferring twice is harmless.
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
        tx.audit(who, "positions transferred", group, begins)
        protocol.touch(tx, group)
