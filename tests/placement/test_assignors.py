"""Invariants of all assignors over generated inputs, and `sticky` compared with the optimum."""

import itertools
import random
from collections import Counter
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardyard.model import InvalidValue, Member, Partition, TopicKind
from shardyard.placement import ASSIGNORS, assign, plan

Owners = Mapping[Partition, str]

member_strategy = st.builds(Member, st.sampled_from("abcdefghij"), st.integers(1, 4))
members_strategy = st.lists(member_strategy, min_size=1, unique_by=lambda m: m.name)
topics_strategy = st.dictionaries(st.sampled_from(["t", "u", "t.retry", "u.retry"]), st.integers(1, 20), min_size=1)
KINDS = {"t.retry": TopicKind.RETRY, "u.retry": TopicKind.RETRY}


def partitions_of(topics: Mapping[str, int]) -> list[Partition]:
    return [Partition(topic, i) for topic, count in topics.items() for i in range(count)]


def equal_members(names: str) -> list[Member]:
    return [Member(name) for name in names]


def sizes(owners: Owners, members: list[Member]) -> list[int]:
    held = Counter(owners.values())
    return [held[m.name] for m in members]


@st.composite
def situations(draw: st.DrawFn) -> tuple[list[Partition], list[Member], dict[Partition, str]]:
    """Partitions, members, and an arbitrary previous assignment: uneven, with members and partitions that are gone."""
    partitions = partitions_of(draw(topics_strategy))
    previous = draw(
        st.dictionaries(st.sampled_from([*partitions, Partition("gone", 0)]), st.sampled_from("abcdefghijxy"))
    )
    return partitions, draw(members_strategy), previous


@pytest.mark.parametrize("assignor", ASSIGNORS)
@given(situation=situations(), seed=st.integers())
def test_every_partition_gets_an_owner_whatever_the_order_of_the_inputs(
    assignor: str, situation: tuple[list[Partition], list[Member], dict[Partition, str]], seed: int
) -> None:
    partitions, members, previous = situation
    owners = assign(partitions, members, previous, assignor=assignor, kinds=KINDS)
    assert set(owners) == set(partitions)
    assert set(owners.values()) <= {m.name for m in members}

    shuffle = random.Random(seed).sample
    again = assign(
        shuffle(partitions, len(partitions)),
        shuffle(members, len(members)),
        dict(shuffle(list(previous.items()), len(previous))),
        assignor=assignor,
        kinds=KINDS,
    )
    assert again == owners


@pytest.mark.parametrize("assignor", ["sticky", "even", "contiguous"])
@given(situation=situations())
def test_each_kind_is_distributed_by_weight_to_within_one_partition(
    assignor: str, situation: tuple[list[Partition], list[Member], dict[Partition, str]]
) -> None:
    partitions, members, previous = situation
    owners = assign(partitions, members, previous, assignor=assignor, kinds=KINDS)
    for kind in TopicKind:
        of_kind = {p: o for p, o in owners.items() if KINDS.get(p.topic, TopicKind.NORMAL) == kind}
        for member, size in zip(members, sizes(of_kind, members), strict=True):
            share = len(of_kind) * member.weight / sum(m.weight for m in members)
            assert abs(size - share) < 1


@given(situation=situations())
def test_sticky_changes_nothing_when_nothing_changed(
    situation: tuple[list[Partition], list[Member], dict[Partition, str]],
) -> None:
    partitions, members, previous = situation
    settled = assign(partitions, members, previous, kinds=KINDS)
    assert assign(partitions, members, settled, kinds=KINDS) == settled


def fewest_moves_by_brute_force(
    partitions: list[Partition], members: list[Member], previous: Owners, max_active: int
) -> int:
    names = [m.name for m in members]
    best = len(partitions)
    active_sets = itertools.combinations(names, min(max_active, len(names)))
    for active in active_sets:
        for owners in itertools.product(active, repeat=len(partitions)):
            held = [owners.count(name) for name in active]
            if max(held) - min(held) <= 1:
                moves = plan(
                    {p: o for p, o in previous.items() if p in partitions}, dict(zip(partitions, owners, strict=True))
                )
                best = min(best, len(moves.moves))
    return best


