from random import Random

from hypothesis import given
from hypothesis import strategies as st

from shardyard.groups import InFlight


def test_only_the_done_prefix_can_be_committed() -> None:
    batch = InFlight([3, 4, 7, 9], end=12)
    seen = [(batch.prefix, batch.committable)]
    for index in (1, 2, 0, 0, 3):
        batch.acknowledge(index)
        seen.append((batch.prefix, batch.committable))
    assert seen == [(0, None), (0, None), (0, None), (3, 8), (3, 8), (4, 12)], "the batch ends behind a gap"


@given(st.lists(st.integers(0, 10_000), unique=True, min_size=1, max_size=40), st.randoms())
def test_what_can_be_committed_never_passes_a_record_that_is_not_done(offsets: list[int], random: Random) -> None:
    offsets.sort()
    order = list(range(len(offsets)))
    random.shuffle(order)
    batch = InFlight(offsets, end=offsets[-1] + 5)
    done: set[int] = set()
    for index in order:
        batch.acknowledge(index)
        done.add(offsets[index])
        open_ = [offset for offset in offsets if offset not in done]
        upto = batch.committable
        assert upto is None or all(offset >= upto for offset in open_)
        assert upto is None or all(offset in done for offset in offsets if offset < upto)
        if not open_:
            assert upto == offsets[-1] + 5
