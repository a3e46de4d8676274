"""The acknowledgement state against a plain set."""

import contextlib
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardyard.model import Damaged
from shardyard.sharding.ack_state import AckState

OFFSETS = st.integers(0, 60)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("settle"), st.lists(OFFSETS, max_size=8)),
        st.tuples(st.just("range"), st.tuples(OFFSETS, OFFSETS)),
        st.tuples(st.just("count"), OFFSETS),
        st.tuples(st.just("store"), st.none()),
        st.tuples(st.just("merge"), st.none()),
    ),
    max_size=30,
)


@given(STEPS, st.integers(0, 10))
def test_it_knows_what_a_set_knows(steps: list[tuple[str, object]], floor: int) -> None:
    state, settled, counts = AckState(floor), set(range(floor)), dict[int, int]()
    for step, argument in steps:
        match step, argument:
            case "settle", list(offsets):
                state.settle(offsets)
                settled |= set(offsets)
            case "range", (int(start), int(stop)):
                state.settle_range(start, stop)
                settled |= set(range(start, stop))
            case "count", int(offset):
                if offset not in settled:
                    state.counts[offset] = counts[offset] = counts.get(offset, 0) + 1
            case "store", _:
                state = AckState.decode(state.encode(), "here")
            case _:
                state.merge()
    state.merge()
    assert [offset for offset in range(80) if state.is_settled(offset)] == sorted(settled)
    assert state.floor == next(offset for offset in range(100) if offset not in settled)
    ranges = state.ranges()
    assert all(start < stop for start, stop in ranges)
    assert all(a[1] < b[0] for a, b in pairwise(ranges)), "ranges touch"
    assert not ranges or ranges[0][0] > state.floor
    assert state.counts == {offset: count for offset, count in counts.items() if offset not in settled}


@given(st.lists(OFFSETS, unique=True), st.booleans(), st.integers(0, 100))
def test_what_is_stored_is_what_is_loaded(offsets: list[int], is_clean: bool, end: int) -> None:
    state = AckState(3, end)
    state.settle(offsets)
    state.is_clean = is_clean
    loaded = AckState.decode(state.encode(), "here")
    assert (loaded.floor, loaded.end, loaded.is_clean) == (state.floor, state.end, is_clean)
    assert loaded.ranges() == state.ranges()
    assert loaded.encode() == state.encode()


def test_a_state_of_ten_thousand_holes_is_small() -> None:
    state = AckState()
    state.settle(range(1_000_000_001, 1_000_020_000, 2))
    assert len(state.encode()) < 25_000


@given(st.binary(max_size=40))
def test_damaged_states_are_refused(content: bytes) -> None:
    with contextlib.suppress(Damaged):
        AckState.decode(content, "here").encode()


@pytest.mark.parametrize("content", [b"\x96\x02\x00\x00\xc3\x90\x90", b"\x96\x01\xff\x00\xc3\x90\x90", b""])
def test_another_format_and_negative_numbers_are_damaged(content: bytes) -> None:
    with pytest.raises(Damaged, match=r"shard-states/3 is damaged"):
        AckState.decode(content, "shardyard.shard-states/3")
