"""Which partition count and which assignor to take, in words."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardyard.pipeline.plan.steps import MemberStep

UNEVEN = 0.10
"""What the fullest member may have above the mean for a partition count to be recommended."""


@dataclass(frozen=True, slots=True)
class PartitionCount:
    """What the partitions would hold if there were so many."""

    partitions: int
    basis: str
    """measured, sample (placed by the first partitioner asked for) or even."""
    bytes_mean: int
    bytes_max: int | None
    """Unknown for an even spread, as is `max_over_mean`."""
    max_over_mean: float | None
    records_per_second: float | None


def recommended(counts: Sequence[PartitionCount], members: Sequence[int]) -> PartitionCount:
    """The smallest count that keeps partitions on members within `UNEVEN` of even, from the fewest members asked for to
    twice the most; if none does, the one that comes closest."""
    worst = {count: _worst(count.partitions, members)[0] for count in counts}
    good = [count for count in counts if worst[count] <= UNEVEN]
    return min(good or counts, key=lambda count: (0 if good else worst[count], count.partitions))


def recommendation(counts: Sequence[PartitionCount], members: Sequence[int], steps: Sequence[MemberStep]) -> str:
    """The recommended partition count and assignor, in two sentences with the numbers they rest on.

    The assignor is the one that leaves members the most even and, of those, moves the fewest.
    """
    now, chosen = members[0], recommended(counts, members)
    above, at = _worst(chosen.partitions, members)
    within = f"within {100 * UNEVEN:.0f} % of even with any number of members from {min(members)} to {2 * max(members)}"
    at_worst = f" (at worst {percent(above)} above the mean, with {at})" if above else ""
    why = "the smallest count asked for that stays "
    if above > UNEVEN:
        why = "closest of the counts asked for, of which none stays "
    size = f"{readable(chosen.bytes_mean)} a partition"
    if chosen.max_over_mean is not None:
        size += f" (the fullest has {chosen.max_over_mean:.2f} times that)"
    what = f"{_many(chosen.partitions, 'partition')} for {_many(now, 'member')}"
    first = f"{what}: {_each(chosen.partitions, now)}, {size}; {why}{within}{at_worst}."
    taken = [s for s in steps if (s.partitions, s.before, s.after) == (chosen.partitions, now, now + 1)]
    taken.sort(key=lambda s: (max(s.most_partitions - s.fewest_partitions, 1), s.moves))
    moves = ", ".join(_moves(step, noun=step is taken[0]) for step in taken)
    take = f": take {taken[0].assignor}" if len(taken) > 1 else ""
    return f"{first} Adding a {ordinal(now + 1)} moves {moves}{take}."


def _worst(partitions: int, asked: Sequence[int]) -> tuple[float, int]:
    """The most that a member's partitions are above the mean, and with how many members that is."""
    members = np.arange(min(asked), 2 * max(asked) + 1)
    above = -(-partitions // members) * members / partitions - 1
    return float(above.max()), int(members[above.argmax()])


def _each(partitions: int, members: int) -> str:
    few, rest = divmod(partitions, members)
    if not few:
        return f"{members - partitions} of them idle"
    return f"{few} or {few + 1} each" if rest else f"{few} each"


def _moves(step: MemberStep, *, noun: bool) -> str:
    many = _many(step.moves, "partition") if noun else f"{step.moves}"
    moved = f"{many} ({percent(step.fraction)}, {readable(step.bytes_moved)})" if step.moves else "none"
    uneven = step.most_partitions - step.fewest_partitions > 1
    tail = f" (but leaves {step.fewest_partitions} to {step.most_partitions} on a member)" if uneven else ""
    return f"{moved} with {step.assignor}{tail}"


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def percent(fraction: float) -> str:
    return f"{100 * fraction:.1f} %"


def ordinal(n: int) -> str:
    teens = n % 100 in (11, 12, 13)
    return f"{n}{'th' if teens else {1: 'st', 2: 'nd', 3: 'rd'}.get(n % 10, 'th')}"


def readable(size: float) -> str:
    """Bytes as people say them, in steps of 1000."""
    for unit, factor in (("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= 0.99995 * factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size:.0f} bytes"
