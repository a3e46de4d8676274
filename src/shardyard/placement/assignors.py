"""Assignors: pure functions from (partitions, members, previous assignment) to an assignment.

The result does not depend on the order of the inputs. Each member is entitled to a share of the partitions in
proportion to its weight, rounded down or up; with equal weights, sizes differ by at most one. Only `least_loaded` may
exceed that, because it never moves a partition. `assign` sorts and validates the input, picks the active members and
balances each kind of topic separately, so that an assignor contains nothing but its own strategy.
"""

import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from shardyard.model import InvalidValue, Member, Partition, TopicKind, whole_number

Owners = dict[Partition, str]
Assignor = Callable[[Sequence[Partition], Sequence[Member], Mapping[Partition, str], Mapping[str, int]], Owners]
"""(sorted partitions, sorted members, previous owners, partitions each member has of other kinds) -> owners."""


def assign(
    partitions: Iterable[Partition],
    members: Iterable[Member],
    previous: Mapping[Partition, str] | None = None,
    *,
    assignor: str = "sticky",
    kinds: Mapping[str, TopicKind] | None = None,
    max_active: int | None = None,
) -> Owners:
    """Give each partition an owner. Without members the result is empty.

    `previous` holds the current owners; partitions and members that no longer exist are ignored. `kinds` holds the
    kind of each topic that is not normal; each kind is balanced separately. `max_active` limits how many members own
    partitions, preferring those that already own the most, then by name; the others are on standby. (`sticky` moves
    the fewest partitions for the members chosen; with unequal weights, other members might have kept more.)
    """
    strategy = assignor_named(assignor)
    all_members = sorted(members)
    if duplicates := [name for name, count in Counter(m.name for m in all_members).items() if count > 1]:
        raise InvalidValue("members", duplicates[0], "every member name only once")
    if not all_members:
        return {}
    previous = previous or {}
    by_kind: dict[TopicKind, list[Partition]] = defaultdict(list)
    for partition in sorted(set(partitions)):
        by_kind[(kinds or {}).get(partition.topic, TopicKind.NORMAL)].append(partition)
    existing = {p: previous[p] for of_kind in by_kind.values() for p in of_kind if p in previous}
    active = _active(all_members, existing, max_active)

    owners: Owners = {}
    sizes: Counter[str] = Counter()
    for kind in sorted(by_kind):
        assigned = strategy(by_kind[kind], active, existing, sizes)
        sizes.update(assigned.values())
        owners |= assigned
    return owners


def _active(members: Sequence[Member], previous: Mapping[Partition, str], max_active: int | None) -> list[Member]:
    if max_active is None or whole_number("max_active", max_active, at_least=1) >= len(members):
        return list(members)
    owned = Counter(previous.values())
    return sorted(sorted(members, key=lambda m: (-owned[m.name], m))[:max_active])


def _shares(
    total: int, members: Sequence[Member], sizes: Mapping[str, int], round_up_first: Callable[[Member, int], bool]
) -> dict[str, int]:
    """How many of `total` partitions each member gets: its share, rounded down or up so that they add up to `total`.

    Members for which `round_up_first` is true (given their rounded-down share) are rounded up first, then those with
    the largest remainder, then those with the fewest partitions of other kinds, then by name. An integer share is
    never rounded up.
    """
    weight_sum = sum(m.weight for m in members)
    shares = {m.name: total * m.weight // weight_sum for m in members}
    remainders = {m.name: total * m.weight % weight_sum for m in members}
    candidates = sorted(
        (m for m in members if remainders[m.name]),
        key=lambda m: (not round_up_first(m, shares[m.name]), -remainders[m.name], sizes.get(m.name, 0), m.name),
    )
    for member in candidates[: total - sum(shares.values())]:
        shares[member.name] += 1
    return shares


def _distribute(partitions: Iterable[Partition], capacity: Mapping[str, int]) -> Owners:
    """Distribute the partitions round-robin over the members that have capacity left."""
    rotation = deque((name, count) for name, count in sorted(capacity.items()) if count > 0)
    owners: Owners = {}
    for partition in partitions:
        name, count = rotation.popleft()
        owners[partition] = name
        if count > 1:
            rotation.append((name, count - 1))
    return owners


def sticky(
    partitions: Sequence[Partition],
    members: Sequence[Member],
    previous: Mapping[Partition, str],
    sizes: Mapping[str, int],
) -> Owners:
    """Give every member its share while moving as few partitions as possible.

    Proof: a member keeps min(owned, share) partitions, and no assignment with these shares can keep more. Members
    that own more than their rounded-down share are rounded up first, so the number of partitions kept is maximal.
    """
    owned: dict[str, list[Partition]] = {m.name: [] for m in members}
    for partition in partitions:
        owner = previous.get(partition)
        if owner in owned:
            owned[owner].append(partition)
    shares = _shares(len(partitions), members, sizes, round_up_first=lambda m, share: len(owned[m.name]) > share)
    owners: Owners = {}
    for name, share in shares.items():
        owners |= dict.fromkeys(_interleave_topics(owned[name])[:share], name)
    kept = Counter(owners.values())
    free = (p for p in partitions if p not in owners)
    return owners | _distribute(free, {name: share - kept[name] for name, share in shares.items()})


def _interleave_topics(owned: Iterable[Partition]) -> list[Partition]:
    """The first partition of each topic, then the second of each, and so on.

    A member that keeps the beginning of this list keeps partitions of as many topics as possible.
    """
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
    """Distribute the partitions round-robin, ignoring the previous owners."""
    return _distribute(partitions, _shares(len(partitions), members, sizes, round_up_first=lambda _m, _share: False))


def contiguous(
    partitions: Sequence[Partition],
    members: Sequence[Member],
    _previous: Mapping[Partition, str],
    sizes: Mapping[str, int],
) -> Owners:
    """Give each member one contiguous range of the sorted partitions, in the order of the members' names."""
    shares = _shares(len(partitions), members, sizes, round_up_first=lambda _m, _share: False)
    names = [m.name for m in members for _ in range(shares[m.name])]
    return dict(zip(partitions, names, strict=True))


def least_loaded(
    partitions: Sequence[Partition],
    members: Sequence[Member],
    previous: Mapping[Partition, str],
    sizes: Mapping[str, int],
) -> Owners:
    """Leave every owned partition with its owner; a free one goes to the member with the fewest for its weight.

    RabbitMQ's sharding plugin does the same when it attaches a consumer to the shard with the fewest consumers.
    """
    names = {m.name for m in members}
    owners = {p: previous[p] for p in partitions if previous.get(p) in names}
    owned = Counter(owners.values())
    heap = [(owned[m.name] / m.weight, sizes.get(m.name, 0), m.name, owned[m.name], m.weight) for m in members]
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
    """Return the assignor with this name."""
    try:
        return ASSIGNORS[name]
    except KeyError:
        raise InvalidValue("assignor", name, "one of " + ", ".join(ASSIGNORS)) from None