@given(
    count=st.integers(1, 6),
    names=st.sets(st.sampled_from("abcd"), min_size=1, max_size=3),
    data=st.data(),
    max_active=st.integers(1, 4),
)
def test_sticky_moves_exactly_the_fewest_by_brute_force(
    count: int, names: set[str], data: st.DataObject, max_active: int
) -> None:
    """Weights are equal here; the test with unequal weights, below, does not limit the active members."""
    partitions = partitions_of({"t": count})
    members = equal_members("".join(sorted(names)))
    previous = data.draw(st.dictionaries(st.sampled_from(partitions), st.sampled_from("abcd")))
    owners = assign(partitions, members, previous, max_active=max_active)
    moves = len(plan(previous, owners).moves)
    assert moves == fewest_moves_by_brute_force(partitions, members, previous, max_active)


@given(count=st.integers(1, 6), data=st.data())
def test_sticky_moves_exactly_the_fewest_that_keep_shares_by_weight(count: int, data: st.DataObject) -> None:
    partitions = partitions_of({"t": count})
    members = data.draw(st.lists(member_strategy, min_size=1, max_size=3, unique_by=lambda m: m.name))
    previous = data.draw(
        st.dictionaries(st.sampled_from(partitions), st.sampled_from([m.name for m in members] + ["x"]))
    )
    weights = sum(m.weight for m in members)
    fewest = min(
        len(plan(previous, dict(zip(partitions, owners, strict=True))).moves)
        for owners in itertools.product([m.name for m in members], repeat=count)
        if all(abs(owners.count(m.name) - count * m.weight / weights) < 1 for m in members)
    )
    assert len(plan(previous, assign(partitions, members, previous)).moves) == fewest


def test_a_member_that_releases_partitions_keeps_some_of_every_topic() -> None:
    partitions = partitions_of({"t": 3, "u": 3})
    after = assign(partitions, equal_members("ab"), dict.fromkeys(partitions, "a"))
    assert Counter(p.topic for p, owner in after.items() if owner == "a") == {"t": 2, "u": 1}


def test_the_member_with_the_largest_remainder_is_rounded_up() -> None:
    members = [Member("a", 1), Member("b", 4)]
    assert sizes(assign(partitions_of({"t": 6}), members), members) == [1, 5]


def test_deleted_partitions_do_not_make_a_member_active() -> None:
    previous = {Partition("gone", 0): "b", Partition("gone", 1): "b", Partition("t", 0): "a"}
    assert set(assign(partitions_of({"t": 2}), equal_members("ab"), previous, max_active=1).values()) == {"a"}


def test_least_loaded_goes_by_weight_and_then_by_partitions_of_other_kinds() -> None:
    members = [Member("a", 1), Member("b", 3)]
    assert sizes(assign(partitions_of({"t": 8}), members, assignor="least_loaded"), members) == [2, 6]
    owners = assign(partitions_of({"t": 3, "t.retry": 3}), equal_members("ab"), assignor="least_loaded", kinds=KINDS)
    assert sizes(owners, equal_members("ab")) == [3, 3]


@given(count=st.integers(1, 400), before=st.integers(1, 60), after=st.integers(1, 60), seed=st.integers())
def test_sticky_moves_the_lower_bound_from_any_assignment_on_large_cases(
    count: int, before: int, after: int, seed: int
) -> None:
    """The bound: the `up` members that own the most keep up to `down` + 1 partitions each, the others up to `down`."""
    rng = random.Random(seed)
    partitions = partitions_of({"t": count})
    members = [Member(f"m{i}") for i in range(after)]
    previous = {p: f"m{rng.randrange(before)}" for p in partitions if rng.random() < 0.95}
    held = sorted((list(previous.values()).count(m.name) for m in members), reverse=True)
    down, up = divmod(count, after)
    most_kept = sum(min(h, down + (rank < up)) for rank, h in enumerate(held))
    owners = assign(partitions, members, previous)
    assert max(sizes(owners, members)) - min(sizes(owners, members)) <= 1
    assert len(plan(previous, owners).moves) == len(previous) - most_kept


