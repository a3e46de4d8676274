"""Consumers over shards: even, every shard read, few moves, whatever came before."""

from collections import Counter
from collections.abc import Collection, Mapping
from itertools import product
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardyard.placement import spread as spreading
from shardyard.placement.spread import NOBODY, Spread, spread

SHARDS = [f"s{n}" for n in range(6)]
CONSUMERS = [f"c{n}" for n in range(9)]

some_shards = st.sets(st.sampled_from(SHARDS))
some_consumers = st.lists(st.sampled_from(CONSUMERS), unique=True)
any_previous = st.builds(
    Spread,
    st.dictionaries(st.sampled_from(CONSUMERS), st.sampled_from([*SHARDS, "gone"])),
    st.dictionaries(st.sampled_from([*SHARDS, "gone"]), st.sampled_from(CONSUMERS)),
)
restrictions = st.dictionaries(
    st.sampled_from(CONSUMERS), st.frozensets(st.sampled_from([*SHARDS, "gone"]), max_size=4)
)


def counts(result: Spread, shards: Collection[str]) -> list[int]:
    found = Counter(result.own.values())
    return [found[shard] for shard in sorted(shards)]


@given(some_shards, some_shards, some_consumers, any_previous)
def test_counts_are_within_one_and_every_shard_is_read(
    active: set[str], draining: set[str], consumers: list[str], previous: Spread
) -> None:
    draining -= active
    result = spread(active, draining, consumers, previous)
    assert set(result.own) == (set(consumers) if active else set())
    found = counts(result, active)
    assert not found or max(found) - min(found) <= 1
    if consumers:
        assert set(result.own.values()) | set(result.covered_by) == active | draining
        assert not set(result.own.values()) & set(result.covered_by)
        covers = Counter(result.covered_by.values())
        assert set(covers) <= set(consumers)
        assert max(covers[c] for c in consumers) - min(covers[c] for c in consumers) <= 1


@given(some_shards, some_shards, some_consumers, any_previous)
def test_no_even_spread_moves_fewer_consumers_or_covers(
    active: set[str], draining: set[str], consumers: list[str], previous: Spread
) -> None:
    draining -= active
    result = spread(active, draining, consumers, previous)
    assert moved(consumers, active, previous.own, result.own) == fewest_moves(consumers, active, previous.own)
    unserved = (active | draining) - set(result.own.values())
    if consumers:
        expected = fewest_moves(list(unserved), set(consumers), previous.covered_by)
        assert moved(list(unserved), set(consumers), previous.covered_by, result.covered_by) == expected


def moved(items: list[str], bins: set[str], before: Mapping[str, str], after: Mapping[str, str]) -> int:
    return sum(before.get(item) in bins and before[item] != after.get(item) for item in items)


def fewest_moves(items: list[str], bins: set[str], before: Mapping[str, str]) -> int:
    """What is above the share of its bin has to move. As many shares as possible of full bins are rounded up."""
    if not bins:
        return 0
    sizes = sorted(Counter(before[item] for item in items if before.get(item) in bins).values(), reverse=True)
    share, rest = divmod(len(items), len(bins))
    return sum(max(size - share - (rank < rest), 0) for rank, size in enumerate(sizes))


@given(some_shards, some_consumers, any_previous, restrictions)
def test_restricted_consumers_are_spread_as_evenly_as_it_is_possible(
    active: set[str], consumers: list[str], previous: Spread, allowed: dict[str, frozenset[str]]
) -> None:
    consumers, active = consumers[:5], set(sorted(active)[:4])
    result = spread(active, (), consumers, previous, allowed)
    choices = {c: (active & allowed[c] if c in allowed else active) for c in consumers}
    assert set(result.own) == {c for c in consumers if choices[c]}
    assert all(shard in choices[c] for c, shard in result.own.items())
    possible = product(*(sorted(choices[c]) for c in consumers if choices[c]))
    best = min(sum(n * n for n in Counter(places).values()) for places in possible)
    assert sum(n * n for n in Counter(result.own.values()).values()) == best


@given(some_shards, some_shards, some_consumers, any_previous, restrictions)
def test_restricted_consumers_cover_only_what_they_may_and_all_that_can_be(
    active: set[str], draining: set[str], consumers: list[str], previous: Spread, allowed: dict[str, frozenset[str]]
) -> None:
    draining -= active
    result = spread(active, draining, consumers, previous, allowed)
    assert all(c not in allowed or shard in allowed[c] for shard, c in result.covered_by.items())
    for shard in (active | draining) - set(result.own.values()):
        can_be_read = any(c not in allowed or shard in allowed[c] for c in consumers)
        assert (shard in result.covered_by) == can_be_read


@given(some_shards, some_shards, some_consumers, any_previous, restrictions, st.randoms())
def test_the_result_is_stable_and_does_not_depend_on_the_order_of_shards(
    active: set[str],
    draining: set[str],
    consumers: list[str],
    previous: Spread,
    allowed: dict[str, frozenset[str]],
    random: Random,
) -> None:
    draining -= active
    result = spread(active, draining, consumers, previous, allowed)
    shuffled = sorted(active)
    random.shuffle(shuffled)
    assert spread(shuffled, draining, consumers, previous, allowed) == result
    assert spread(active, draining, consumers, result, allowed) == result, "what is even stays as it is"


def test_the_consume_interceptor_counts_1_0_0_then_1_1_0_then_1_1_1_then_2_1_1() -> None:
    previous, found = NOBODY, []
    for number in range(1, 5):
        previous = spread(SHARDS[:3], (), CONSUMERS[:number], previous)
        found.append(counts(previous, SHARDS[:3]))
    assert found == [[1, 0, 0], [1, 1, 0], [1, 1, 1], [2, 1, 1]]


def test_a_single_consumer_reads_all_shards() -> None:
    result = spread(SHARDS[:4], ["old"], ["c"])
    assert result.own == {"c": "s0"}
    assert result.covered_by == {"s1": "c", "s2": "c", "s3": "c", "old": "c"}


def test_when_a_consumer_leaves_its_shard_is_covered_and_the_last_that_came_moves() -> None:
    before = spread(SHARDS[:2], (), ["a", "b", "c", "d"])
    assert before.own == {"a": "s0", "b": "s1", "c": "s0", "d": "s1"}
    after = spread(SHARDS[:2], (), ["a", "c"], before)
    assert after.own == {"a": "s0", "c": "s1"}


@pytest.mark.parametrize("shards", [1, 8, 64])
def test_1000_consumers_are_spread_evenly(shards: int) -> None:
    names = [f"s{n:02}" for n in range(shards)]
    found = counts(spread(names, (), [f"c{n}" for n in range(1000)]), names)
    assert max(found) - min(found) <= 1


def test_consumers_that_may_read_all_shards_are_moved_without_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is a search for each move otherwise, through all consumers: seconds, with 10 000 of them."""
    consumers = [f"c{n}" for n in range(10_000)]
    shards = [f"s{n:02}" for n in range(64)]
    before = spread(shards[:1], (), consumers)
    monkeypatch.delattr(spreading, "_reachable")
    found = counts(spread(shards, (), consumers, before), shards)
    assert found == [157] * 16 + [156] * 48
