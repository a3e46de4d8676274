"""Assignors: (partitions, members, previous assignment) -> assignment. Pure, and deaf to the order of their inputs.

A member is entitled to its share of the partitions by weight, rounded down or up; with equal weights, sizes
differ by at most one. `assign` sorts, checks, picks the active members and balances each kind of topic apart;
what is left for an assignor is one page of its own idea.
"""

import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from shardyard.model import InvalidValue, Member, Partition, TopicKind, whole_number

Owners = dict[Partition, str]
Assignor = Callable[[Sequence[Partition], Sequence[Member], Mapping[Partition, str], Mapping[str, int]], Owners]
"""(sorted partitions, sorted members, previous owners, sizes so far from other kinds) -> owners."""


def assign(
    partitions: Iterable[Partition],
    members: Iterable[Member],
    previous: Mapping[Partition, str] | None = None,
    *,
    assignor: str = "sticky",
    kinds: Mapping[str, TopicKind] | None = None,
    max_active: int | None = None,
) -> Owners:
    """Give each partition an owner.

    `kinds` names the kind of a topic, where it is not normal: each kind is balanced by itself. `max_active` limits
    how many members own partitions: those that own the most already, then by name; the rest stand by. (`sticky` then
    moves the fewest for these members; with unequal weights, others might have kept more.) Without members the
    result is empty.
    """
    strategy = assignor_named(assignor)
    everyone = sorted(members)
    if twice := [name for name, count in Counter(m.name for m in everyone).items() if count > 1]:
        raise InvalidValue("members", twice[0], "every member name once")
    if not everyone:
        return {}
    previous = previous or {}
    by_kind: dict[TopicKind, list[Partition]] = defaultdict(list)
    for partition in sorted(set(partitions)):
        by_kind[(kinds or {}).get(partition.topic, TopicKind.NORMAL)].append(partition)
    valid = {p: previous[p] for group in by_kind.values() for p in group if p in previous}
    active = _active(everyone, valid, max_active)

    owners: Owners = {}
    sizes: Counter[str] = Counter()
    for kind in sorted(by_kind):
        dealt = strategy(by_kind[kind], active, valid, sizes)
        sizes.update(dealt.values())
        owners |= dealt
    return owners


def _active(members: Sequence[Member], previous: Mapping[Partition, str], max_active: int | None) -> list[Member]:
    if max_active is None or whole_number("max_active", max_active, at_least=1) >= len(members):
        return list(members)
    owned = Counter(previous.values())
    return sorted(sorted(members, key=lambda m: (-owned[m.name], m))[:max_active])


def _shares(
    total: int, members: Sequence[Member], sizes: Mapping[str, int], keen: Callable[[Member, int], bool]
) -> dict[str, int]:
    """How many of `total` partitions each member gets: its share rounded down, or up for as many as it takes.

    Rounded up are those who are `keen` (given the rounded-down share), then those who lose most by rounding, then
    those with the smallest size so far, then by name. A share that is whole is never rounded up.
    """
    weight_sum = sum(m.weight for m in members)
    down = {m.name: total * m.weight // weight_sum for m in members}
    loss = {m.name: total * m.weight % weight_sum for m in members}
    candidates = sorted(
        (m for m in members if loss[m.name]),
        key=lambda m: (not keen(m, down[m.name]), -loss[m.name], sizes.get(m.name, 0), m.name),
    )
    for member in candidates[: total - sum(down.values())]:
        down[member.name] += 1
    return down


def _deal(partitions: Iterable[Partition], room: Mapping[str, int]) -> Owners:
    """Deal the partitions in turn to the members that have room."""
    turn = deque((name, count) for name, count in sorted(room.items()) if count > 0)
    owners: Owners = {}
    for partition in partitions:
        name, count = turn.popleft()
        owners[partition] = name
        if count > 1:
            turn.append((name, count - 1))
    return owners


def sticky(
    partitions: Sequence[Partition],
    members: Sequence[Member],
    previous: Mapping[Partition, str],
    sizes: Mapping[str, int],
) -> Owners:
    """Shares are kept, and no more partitions move than that takes.

    Proof: a member keeps min(owned, share) partitions, and no assignment with these shares can keep more. Members
    who own more than their rounded-down share are rounded up first, so the sum of what is kept is the largest.
    """
    owned: dict[str, list[Partition]] = {m.name: [] for m in members}
    for partition in partitions:
        owner = previous.get(partition)
        if owner in owned:
            owned[owner].append(partition)
    shares = _shares(len(partitions), members, sizes, keen=lambda m, down: len(owned[m.name]) > down)
    owners: Owners = {}
    for name, share in shares.items():
        owners |= dict.fromkeys(_spread(owned[name])[:share], name)
    held = Counter(owners.values())
    free = (p for p in partitions if p not in owners)
    return owners | _deal(free, {name: share - held[name] for name, share in shares.items()})


def _spread(owned: Iterable[Partition]) -> list[Partition]:
    """First one partition of each topic, then a second of each...: who gives up the last ones keeps a mixture."""
    seen: Counter[str] = Counter()
    ranked = []
    for partition in owned:
        ranked.append((seen[partition.topic], partition))
        seen[partition.topic] += 1
    return [partition for _, partition in sorted(ranked)]


def even(
    partitions: Sequence[Partition],
    members: Sequence[Member],
    _previous: Mapping[Partition, str],
    sizes: Mapping[str, int],
) -> Owners:
    """CatMQ's: deal the partitions in turn, whoever had them before."""
    return _deal(partitions, _shares(len(partitions), members, sizes, keen=lambda _m, _down: False))


def contiguous(
    partitions: Sequence[Partition],
    members: Sequence[Member],
    _previous: Mapping[Partition, str],
    sizes: Mapping[str, int],
) -> Owners:
    """ADR-009's: a range of partitions for each member, in the order of their names."""
    shares = _shares(len(partitions), members, sizes, keen=lambda _m, _down: False)
    ranges = [m.name for m in members for _ in range(shares[m.name])]
    return dict(zip(partitions, ranges, strict=True))


def least_loaded(
    partitions: Sequence[Partition],
    members: Sequence[Member],
    previous: Mapping[Partition, str],
    sizes: Mapping[str, int],
) -> Owners:
    """RabbitMQ's: a partition stays where it is; a free one goes to the member with the fewest for its weight."""
    names = {m.name for m in members}
    owners = {p: previous[p] for p in partitions if previous.get(p) in names}
    held = Counter(owners.values())
    heap = [(held[m.name] / m.weight, sizes.get(m.name, 0), m.name, held[m.name], m.weight) for m in members]
    heapq.heapify(heap)
    for partition in partitions:
        if partition not in owners:
            _, size, name, count, weight = heap[0]
            owners[partition] = name
            heapq.heapreplace(heap, ((count + 1) / weight, size, name, count + 1, weight))
    return owners


ASSIGNORS: dict[str, Assignor] = {
    "sticky": sticky,
    "even": even,
    "contiguous": contiguous,
    "least_loaded": least_loaded,
}


def assignor_named(name: str) -> Assignor:
    """The assignor of that name."""
    try:
        return ASSIGNORS[name]
    except KeyError:
        raise InvalidValue("assignor", name, "one of " + ", ".join(ASSIGNORS)) from None