@pytest.mark.parametrize(("before", "after", "contiguous", "sticky"), [(16, 17, 120, 15), (31, 32, 220, 8)])
def test_adding_a_worker_to_256_partitions_moves_only_what_the_new_worker_needs_with_sticky(
    before: int, after: int, contiguous: int, sticky: int
) -> None:
    partitions = partitions_of({"fanout": 256})
    moved = {}
    for assignor in ("contiguous", "sticky"):
        old = assign(partitions, [Member(f"w{i:02}") for i in range(before)], assignor=assignor)
        new = assign(partitions, [Member(f"w{i:02}") for i in range(after)], old, assignor=assignor)
        moved[assignor] = len(plan(old, new).moves)
    assert moved == {"contiguous": contiguous, "sticky": sticky}


def test_three_members_share_six_partitions_and_when_one_leaves_only_its_partitions_move() -> None:
    partitions = partitions_of({"t": 6})
    three = assign(partitions, equal_members("abc"))
    assert sizes(three, equal_members("abc")) == [2, 2, 2]
    two = assign(partitions, equal_members("ab"), three)
    assert sizes(two, equal_members("ab")) == [3, 3]
    assert {m.source for m in plan(three, two).moves} == {"c"}


def test_retry_partitions_do_not_pile_up_on_one_member() -> None:
    """Distributed together with the normal partitions, both retry partitions could go to the same member."""
    partitions = partitions_of({"t": 2, "t.retry": 2})
    for assignor in ("sticky", "even", "contiguous"):
        owners = assign(partitions, equal_members("ab"), assignor=assignor, kinds=KINDS)
        for topic in ("t", "t.retry"):
            assert sizes({p: o for p, o in owners.items() if p.topic == topic}, equal_members("ab")) == [1, 1]


def test_the_odd_partition_of_each_kind_goes_to_different_members() -> None:
    owners = assign(partitions_of({"t": 3, "t.retry": 3}), equal_members("ab"), kinds=KINDS)
    assert sizes(owners, equal_members("ab")) == [3, 3]


def test_members_beyond_max_active_stand_by_and_owners_are_not_displaced() -> None:
    partitions = partitions_of({"t": 6})
    before = assign(partitions, equal_members("cd"), max_active=2)
    assert assign(partitions, equal_members("abcd"), before, max_active=2) == before
    after = assign(partitions, equal_members("abd"), before, max_active=2)
    assert sizes(after, equal_members("abd")) == [3, 0, 3]


def test_least_loaded_moves_no_partition_and_gives_free_ones_to_the_member_with_the_fewest() -> None:
    partitions = partitions_of({"t": 4})
    previous = {partitions[0]: "a", partitions[1]: "a"}
    owners = assign(partitions, equal_members("abc"), previous, assignor="least_loaded")
    assert [owners[p] for p in partitions] == ["a", "a", "b", "c"]


def test_contiguous_gives_each_member_one_range() -> None:
    partitions = partitions_of({"t": 10})
    owners = assign(partitions, equal_members("abc"), assignor="contiguous")
    assert [owners[p] for p in partitions] == list("aaaabbbccc")


def test_without_members_no_partition_has_an_owner() -> None:
    assert assign(partitions_of({"t": 3}), []) == {}


def test_duplicate_member_names_are_refused() -> None:
    with pytest.raises(InvalidValue, match="members is 'a': expected every member name only once"):
        assign(partitions_of({"t": 3}), [Member("a"), Member("a", 2)])


def test_an_unknown_assignor_is_refused() -> None:
    with pytest.raises(InvalidValue, match="'random': expected one of sticky, even, contiguous, least_loaded"):
        assign(partitions_of({"t": 3}), equal_members("a"), assignor="random")


@pytest.mark.parametrize("bad", [0, -1, 1.5])
def test_max_active_must_be_an_integer_of_at_least_1(bad: int) -> None:
    with pytest.raises(InvalidValue, match="max_active is"):
        assign(partitions_of({"t": 3}), equal_members("ab"), max_active=bad)
