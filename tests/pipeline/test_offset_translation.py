"""Where groups go on after a reshard: nothing is skipped, and what was done does not come again if it can be helped."""

from hypothesis import given
from hypothesis import strategies as st

from shardyard.pipeline.reshard.offset_translation import Carried, Chunk, carry, levels


def copied(
    old: list[list[int]], cuts: list[tuple[int, ...]], size: int
) -> tuple[list[Chunk], list[list[tuple[int, int]]]]:
    """Copy old partitions (the new partition of each record) up to each cut in turn, in chunks of `size`: the chunks,
    and what the new partitions hold (old partition and offset of each record)."""
    partitions = 3
    new: list[list[tuple[int, int]]] = [[] for _ in range(partitions)]
    chunks = []
    at = [0] * len(old)
    for cut in cuts:
        for p, end in enumerate(cut):
            for start in range(at[p], end, size):
                stop = min(start + size, end)
                targets = old[p][start:stop]
                chunks.append(Chunk(p, start, stop, tuple(targets.count(q) for q in range(partitions))))
                for offset, q in enumerate(targets, start):
                    new[q].append((p, offset))
            at[p] = end
    return chunks, new


@given(
    st.lists(st.lists(st.integers(0, 2), max_size=12), min_size=1, max_size=4),
    st.lists(st.lists(st.integers(0, 12), min_size=4, max_size=4), max_size=3),
    st.lists(st.integers(0, 12), min_size=4, max_size=4),
    st.integers(1, 5),
)
def test_a_group_goes_on_at_the_first_record_it_has_not_done(
    old: list[list[int]], earlier: list[list[int]], now: list[int], size: int
) -> None:
    ends = [len(records) for records in old]
    committed = {p: min(now[p], ends[p]) for p in range(len(old))}
    cuts = levels([0] * len(old), ends, [dict(enumerate(group[: len(old)])) for group in earlier])
    chunks, new = copied(old, cuts, size)

    def placed(partition: int, start: int, end: int) -> list[int]:
        return [old[partition][start:end].count(q) for q in range(3)]

    carried = carry(chunks, committed, 3, placed)
    for q, reached in enumerate(carried.offsets):
        assert all(offset < committed[p] for p, offset in new[q][:reached])
        if reached < len(new[q]):
            p, offset = new[q][reached]
            assert offset >= committed[p]
    done_behind = [offset < committed[p] for q, reached in enumerate(carried.offsets) for p, offset in new[q][reached:]]
    assert carried.again == sum(done_behind)


def test_what_a_group_has_done_is_copied_first_so_nothing_comes_again() -> None:
    old = [[0, 1, 2, 0, 1, 2], [0, 1, 2, 0, 1, 2]]
    committed = {0: 4, 1: 2}
    cuts = levels([0, 0], [6, 6], [committed])
    assert cuts == [(4, 2), (6, 6)]
    chunks, _ = copied(old, cuts, 100)

    def never(partition: int, start: int, end: int) -> list[int]:
        raise AssertionError((partition, start, end))  # no chunk was done in part

    assert carry(chunks, committed, 3, never) == Carried((3, 2, 1), 0)
    uncut, _ = copied(old, [(6, 6)], 100)
    assert carry(uncut, committed, 3, lambda p, a, b: [old[p][a:b].count(q) for q in range(3)]).again == 1


def test_cuts_of_several_groups_never_cross() -> None:
    assert levels([0, 0], [9, 9], [{0: 5, 1: 2}, {0: 1, 1: 7}]) == [(1, 2), (5, 7), (9, 9)]
    assert levels([3, 0], [9, 9], [{0: 1}]) == [(9, 9)]  # below what is left of the topic there is nothing to copy
    assert levels([2, 2], [2, 2], [{0: 2, 1: 2}]) == []
