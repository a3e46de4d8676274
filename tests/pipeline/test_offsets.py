"""Planning of reads, on plain offsets."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardyard.model import InvalidValue, Span
from shardyard.pipeline.source import offsets
from shardyard.pipeline.source.offsets import DataLost, Offsets, Range, TopicOffsets, TopicSpans


def topic_spans(*spans: tuple[int, int], epoch: int = 7, dropped: int = 0) -> TopicSpans:
    """`dropped`: how many of the partitions, the last ones."""
    return TopicSpans(epoch, len(spans) - dropped, tuple(Span(epoch, first, end) for first, end in spans))


def at(*numbers: int, epoch: int = 7) -> Offsets:
    return Offsets({"t": TopicOffsets(epoch, numbers)})


SPANS = {"t": topic_spans((2, 10), (0, 5))}


def test_offsets_are_earliest_latest_or_explicit() -> None:
    assert offsets.earliest(SPANS) == at(2, 0)
    assert offsets.latest(SPANS) == at(10, 5)
    assert offsets.explicit(SPANS, {"t": {0: 4}}, "startingOffsets", "earliest") == at(4, 0)
    assert offsets.explicit(SPANS, {"t": {0: "latest", 1: "earliest"}}, "startingOffsets", "latest") == at(10, 0)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"u": {0: 1}}, "option 'startingOffsets' is 'u': expected topics that are read: t"),
        ({"t": {2: 1}}, "option 'startingOffsets' is 2: expected partitions 0 to 1 of 't'"),
        ({"t": {0: 1}}, "option 'startingOffsets' is 1: expected an offset from 2 to 10"),
        ({"t": {0: 11}}, "option 'startingOffsets' is 11: expected an offset from 2 to 10"),
    ],
)
def test_explicit_offsets_that_do_not_exist_are_refused(wanted: dict[str, dict[int, int | str]], message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        offsets.explicit(SPANS, wanted, "startingOffsets", "earliest")


def test_offsets_can_be_stored_in_a_checkpoint() -> None:
    assert Offsets.from_json(at(3, 4).to_json()) == at(3, 4)
    with pytest.raises(InvalidValue, match="offsets in the checkpoint"):
        Offsets.from_json({"t": {"0": 5}})


def test_a_stream_continues_where_it_stopped() -> None:
    assert offsets.reconcile(at(4, 1), SPANS, fail=True) == at(4, 1)


def test_new_partitions_and_topics_are_read_from_their_first_record() -> None:
    spans = {"t": topic_spans((2, 10), (0, 5), (3, 9)), "u": topic_spans((1, 2))}
    expected = Offsets({"t": TopicOffsets(7, (4, 1, 3)), "u": TopicOffsets(7, (1,))})
    assert offsets.reconcile(at(4, 1), spans, fail=False) == expected


@pytest.mark.parametrize(
    ("start", "spans", "message", "continues_at"),
    [
        (at(1, 0), SPANS, "offsets 1 to 1 of t/0 were trimmed", at(2, 0)),
        (at(2), SPANS | {"t": topic_spans((2, 10), (3, 5))}, "offsets 0 to 2 of t/1 were trimmed", at(2, 3)),
        (at(4, 1), {"t": topic_spans((2, 10), (5, 5), dropped=1)}, "offsets 1 to 4 of t/1 were dropped", at(4, 5)),
        (at(4, 1, epoch=6), SPANS, r"topic 't' was deleted and recreated \(epoch 6, now 7\)", at(2, 0)),
        (at(11, 1), SPANS, "t/0 ends at 10, before offset 11", at(10, 1)),
        (Offsets({"u": TopicOffsets(1, (0,))}), {}, "topic 'u' is no longer read", Offsets({})),
    ],
)
def test_lost_records_fail_the_read_or_are_skipped(
    start: Offsets, spans: dict[str, TopicSpans], message: str, continues_at: Offsets
) -> None:
    with pytest.raises(DataLost, match=message + ".*set failOnDataLoss to false"):
        offsets.reconcile(start, spans, fail=True)
    assert offsets.reconcile(start, spans, fail=False) == continues_at


@pytest.mark.parametrize("start", [at(4), at(4, 5)], ids=["before it was known", "after it was read"])
def test_a_dropped_partition_is_remembered_in_case_that_it_is_added_again(start: Offsets) -> None:
    assert offsets.reconcile(start, {"t": topic_spans((2, 10), (5, 5), dropped=1)}, fail=True) == at(4, 5)
    assert offsets.reconcile(at(4, 5), {"t": topic_spans((2, 10), (5, 8))}, fail=True) == at(4, 5)


def test_a_trigger_reads_from_each_partition_in_proportion_to_its_backlog() -> None:
    assert offsets.advance(at(0, 0), at(100, 300), 40) == at(10, 30)
    assert offsets.advance(at(0, 0), at(100, 300), None) == at(100, 300)
    assert offsets.advance(at(0, 0), at(1000, 1), 10) == at(9, 1)  # the small one makes progress too
    assert offsets.advance(at(5, 5), at(5, 5), 10) == at(5, 5)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=6), st.integers(1, 120))
def test_a_trigger_reads_up_to_its_limit_and_never_goes_back(spans: list[tuple[int, int]], most: int) -> None:
    start, end = at(*(a for a, _ in spans)), at(*(a + n for a, n in spans))
    reached = offsets.advance(start, end, most)
    taken = [to - a for (a, _), to in zip(spans, reached.topics["t"].offsets, strict=True)]
    assert sum(taken) == min(most, sum(n for _, n in spans))
    assert all(0 <= took <= n for took, (_, n) in zip(taken, spans, strict=True))


@given(st.integers(0, 100), st.integers(1, 300), st.integers(1, 100))
def test_a_large_range_is_split_into_adjacent_parts(start: int, length: int, most: int) -> None:
    parts = offsets.split([Range("t", 0, 7, start, start + length)], most)
    assert [p.start for p in parts] == [start, *(p.end for p in parts[:-1])]
    assert parts[-1].end == start + length
    assert all(1 <= p.max_records <= most for p in parts)
    assert max(p.max_records for p in parts) - min(p.max_records for p in parts) <= 1


def test_ranges_lie_between_start_and_end_by_topic_and_partition() -> None:
    end = Offsets({"b": TopicOffsets(2, (1, 0)), "a": TopicOffsets(1, (5, 7))})
    start = Offsets({"a": TopicOffsets(1, (5, 6)), "b": TopicOffsets(1, (1, 0))})
    assert offsets.ranges(start, end) == [Range("a", 1, 1, 6, 7), Range("b", 0, 2, 0, 1)]


def test_available_now_stops_at_the_initial_end_and_never_goes_back() -> None:
    limit = at(10, 5)
    assert offsets.cap(at(12, 5, 3), limit) == at(10, 5, 0)
    assert offsets.not_before(at(10, 5, 0), at(11, 2, 1)) == at(11, 5, 1)


def test_a_planned_end_is_limited_to_what_still_exists() -> None:
    end = Offsets({"t": TopicOffsets(7, (12, 4)), "deleted": TopicOffsets(7, (3,)), "recreated": TopicOffsets(6, (3,))})
    spans = SPANS | {"recreated": topic_spans((0, 9))}
    assert offsets.still_available(end, spans) == at(10, 4)
