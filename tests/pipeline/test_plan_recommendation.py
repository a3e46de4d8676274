"""The recommendation, word for word."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from shardyard.pipeline.plan.load import KeySample, Load
from shardyard.pipeline.plan.recommendation import PartitionCount, format_bytes, ordinal, recommend, recommendation
from shardyard.pipeline.plan.report import make_plan

TWENTY_GB = Load(10_000_000, 20 * 10**9)
USE_256 = (
    "256 partitions for 16 members: 16 each, 78.1 MB per partition; the smallest of the given counts that stays within"
    " 10 % of even, by number of partitions, with any number of members from 16 to 32 (at worst 9.4 % more partitions"
    " than the mean, with 28). Adding a 17th moves 15 partitions (5.9 %, 1.2 GB) with sticky, "
)


@pytest.mark.parametrize(
    ("load", "partitions", "members", "assignors", "expected"),
    [
        (
            TWENTY_GB,
            [64, 128, 256, 512],
            [16],
            ["contiguous", "sticky"],
            USE_256 + "120 (46.9 %, 9.4 GB) with contiguous: use sticky.",
        ),
        (
            TWENTY_GB,
            [256],
            [16],
            ["least_loaded", "even", "sticky"],
            USE_256
            + "240 (93.8 %, 18.8 GB) with even, none with least_loaded (but leaves 0 to 16 on a member): use sticky.",
        ),
        (
            Load(10, 1200),
            [8, 12],
            [16],
            ["sticky"],
            (
                "12 partitions for 16 members: 4 of them idle, 100 bytes per partition; the closest of the given"
                " counts, none of which stays within 10 % of even, by number of partitions, with any number of members"
                " from 16 to 32 (at worst 166.7 % more partitions than the mean, with 32). Adding a 17th moves none"
                " with sticky."
            ),
        ),
        (
            Load.measured([1, 1], [500, 1500]),
            [2],
            [1],
            ["sticky", "even"],
            (
                "2 partitions for 1 member: 2 each, 1.0 kB per partition (the fullest has 1.50 times that); the"
                " smallest of the given counts that stays within 10 % of even, by number of partitions, with any number"
                " of members from 1 to 2. Adding a 2nd moves 1 partition (50.0 %, 1.5 kB) with sticky, 1 (50.0 %, 1.5"
                " kB) with even: use sticky."
            ),
        ),
        (
            Load(0, 0),
            [100],
            [3],
            ["even"],
            (  # i % 3 == i % 4 for 27 of 100 partitions
                "100 partitions for 3 members: 33 or 34 each, 0 bytes per partition; the smallest of the given counts"
                " that stays within 10 % of even, by number of partitions, with any number of members from 3 to 6 (at"
                " worst 2.0 % more partitions than the mean, with 3). Adding a 4th moves 73 partitions (73.0 %, 0"
                " bytes) with even."
            ),
        ),
    ],
)
def test_the_recommendation_says_what_to_use_and_why(
    load: Load, partitions: Sequence[int], members: Sequence[int], assignors: Sequence[str], expected: str
) -> None:
    report = make_plan(load, partitions=partitions, members=members, assignors=assignors)
    assert report.recommendation == expected
    assert recommendation(report.partition_counts, members, report.member_steps) == expected


def test_the_smallest_good_count_is_recommended_whatever_the_order() -> None:
    counts = [PartitionCount(n, "even", 1, None, None, None) for n in (1024, 256, 512, 128)]
    assert recommend(counts, [16]).partitions == 256
    assert recommend(counts, [16, 64]).partitions == 1024
    assert recommend(counts, [1000]).partitions == 1024


def test_no_more_partitions_are_recommended_than_the_keys_can_fill() -> None:
    load = Load.measured([10] * 8, [1000] * 8)
    eleven = replace(load, distinct_keys=11)
    report = make_plan(eleven, partitions=[8, 16, 256], members=[16], assignors=["sticky"])
    assert report.recommended_partitions == 8
    assert report.recommendation == (
        "8 partitions for 16 members: 8 of them idle, 1.0 kB per partition (the fullest has 1.00 times that); the"
        " closest of the given counts that the keys can fill, none of which stays within 10 % of even, by number of"
        " partitions, with any number of members from 16 to 32 (at worst 300.0 % more partitions than the mean, with"
        " 32). Adding a 17th moves none with sticky."
        " The load has 11 different keys, which fill at most 11 partitions: more would stay empty."
    )
    assert make_plan(load, partitions=[8, 16, 256], members=[16]).recommended_partitions == 256
    many = make_plan(replace(load, distinct_keys=256), partitions=[8, 16, 256], members=[16])
    assert many.recommended_partitions == 256
    assert "different keys" not in many.recommendation
    one = make_plan(replace(load, distinct_keys=1), partitions=[16, 8], members=[2], assignors=["sticky"])
    assert one.recommended_partitions == 8
    assert "; the smallest of the given counts, none of which the keys can fill. Adding" in one.recommendation
    assert one.recommendation.endswith(
        "The load has 1 different key, which fills at most 1 partition: at least 7 of 8 stay empty. Compare lower"
        " numbers by --partitions."
    )
    seven = make_plan(replace(load, distinct_keys=7), partitions=[8], members=[2], assignors=["sticky"])
    assert ": at least 1 of 8 stays empty. Compare" in seven.recommendation


def test_a_key_that_is_more_than_the_share_of_a_member_is_named_first() -> None:
    sizes = np.array([350.0, *[65.0] * 10])
    keys = KeySample(pa.array([b"hot", *(b"%d" % n for n in range(10))]), sizes, is_complete=True)
    load = Load(11, 1000, keys=keys)
    four = make_plan(load, partitions=[8], members=[4], assignors=["sticky"]).recommendation
    assert four.startswith(
        "The key `hot` alone has 35.0 % of the bytes, all on one partition: with 4 members, the fullest has at least"
        " 1.4 times the mean, however many partitions there are; only splitting the key helps. By numbers of"
        " partitions alone, 8 partitions for 4 members"
    )
    two = make_plan(load, partitions=[8], members=[2, 4], assignors=["sticky"]).recommendation
    assert "with 4 members, the fullest has at least 1.4 times" in two  # as many as it is planned for
    for few in (1, 2):
        plan = make_plan(load, partitions=[8], members=[few], assignors=["sticky"])
        assert plan.recommendation.startswith("8 partitions")
    sample = replace(load, keys=replace(keys, is_complete=False))
    assert make_plan(sample, partitions=[8], members=[4], assignors=["sticky"]).recommendation.startswith("8 part")


def test_numbers_are_formatted_for_people() -> None:
    assert [ordinal(n) for n in (1, 2, 3, 4, 11, 12, 13, 17, 21, 101, 112)] == [
        *("1st", "2nd", "3rd", "4th", "11th", "12th", "13th", "17th", "21st", "101st", "112th"),
    ]
    assert [format_bytes(n) for n in (0, 999, 1000, 78_125_000, 999_990_000, 2.5e9, 1e12, 3e15)] == [
        *("0 bytes", "999 bytes", "1.0 kB", "78.1 MB", "1.0 GB", "2.5 GB", "1.0 TB", "3.0 PB"),
    ]
