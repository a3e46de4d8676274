"""Recommends a number of partitions and an assignor."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardyard.pipeline.plan.steps import MemberStep

MAX_EXCESS = 0.10
"""How far the fullest member may be above the mean for a number of partitions to be recommended."""


@dataclass(frozen=True, slots=True)
class PartitionCount:
    """The load of each partition with this number of partitions."""

    partitions: int
    basis: str
    """Where the load comes from: measured, sample (placed by the first partitioner) or even."""
    bytes_mean: int
    bytes_max: int | None
    """None if an even spread is assumed, and so is `max_over_mean`."""
    max_over_mean: float | None
    records_per_second: float | None


def recommend(counts: Sequence[PartitionCount], members: Sequence[int], keys: int | None = None) -> PartitionCount:
    """The smallest number of partitions with which no member owns more than `MAX_EXCESS` above the mean.

    That must hold for every number of members from the lowest given one to twice the highest. If it holds for no number
    of partitions, the one that comes closest is recommended. `keys`: how many different keys the load has, if all
    records have one; more partitions than that are not recommended, because some would stay empty.
    """
    counts = _supported(counts, keys)
    worst = {count: _worst(count.partitions, members)[0] for count in counts}
    good = [count for count in counts if worst[count] <= MAX_EXCESS]
    return min(good or counts, key=lambda count: (0 if good else worst[count], count.partitions))


def _supported(counts: Sequence[PartitionCount], keys: int | None) -> list[PartitionCount]:
    """The numbers of partitions that so many keys can fill; the smallest one if they can fill none."""
    smallest = min(count.partitions for count in counts)
    return [
        count for count in counts if keys is None or count.partitions in (keys, smallest) or count.partitions < keys
    ]


def recommendation(
    counts: Sequence[PartitionCount],
    members: Sequence[int],
    steps: Sequence[MemberStep],
    keys: int | None = None,
    largest_key: tuple[str, float] | None = None,
) -> str:
    """The recommendation in some sentences, with the numbers that it is based on, and what the load supports: first, if
    the largest key, with its share of the load, is more than a member's.

    The recommended assignor is the one that moves the fewest partitions among those that spread them most evenly.
    """
    now, chosen = members[0], recommend(counts, members, keys)
    above, at = _worst(chosen.partitions, members)
    any_number = f"any number of members from {min(members)} to {2 * max(members)}"
    within = f"within {100 * MAX_EXCESS:.0f} % of even, by number of partitions, with {any_number}"
    at_worst = f" (at worst {format_percent(above)} more partitions than the mean, with {at})" if above else ""
    given = "given counts" if len(_supported(counts, keys)) == len(counts) else "given counts that the keys can fill"
    why = f"the smallest of the {given} that stays {within}{at_worst}"
    if above > MAX_EXCESS:
        why = f"the closest of the {given}, none of which stays {within}{at_worst}"
    if keys is not None and keys < chosen.partitions:
        why = "the smallest of the given counts, none of which the keys can fill"
    size = f"{format_bytes(chosen.bytes_mean)} per partition"
    if chosen.max_over_mean is not None:
        size += f" (the fullest has {chosen.max_over_mean:.2f} times that)"
    what = f"{_plural(chosen.partitions, 'partition')} for {_plural(now, 'member')}"
    first = f"{what}: {_each(chosen.partitions, now)}, {size}; {why}."
    next_steps = [s for s in steps if (s.partitions, s.before, s.after) == (chosen.partitions, now, now + 1)]
    next_steps.sort(key=lambda s: (max(s.most_partitions - s.fewest_partitions, 1), s.moves))
    moves = ", ".join(_moves(step, noun=step is next_steps[0]) for step in next_steps)
    use = f": use {next_steps[0].assignor}" if len(next_steps) > 1 else ""
    few_keys = ""
    if keys is not None and keys < max(count.partitions for count in counts):
        fill = f"{_plural(keys, 'different key')}, which {'fills' if keys == 1 else 'fill'}"
        then = "more would stay empty."
        if keys < chosen.partitions:
            empty = chosen.partitions - keys
            stay = f"at least {empty} of {chosen.partitions} {'stays' if empty == 1 else 'stay'} empty"
            then = f"{stay}. Compare lower numbers by --partitions."
        few_keys = f" The load has {fill} at most {_plural(keys, 'partition')}: {then}"
    if limit := _limit(largest_key, members):
        first = f"{limit}By numbers of partitions alone, {first}"
    return f"{first} Adding a {ordinal(now + 1)} moves {moves}{use}.{few_keys}"


def _limit(largest_key: tuple[str, float] | None, members: Sequence[int]) -> str:
    """What a single key makes of any number of partitions: with today's number of members, or the highest one."""
    key, share = largest_key or ("", 0.0)
    for count in (members[0], max(members)):
        if share * count > 1 + MAX_EXCESS:
            return (
                f"The key `{key}` alone has {format_percent(share)} of the bytes, all on one partition: with "
                f"{_plural(count, 'member')}, the fullest has at least {share * count:.1f} times the mean, however "
                "many partitions there are; only splitting the key helps. "
            )
    return ""


def _worst(partitions: int, members: Sequence[int]) -> tuple[float, int]:
    """How far the fullest member is above the mean in the worst case, and the number of members in that case."""
    counts = np.arange(min(members), 2 * max(members) + 1)
    above = -(-partitions // counts) * counts / partitions - 1
    return float(above.max()), int(counts[above.argmax()])


def _each(partitions: int, members: int) -> str:
    few, rest = divmod(partitions, members)
    if not few:
        return f"{members - partitions} of them idle"
    return f"{few} or {few + 1} each" if rest else f"{few} each"


def _moves(step: MemberStep, *, noun: bool) -> str:
    count = _plural(step.moves, "partition") if noun else f"{step.moves}"
    moved = f"{count} ({format_percent(step.fraction)}, {format_bytes(step.bytes_moved)})" if step.moves else "none"
    uneven = step.most_partitions - step.fewest_partitions > 1
    tail = f" (but leaves {step.fewest_partitions} to {step.most_partitions} on a member)" if uneven else ""
    return f"{moved} with {step.assignor}{tail}"


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def format_percent(fraction: float) -> str:
    return f"{100 * fraction:.1f} %"


def ordinal(n: int) -> str:
    teens = n % 100 in (11, 12, 13)
    return f"{n}{'th' if teens else {1: 'st', 2: 'nd', 3: 'rd'}.get(n % 10, 'th')}"


def format_bytes(size: float) -> str:
    """A size in a readable unit, in steps of 1000."""
    for unit, factor in (("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= 0.99995 * factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size:.0f} bytes"
