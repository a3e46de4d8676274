"""Spreading consumers over shards: a pure function of shards, consumers, and where the consumers were before.

Each consumer has one active shard of its own; the numbers of consumers per shard differ by at most one. Shards
that nobody has as their own, and those that are draining, are covered by consumers in addition, so that every shard is
read. Of those that were attached before, as few as possible move.
"""

import heapq
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Spread:
    """Who reads which shard."""

    own: Mapping[str, str] = field(default_factory=dict)
    """The own shard of each consumer. One for which there is no shard is not in it."""
    covered_by: Mapping[str, str] = field(default_factory=dict)
    """For each shard that is read in addition, the consumer that does."""


NOBODY = Spread()


def spread(
    active: Collection[str],
    draining: Collection[str],
    consumers: Sequence[str],
    previous: Spread = NOBODY,
    allowed: Mapping[str, Collection[str]] | None = None,
) -> Spread:
    """Spread consumers over shards.

    `consumers`: in the order in which they were attached. A new one gets the active shard with the fewest, and of
    several the first by name; where one has to move, it is the one that was attached last. `allowed`: the shards of
    consumers that may not read all of them; then the numbers are as even as that permits, and a shard that nobody may
    read is not read.
    """
    allowed = allowed or {}
    shards = sorted(active)
    own = _balanced(consumers, shards, previous.own, allowed)
    served = set(own.values())
    unserved = [*(shard for shard in shards if shard not in served), *sorted(draining)]
    readers: dict[str, Collection[str]] = {}
    if allowed:
        readers = {s: [c for c in consumers if c not in allowed or s in allowed[c]] for s in unserved}
    return Spread(own, _balanced(unserved, list(consumers), previous.covered_by, readers))


def _balanced(
    items: Sequence[str], bins: Sequence[str], previous: Mapping[str, str], allowed: Mapping[str, Collection[str]]
) -> dict[str, str]:
    """Put each item into a bin, as evenly as possible, and move as few of the previous ones as possible.

    Bins that come first get more, where there is a choice. `allowed`: the bins of items that may not go into all.
    """
    contents = _kept(items, bins, previous, allowed)
    placed = {item for inside in contents.values() for item in inside}
    _place([item for item in items if item not in placed], contents, allowed)
    if allowed:
        _level_by_paths(contents, allowed)
    else:
        _level(contents)
    places = {item: name for name, inside in contents.items() for item in inside}
    return {item: places[item] for item in items if item in places}


def _kept(
    items: Sequence[str], bins: Sequence[str], previous: Mapping[str, str], allowed: Mapping[str, Collection[str]]
) -> dict[str, list[str]]:
    """The items that can stay where they were."""
    contents: dict[str, list[str]] = {name: [] for name in bins}
    for item in items:
        before = previous.get(item)
        if before in contents and (item not in allowed or before in allowed[item]):
            contents[before].append(item)
    return contents


def _place(new: Sequence[str], contents: dict[str, list[str]], allowed: Mapping[str, Collection[str]]) -> None:
    """Put each new item where the fewest are; those with the least choice first."""
    order = {name: index for index, name in enumerate(contents)}
    for item in new:
        candidates = [name for name in allowed[item] if name in contents] if item in allowed else []
        if candidates:
            contents[min(candidates, key=lambda name: (len(contents[name]), order[name]))].append(item)
    heap = [(len(inside), order[name], name) for name, inside in contents.items()]
    heapq.heapify(heap)
    for item in new:
        if item not in allowed and heap:
            count, index, name = heap[0]
            contents[name].append(item)
            heapq.heapreplace(heap, (count + 1, index, name))


def _level(contents: dict[str, list[str]]) -> None:
    """Move items from the fullest bins to the emptiest ones, until their numbers differ by at most one. A bin gives
    items or gets some, never both, so a heap of either kind is enough."""
    fullest = [(-len(inside), index, name) for index, (name, inside) in enumerate(contents.items())]
    emptiest = [(len(inside), index, name) for index, (name, inside) in enumerate(contents.items())]
    heapq.heapify(fullest)
    heapq.heapify(emptiest)
    while contents and -fullest[0][0] - emptiest[0][0] >= 2:
        most, from_index, source = fullest[0]
        least, to_index, target = emptiest[0]
        contents[target].append(contents[source].pop())
        heapq.heapreplace(fullest, (most + 1, from_index, source))
        heapq.heapreplace(emptiest, (least + 1, to_index, target))


def _level_by_paths(contents: dict[str, list[str]], allowed: Mapping[str, Collection[str]]) -> None:
    """The same if items may not go into all bins: one can make room for another by moving on."""
    while path := _path(contents, allowed):
        for source, target in path:
            moved = next(i for i in reversed(contents[source]) if i not in allowed or target in allowed[i])
            contents[source].remove(moved)
            contents[target].append(moved)


def _path(contents: Mapping[str, list[str]], allowed: Mapping[str, Collection[str]]) -> list[tuple[str, str]]:
    """Moves from bin to bin, in the order in which they are to be made, by which the first of the fullest bins has one
    item less, and one with at least two items less has one more. Empty if no such moves make it more even."""
    if not contents:
        return []
    counts = {name: len(inside) for name, inside in contents.items()}
    least = min(counts.values())
    for source in sorted(counts, key=lambda name: -counts[name]):
        if counts[source] - least < 2:
            return []
        came_from = _reachable(source, contents, allowed)
        target = min(came_from, key=lambda name: counts[name], default=source)
        if counts[source] - counts[target] >= 2:
            path = []
            while target != source:
                path.append((came_from[target], target))
                target = came_from[target]
            return path  # from the end, so that no bin gives away what it just got
    return []


def _reachable(
    source: str, contents: Mapping[str, list[str]], allowed: Mapping[str, Collection[str]]
) -> dict[str, str]:
    """The bins that items can be moved on to from `source`, each with the bin before it on a shortest way."""
    came_from: dict[str, str] = {}
    choices: set[frozenset[str] | None] = set()
    by_choice: defaultdict[str, list[frozenset[str] | None]] = defaultdict(list)
    for name, inside in contents.items():
        by_choice[name] = list({frozenset(allowed[item]) if item in allowed else None for item in inside})
    waiting = [source]
    for name in waiting:  # it grows on the way
        for choice in by_choice[name]:
            if choice not in choices:
                choices.add(choice)
                for target in contents if choice is None else sorted(choice & contents.keys()):
                    if target != source and target not in came_from:
                        came_from[target] = name
                        waiting.append(target)
    return came_from
