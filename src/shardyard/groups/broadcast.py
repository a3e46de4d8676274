"""Broadcast groups, in which each member gets every record.

Each member of a broadcast group owns all partitions and has positions of its own. In the registry it therefore has a
group of its own, named after the group and the member; everything that holds for a group holds for it.
"""

from shardyard.registry import Snapshot

SEPARATOR = "~"
"""Between the name of a broadcast group and the name of the member."""


def member_group(group: str, member: str) -> str:
    """The own group of a member of a broadcast group."""
    return f"{group}{SEPARATOR}{member}"


def parent_group(group: str) -> str:
    """The group that users know: the broadcast group of a member's own group; any other group is its own parent."""
    return group.partition(SEPARATOR)[0]


def is_member_group(group: str) -> bool:
    """Whether it is the own group of a member of a broadcast group."""
    return SEPARATOR in group


def groups_of(tx: Snapshot, group: str) -> list[str]:
    """The group itself and, if it is a broadcast group, the own groups of its members; those that exist."""
    return [row.name for row in tx.groups() if parent_group(row.name) == group]


def is_departed(tx: Snapshot, group: str) -> bool:
    """Whether it is the own group of a member that has left a broadcast group. The member may come back."""
    return is_member_group(group) and not tx.members(group)
