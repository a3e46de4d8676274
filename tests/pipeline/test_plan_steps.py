"""What moves when members or partitions are added, compared with numbers computed by hand."""

import numpy as np
import pyarrow as pa
import pytest

from shardyard.pipeline.plan.load import KeySample, Load
from shardyard.pipeline.plan.steps import member_steps, partition_steps

HELD = np.array([10.0, 20.0, 30.0, 40.0])
"""Bytes of four partitions."""
PUBLISHED = pa.array(["", "a", "b", "foobar"])
"""fnv1a32 of these is 811c9dc5, e40c292c, e70c2de5 and bf9cf968, as published with the hash."""
SAMPLE = KeySample(PUBLISHED, HELD)


@pytest.mark.parametrize(
    ("assignor", "after", "moves", "bytes_moved", "most_before", "most_after", "before_mean", "after_mean"),
    [
        ("sticky", 3, 1, 40, 60, 40, 1.2, 1.2),  # 0,2 | 1,3 -> 0,2 | 1 | 3
        ("sticky", 4, 2, 70, 60, 40, 1.2, 1.6),  # -> 0 | 1 | 2 | 3
        ("even", 3, 2, 70, 60, 50, 1.2, 1.5),  # 0,2 | 1,3 -> 0,3 | 1 | 2
        ("contiguous", 3, 1, 40, 70, 40, 1.4, 1.2),  # 0,1 | 2,3 -> 0,1 | 2 | 3
        ("contiguous", 4, 3, 90, 70, 40, 1.4, 1.6),  # -> 0 | 1 | 2 | 3
        ("least_loaded", 3, 0, 0, 60, 60, 1.2, 1.8),
    ],
)
def test_what_moves_when_two_members_become_more(
    assignor: str,
    after: int,
    moves: int,
    bytes_moved: int,
    most_before: int,
    most_after: int,
    before_mean: float,
    after_mean: float,
) -> None:
    step = next(s for s in member_steps(HELD, 2, assignor) if s.after == after)
    assert (step.moves, step.fraction, step.bytes_moved) == (moves, moves / 4, bytes_moved)
    assert (step.most_bytes_before, step.most_bytes_after) == (most_before, most_after)
    assert step.max_over_mean_before == pytest.approx(before_mean)
    assert step.max_over_mean_after == pytest.approx(after_mean)
    assert step.ideal_fraction == pytest.approx(1 - 2 / after)


def test_from_one_member_one_more_and_twice_as_many_are_the_same_step() -> None:
    assert [(s.before, s.after, s.moves) for s in member_steps(HELD, 1, "sticky")] == [(1, 2, 2)]


def test_members_beyond_the_partitions_have_no_ideal_share() -> None:
    more, twice = member_steps(HELD, 5, "sticky")
    assert (more.moves, more.ideal_fraction, twice.moves, twice.ideal_fraction) == (0, 0, 0, 0)
    assert member_steps(HELD, 3, "sticky")[1].ideal_fraction == 0.25


@pytest.mark.parametrize(
    ("assignor", "members", "moves", "percent"),
    [("contiguous", 16, 120, 47), ("contiguous", 31, 220, 86), ("sticky", 16, 15, 5.9), ("sticky", 31, 8, 3.1)],
)
def test_256_partitions_move_as_they_would_under_adr_009(
    assignor: str, members: int, moves: int, percent: float
) -> None:
    step = member_steps(np.full(256, 20e9 / 256), members, assignor)[0]
    assert (step.after, step.moves) == (members + 1, moves)
    assert 100 * step.fraction == pytest.approx(percent, abs=0.5 if percent > 10 else 0.05)
    assert step.bytes_moved == moves * 78_125_000


def test_the_keys_that_change_partition_are_counted_in_the_sample() -> None:
    steps = partition_steps(Load(4, 200, keys=SAMPLE), [2, 4], {"modulus": "fnv1a32"})
    found = [(s.before, s.after, s.fraction, s.bytes_moved, s.bytes_fraction, s.basis, s.keys) for s in steps]
    assert found == [
        (2, 3, 0.5, 60, 0.3, "sample", 4),  # a and foobar: 0 -> 1
        (2, 4, 0.0, 0, 0.0, "sample", 4),
        (4, 5, 0.25, 30, 0.15, "sample", 4),  # b: 1 -> 2
        (4, 8, 0.75, 60, 0.3, "sample", 4),  # all but foobar: up by 4
    ]


@pytest.mark.parametrize(("partitioner", "hash_"), [("modulus", "fnv1a32"), ("jump", "xxh64")])
@pytest.mark.parametrize("partitions", [12, 256])
def test_without_a_sample_generated_keys_move_as_often_as_expected_by_chance(
    partitioner: str, hash_: str, partitions: int
) -> None:
    more, twice = partition_steps(Load(10_000_000, 20 * 10**9), [partitions], {partitioner: hash_})
    share = 1 / (partitions + 1)
    assert more.fraction == pytest.approx(share if partitioner == "jump" else 1 - share, abs=0.003)
    assert twice.fraction == pytest.approx(0.5, abs=0.004)
    assert more.bytes_moved == pytest.approx(more.fraction * 20e9)
    assert [more.ideal_fraction, twice.ideal_fraction] == pytest.approx([share, 0.5])
    assert more.basis == "generated keys"
