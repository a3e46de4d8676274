"""The figures of ADR-009's table, and the size of a routing table of ours."""

import functools
from collections import Counter

import numpy as np
import pytest

from shardyard.model import InvalidValue
from shardyard.pipeline.plan.routing_size import (
    ADR_009,
    GB,
    STATED_SHARE,
    RoutingTable,
    TableSize,
    build_table,
    channel_ids,
    member_ids,
    memberships,
    table_size,
    worker_memory,
)
from shardyard.placement import Modulus

pytestmark = pytest.mark.xdist_group("plots")  # it builds the same tables as the pages with plots
SCALES = [scale.name for scale in ADR_009]
CHANNELS, USERS = 500, 300


@functools.cache
def sizes() -> dict[str, TableSize]:
    return {scale.name: table_size(scale) for scale in ADR_009}


@pytest.fixture(scope="module")
def table() -> RoutingTable:
    return build_table(memberships(CHANNELS, USERS), CHANNELS)


def test_the_formula_gives_adr_009s_table_except_for_one_row_that_its_text_corrects() -> None:
    found = [(s.scale, s.channels, s.users, s.stated_bytes / GB, s.formula_bytes / GB) for s in sizes().values()]
    assert found == [
        ("normal", 500_000, 100_000, 2, 2),
        ("large", 2_000_000, 500_000, 8, 10),
        ("extreme", 5_000_000, 2_000_000, 40, 40),
    ]
    assert [s.formula_deviation for s in sizes().values()] == [0, 0.25, 0]
    assert [s.stated_in_text_bytes / GB for s in sizes().values()] == [2, 10, 40]


def test_partitioned_tables_are_called_for_above_the_thresholds_not_at_them() -> None:
    assert [s.partitioned_by_formula for s in sizes().values()] == [False, False, True]
    assert [s.partitioned_by_measured_bytes for s in sizes().values()] == [False, False, False]


def test_a_worker_holds_the_whole_table_or_its_part() -> None:
    rows = worker_memory(sizes()["extreme"])
    per_worker = {(row.mode, row.workers): row.formula_bytes / GB for row in rows}
    assert per_worker == {
        **{("replicated", n): 40 for n in (1, 4, 16, 64)},
        ("partitioned", 1): 40,
        ("partitioned", 4): 10,
        ("partitioned", 16): 2.5,
        ("partitioned", 64): 0.625,
    }
    assert STATED_SHARE.stated_bytes == per_worker["partitioned", STATED_SHARE.workers] * GB
    ours = {(row.mode, row.workers): row.measured_bytes for row in rows}
    assert ours["replicated", 64] == sizes()["extreme"].measured_bytes
    assert ours["replicated", 64] == pytest.approx(4 * ours["partitioned", 4], abs=4)


@pytest.mark.parametrize(("scale", "members"), [("normal", 40), ("large", 50), ("extreme", 80)])
def test_the_entries_of_a_channel_are_as_many_as_expected_by_chance(scale: str, members: int) -> None:
    # The n-th of C channels has members / 2 * sqrt(C / n) members, and m members fill 256 * (1 - (255/256)**m) inboxes.
    quantiles = (np.arange(100_000) + 0.5) / 100_000
    expected = (256 * (1 - (255 / 256) ** (members / 2 / np.sqrt(quantiles)))).mean()
    assert sizes()[scale].entries_per_channel == pytest.approx(expected, rel=0.015)


@pytest.mark.parametrize("scale", SCALES)
def test_the_entries_of_a_channel_stay_the_same_if_channels_and_users_shrink_together(scale: str) -> None:
    size = sizes()[scale]
    assert size.entries_per_channel_at_half == pytest.approx(size.entries_per_channel, rel=0.005)


@pytest.mark.parametrize("scale", SCALES)
def test_the_measured_size_is_that_of_its_arrays(scale: str) -> None:
    size = sizes()[scale]
    assert size.bytes_per_channel == pytest.approx(8 + 4, abs=0.01)  # a hash, and where its entries start
    assert size.bytes_per_entry == 1 + 2  # an inbox partition, and a count
    assert size.measured_bytes == pytest.approx(size.channels * (12 + 3 * size.entries_per_channel), rel=1e-3)


def test_the_table_has_the_members_of_every_channel(table: RoutingTable) -> None:
    inboxes = Modulus("fnv1a32", 256)
    expected: dict[int, Counter[int]] = {channel: Counter() for channel in range(CHANNELS)}
    for user, channels in zip(member_ids(USERS).to_pylist(), memberships(CHANNELS, USERS).tolist(), strict=True):
        for channel in set(channels):
            expected[channel][inboxes.place(user)] += 1
    assert {i: table.members(name) for i, name in enumerate(channel_ids(CHANNELS).to_pylist())} == expected
    assert table.members("ch_unknown") == {}


def test_counts_are_as_wide_as_the_largest_needs() -> None:
    everyone_in_one = np.zeros((70_000, 1), np.int64)
    table = build_table(everyone_in_one, 1)
    assert table.counts.sum() == 70_000
    assert table.counts.max() > 255
    assert table.counts.dtype == np.uint16
    assert build_table(everyone_in_one[:100], 1).counts.dtype == np.uint8
    assert build_table(everyone_in_one[:100], 1, full_users=20_000_000).counts.dtype == np.uint32


def test_the_same_seed_gives_the_same_table(table: RoutingTable) -> None:
    again = build_table(memberships(CHANNELS, USERS), CHANNELS)
    other = build_table(memberships(CHANNELS, USERS, seed=1), CHANNELS)
    assert np.array_equal(table.counts, again.counts)
    assert not np.array_equal(table.counts, other.counts)


def test_a_table_that_is_too_large_or_empty_is_refused() -> None:
    with pytest.raises(InvalidValue, match="channels is 200001: expected at most 200000"):
        memberships(200_001, 1)
    with pytest.raises(InvalidValue, match="users is 0"):
        memberships(10, 0)
