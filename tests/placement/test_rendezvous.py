"""Weighted rendezvous hashing: stable, in proportion to weights, and few keys move."""

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardyard.model import InvalidValue
from shardyard.placement.rendezvous import Rendezvous

KEYS = [f"key-{n}" for n in range(3000)]
weights_of_targets = st.dictionaries(
    st.text("abcdef", min_size=1, max_size=3), st.integers(1, 4), min_size=1, max_size=8
)


def placed(weights: dict[str, int], keys: list[str] = KEYS) -> list[str]:
    rendezvous = Rendezvous(weights)
    return [rendezvous.targets[place] for place in rendezvous.place_array(pa.array(keys)).tolist()]


@given(weights=weights_of_targets, keys=st.lists(st.text(max_size=20), min_size=1, max_size=20))
def test_keys_are_placed_alike_one_by_one_and_together(weights: dict[str, int], keys: list[str]) -> None:
    rendezvous = Rendezvous(weights)
    assert [rendezvous.place(key) for key in keys] == rendezvous.place_array(pa.array(keys, pa.string())).tolist()


@given(weights=weights_of_targets, name=st.text("ghi", min_size=1, max_size=3), weight=st.integers(1, 4))
def test_a_target_that_comes_or_goes_moves_only_its_own_keys(weights: dict[str, int], name: str, weight: int) -> None:
    without, with_it = placed(weights, KEYS[:300]), placed({**weights, name: weight}, KEYS[:300])
    assert all(after in (before, name) for before, after in zip(without, with_it, strict=True))


@given(weights=weights_of_targets)
def test_a_target_that_gets_a_higher_weight_only_gains_keys(weights: dict[str, int]) -> None:
    name = min(weights)
    before, after = placed(weights, KEYS[:300]), placed({**weights, name: weights[name] + 1}, KEYS[:300])
    assert all(new in (old, name) for old, new in zip(before, after, strict=True))


def test_a_target_gets_keys_in_proportion_to_its_weight() -> None:
    found = placed({"a": 1, "b": 2, "c": 3})
    for name, share in (("a", 500), ("b", 1000), ("c", 1500)):
        assert abs(found.count(name) - share) < 100


def test_the_places_of_keys_stay_as_they_are_from_release_to_release() -> None:
    """Messages of a key must find the queue of those before them."""
    assert placed({"a": 1, "b": 2, "c": 1}, KEYS[:12]) == EXPECTED


@pytest.mark.parametrize("weights", [{}, {"a": 0}, {"a": -1}, {"a": 1.5}])
def test_weights_are_whole_numbers_of_at_least_1(weights: dict[str, int]) -> None:
    with pytest.raises(InvalidValue):
        Rendezvous(weights)


EXPECTED = ["c", "a", "a", "a", "b", "b", "c", "c", "b", "b", "b", "c"]
