"""The moves between two assignments."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from shardyard.model import Move, Partition


@dataclass(frozen=True, slots=True)
class Plan:
    """The difference between two assignments.

    A partition that had no owner before, or has none after, is gained or lost by a member, but it is not a move,
    because there is no hand-over between two members.
    """

    moves: tuple[Move, ...]
    gained: Mapping[str, tuple[Partition, ...]]
    lost: Mapping[str, tuple[Partition, ...]]
    unchanged: tuple[Partition, ...]
    fraction: float
    """Moves divided by the number of partitions that have an owner before or after."""


def plan(before: Mapping[Partition, str], after: Mapping[Partition, str]) -> Plan:
    """Compare two assignments."""
    moves, unchanged = [], []
    gained: defaultdict[str, list[Partition]] = defaultdict(list)
    lost: defaultdict[str, list[Partition]] = defaultdict(list)
    partitions = sorted({*before, *after})
    for partition in partitions:
        source, target = before.get(partition), after.get(partition)
        if source == target:
            unchanged.append(partition)
            continue
        if source is not None:
            lost[source].append(partition)
        if target is not None:
            gained[target].append(partition)
        if source is not None and target is not None:
            moves.append(Move(partition, source, target))
    return Plan(
        moves=tuple(moves),
        gained={name: tuple(group) for name, group in sorted(gained.items())},
        lost={name: tuple(group) for name, group in sorted(lost.items())},
        unchanged=tuple(unchanged),
        fraction=len(moves) / len(partitions) if partitions else 0.0,
    )
