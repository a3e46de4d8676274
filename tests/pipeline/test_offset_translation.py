"""Where groups continue after a reshard: no record is skipped, and as few as possible are delivered again."""

from itertools import accumulate, pairwise

from hypothesis import given
from hypothesis import strategies as st

from shardyard.pipeline.reshard.offset_translation import (
    Chunk,
    Progress,
    TargetRange,
    offset_behind,
    round_ends,
    translate,
)

TARGETS = 3
Source = dict[int, int]
"""A source partition: the offset of each record, and the target partition that the record goes to."""


def dense(targets: list[int]) -> Source:
    return dict(enumerate(targets))


@st.composite
def sources(draw: st.DrawFn) -> Source:
    """A source partition whose offsets have gaps."""
    offsets = accumulate(draw(st.lists(st.integers(1, 4), max_size=12)))
    return {offset: draw(st.integers(0, TARGETS - 1)) for offset in offsets}


def end_of(source: Source) -> int:
    """The end of a source partition, with a gap behind the last record."""
    return max(source, default=0) + 2


def counts_of(targets: list[int]) -> list[int]:
    return [targets.count(q) for q in range(TARGETS)]


def copy(
    sources: list[Source], rounds: list[tuple[int, ...]], size: int
) -> tuple[list[Chunk], list[list[tuple[int, int]]]]:
    """Copy source partitions up to the end of each round, in chunks of up to `size` records.

    Returns the chunks, and for each target partition the source partition and offset of each of its records.
    """
    copied: list[list[tuple[int, int]]] = [[] for _ in range(TARGETS)]
    chunks = []
    at = [0] * len(sources)
    for ends in rounds:
        for p, end in enumerate(ends):
            offsets = [offset for offset in sources[p] if at[p] <= offset < end]
            for first in range(0, len(offsets), size):
                part = offsets[first : first + size]
                targets = [sources[p][offset] for offset in part]
                chunks.append(Chunk(p, part[0], part[-1] + 1, tuple(counts_of(targets))))
                for offset, q in zip(part, targets, strict=True):
                    copied[q].append((p, offset))
            at[p] = end
    return chunks, copied


@given(
    st.lists(sources(), min_size=1, max_size=4),
    st.lists(st.lists(st.integers(0, 50), min_size=4, max_size=4), max_size=3),
    st.lists(st.integers(0, 50), min_size=4, max_size=4),
    st.integers(1, 5),
)
def test_a_group_continues_at_the_first_record_that_it_has_not_processed(
    partitions: list[Source], earlier: list[list[int]], now: list[int], size: int
) -> None:
    ends = [end_of(source) for source in partitions]
    committed = {p: min(now[p], end) for p, end in enumerate(ends)}
    groups = [dict(enumerate(group[: len(partitions)])) for group in earlier]
    chunks, copied = copy(partitions, round_ends([0] * len(partitions), ends, groups), size)

    def count_targets(partition: int, start: int, end: int) -> list[int]:
        return counts_of([q for offset, q in partitions[partition].items() if start <= offset < end])

    progress = translate(chunks, committed, TARGETS, count_targets)
    for records, done in zip(copied, progress.done, strict=True):
        assert all(offset < committed[p] for p, offset in records[:done])
        assert all(offset >= committed[p] for p, offset in records[done : done + 1])
    behind = [
        offset < committed[p]
        for records, done in zip(copied, progress.done, strict=True)
        for p, offset in records[done:]
    ]
    assert progress.repeated == sum(behind)


def test_what_a_group_has_processed_is_copied_first_so_that_nothing_is_delivered_again() -> None:
    partitions = [dense([0, 1, 2, 0, 1, 2]), dense([0, 1, 2, 0, 1, 2])]
    committed = {0: 4, 1: 2}
    rounds = round_ends([0, 0], [6, 6], [committed])
    assert rounds == [(4, 2), (6, 6)]
    chunks, _ = copy(partitions, rounds, 100)

    def never(partition: int, start: int, end: int) -> list[int]:
        raise AssertionError((partition, start, end))  # the group has processed no chunk in part

    assert translate(chunks, committed, TARGETS, never) == Progress((3, 2, 1), 0)
    one_round, _ = copy(partitions, [(6, 6)], 100)

    def count_targets(partition: int, start: int, end: int) -> list[int]:
        return counts_of([partitions[partition][offset] for offset in range(start, end)])

    assert translate(one_round, committed, TARGETS, count_targets).repeated == 1


def test_rounds_for_several_groups_never_overlap() -> None:
    assert round_ends([0, 0], [9, 9], [{0: 5, 1: 2}, {0: 1, 1: 7}]) == [(1, 2), (5, 7), (9, 9)]
    assert round_ends([3, 0], [9, 9], [{0: 1}]) == [(9, 9)]  # what lies below the starts was trimmed
    assert round_ends([2, 2], [2, 2], [{0: 2, 1: 2}]) == []


def test_records_are_counted_by_what_was_copied_and_not_by_offsets() -> None:
    chunks = [Chunk(0, 0, 10, (2, 0, 0)), Chunk(1, 5, 50, (1, 1, 0))]  # 2 records at 10 offsets, 2 at 45 offsets
    assert translate(chunks, {0: 0, 1: 50}, TARGETS, lambda *_: []) == Progress((0, 1, 0), 1)
    assert translate(chunks, {0: 7, 1: 50}, TARGETS, lambda *_: [1, 0, 0]) == Progress((1, 1, 0), 1)


@given(st.lists(st.lists(st.integers(1, 3), max_size=6), max_size=4), st.data())
def test_a_number_of_records_is_translated_into_the_offset_behind_them(
    gaps: list[list[int]], data: st.DataObject
) -> None:
    offsets: list[int] = []
    edges = [4]
    for round_ in gaps:
        offsets += [offset - 1 for offset in accumulate(round_, initial=edges[-1])][1:]
        edges.append(edges[-1] + sum(round_))
    ranges = [TargetRange(a, b, sum(a <= offset < b for offset in offsets)) for a, b in pairwise(edges)]
    count = data.draw(st.integers(0, len(offsets)))

    def skip(start: int, skipped: int) -> int:
        assert any(r.start == start and r.count < r.end - r.start for r in ranges), "a range without gaps is not read"
        return [offset for offset in offsets if offset >= start][skipped - 1] + 1

    found = offset_behind(count, [TargetRange(4, 4, 0), *ranges], skip)
    assert [offset for offset in offsets if offset < found] == offsets[:count]
    assert edges[0] <= found <= edges[-1]
