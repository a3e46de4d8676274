"""Which records are read: planning on plain numbers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardyard.model import InvalidValue, Span
from shardyard.pipeline.source import offsets
from shardyard.pipeline.source.offsets import DataLost, Extent, Offsets, Range, TopicOffsets


def extent(*spans: tuple[int, int], epoch: int = 7) -> Extent:
    return Extent(epoch, tuple(Span(epoch, first, end) for first, end in spans))


def at(*numbers: int, epoch: int = 7) -> Offsets:
    return Offsets({"t": TopicOffsets(epoch, numbers)})


HELD = {"t": extent((2, 10), (0, 5))}


def test_a_place_is_earliest_latest_or_named() -> None:
    assert offsets.earliest(HELD) == at(2, 0)
    assert offsets.latest(HELD) == at(10, 5)
    assert offsets.explicit(HELD, {"t": {0: 4}}, "startingOffsets", "earliest") == at(4, 0)
    assert offsets.explicit(HELD, {"t": {0: "latest", 1: "earliest"}}, "startingOffsets", "latest") == at(10, 0)


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        ({"u": {0: 1}}, "option 'startingOffsets' is 'u': expected topics that are read: t"),
        ({"t": {2: 1}}, "option 'startingOffsets' is 2: expected partitions 0 to 1 of 't'"),
        ({"t": {0: 1}}, "option 'startingOffsets' is 1: expected an offset from 2 to 10"),
        ({"t": {0: 11}}, "option 'startingOffsets' is 11: expected an offset from 2 to 10"),
    ],
)
def test_a_named_place_that_is_not_there_is_refused(wanted: dict[str, dict[int, int | str]], says: str) -> None:
    with pytest.raises(InvalidValue, match=says):
        offsets.explicit(HELD, wanted, "startingOffsets", "earliest")


def test_offsets_survive_their_checkpoint() -> None:
    assert Offsets.from_json(at(3, 4).to_json()) == at(3, 4)
    with pytest.raises(InvalidValue, match="offsets in the checkpoint"):
        Offsets.from_json({"t": {"0": 5}})


def test_what_is_still_there_is_read_on_from_where_it_stopped() -> None:
    assert offsets.reconcile(at(4, 1), HELD, fail=True) == at(4, 1)


def test_new_partitions_and_topics_are_read_from_their_beginning() -> None:
    held = {"t": extent((2, 10), (0, 5), (3, 9)), "u": extent((1, 2))}
    expected = Offsets({"t": TopicOffsets(7, (4, 1, 3)), "u": TopicOffsets(7, (1,))})
    assert offsets.reconcile(at(4, 1), held, fail=False) == expected


@pytest.mark.parametrize(
    ("start", "held", "says", "goes_on"),
    [
        (at(1, 0), HELD, "offsets 1 to 1 of t/0 were trimmed away", at(2, 0)),
        (at(4, 1, epoch=6), HELD, r"topic 't' was deleted and made anew \(epoch 6, now 7\)", at(2, 0)),
        (at(11, 1), HELD, "t/0 ends at 10, before offset 11", at(10, 1)),
        (Offsets({"u": TopicOffsets(1, (0,))}), {}, "topic 'u' is no longer read", Offsets({})),
    ],
)
def test_what_is_gone_fails_or_is_skipped_as_asked(
    start: Offsets, held: dict[str, Extent], says: str, goes_on: Offsets
) -> None:
    with pytest.raises(DataLost, match=says + ".*set failOnDataLoss to false"):
        offsets.reconcile(start, held, fail=True)
    assert offsets.reconcile(start, held, fail=False) == goes_on


def test_a_trigger_takes_from_each_partition_by_its_share() -> None:
    assert offsets.advance(at(0, 0), at(100, 300), 40) == at(10, 30)
    assert offsets.advance(at(0, 0), at(100, 300), None) == at(100, 300)
    assert offsets.advance(at(0, 0), at(1000, 1), 10) == at(9, 1)  # the small one gets ahead too
    assert offsets.advance(at(5, 5), at(5, 5), 10) == at(5, 5)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=6), st.integers(1, 120))
def test_a_trigger_takes_as_much_as_it_may_and_never_goes_back(held: list[tuple[int, int]], most: int) -> None:
    start, end = at(*(a for a, _ in held)), at(*(a + n for a, n in held))
    reached = offsets.advance(start, end, most)
    taken = [to - a for (a, _), to in zip(held, reached.topics["t"].offsets, strict=True)]
    assert sum(taken) == min(most, sum(n for _, n in held))
    assert all(0 <= took <= n for took, (_, n) in zip(taken, held, strict=True))


@given(st.integers(0, 100), st.integers(1, 300), st.integers(1, 100))
def test_a_large_range_is_split_without_gap_or_overlap(start: int, length: int, most: int) -> None:
    parts = offsets.split([Range("t", 0, 7, start, start + length)], most)
    assert [p.start for p in parts] == [start, *(p.end for p in parts[:-1])]
    assert parts[-1].end == start + length
    assert all(1 <= len(p) <= most for p in parts)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_ranges_are_what_lies_between_by_topic_and_partition() -> None:
    end = Offsets({"b": TopicOffsets(2, (1, 0)), "a": TopicOffsets(1, (5, 7))})
    start = Offsets({"a": TopicOffsets(1, (5, 6)), "b": TopicOffsets(1, (1, 0))})
    assert offsets.ranges(start, end) == [Range("a", 1, 1, 6, 7), Range("b", 0, 2, 0, 1)]


def test_available_now_stops_at_what_was_there_and_never_before_where_it_is() -> None:
    until = at(10, 5)
    assert offsets.capped(at(12, 5, 3), until) == at(10, 5, 0)
    assert offsets.at_least(at(10, 5, 0), at(11, 2, 1)) == at(11, 5, 1)


def test_what_was_planned_is_read_as_far_as_it_is_still_there() -> None:
    end = Offsets({"t": TopicOffsets(7, (12, 4)), "gone": TopicOffsets(7, (3,)), "anew": TopicOffsets(6, (3,))})
    held = HELD | {"anew": extent((0, 9))}
    assert offsets.as_far_as(end, held) == at(10, 4)
