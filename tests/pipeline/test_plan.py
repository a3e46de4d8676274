"""The numbers of a plan, compared with ones computed by hand."""

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from shardyard.model import InvalidValue
from shardyard.pipeline.plan.load import KeySample, Load
from shardyard.pipeline.plan.report import make_plan

HELD = np.array([10.0, 20.0, 30.0, 40.0])
"""Bytes of four partitions."""
TWENTY_GB = Load(10_000_000, 20 * 10**9, records_per_second=1024.0)
PUBLISHED = pa.array(["", "a", "b", "foobar"])
"""fnv1a32 of these is 811c9dc5, e40c292c, e70c2de5 and bf9cf968, as published with the hash."""
SAMPLE = KeySample(PUBLISHED, HELD)


def test_bytes_of_partitions_are_measured_or_sampled_or_even() -> None:
    load = Load.measured([1, 1, 2], [50, 60, 90], rate=6.0, keys=SAMPLE)
    report = make_plan(load, partitions=[3, 2, 4], members=[2, 3], assignors=["sticky"], partitioners=["modulus"])
    found = [(c.basis, c.bytes_mean, c.bytes_max, c.records_per_second) for c in report.partition_counts]
    assert found == [
        ("measured", 67, 90, 2.0),
        ("sample", 100, 110, 3.0),  # "a" and foobar 60, "" and "b" 40; and half of the 100 bytes without a key
        ("sample", 50, 85, 1.5),  # the same on 0 and 1; and 25 on each
    ]
    assert [c.max_over_mean for c in report.partition_counts] == pytest.approx([1.35, 1.1, 1.7])
    assumed = make_plan(TWENTY_GB, partitions=[256], members=[16], assignors=["sticky"]).partition_counts[0]
    assert (assumed.basis, assumed.bytes_mean, assumed.bytes_max, assumed.max_over_mean) == (
        "even",
        78_125_000,
        None,
        None,
    )
    assert assumed.records_per_second == 4.0


def test_shares_say_how_many_partitions_members_own() -> None:
    report = make_plan(TWENTY_GB, partitions=[12, 32], members=[16], assignors=["sticky"])
    found = [(s.partitions, s.members, s.fewest, s.most, s.even, s.idle_members) for s in report.shares]
    assert found == [(12, 16, 0, 1, False, 4), (32, 16, 2, 2, True, 0)]


def test_every_combination_is_planned_in_order() -> None:
    report = make_plan(TWENTY_GB, partitions=[8, 16], members=[2, 4], assignors=["even", "sticky"])
    steps = [(s.partitions, s.before, s.assignor, s.after) for s in report.member_steps]
    assert steps == [
        (p, n, a, after) for p in (8, 16) for n in (2, 4) for a in ("even", "sticky") for after in (n + 1, 2 * n)
    ]
    keys = [(s.before, s.partitioner, s.hash, s.after) for s in report.partition_steps]
    assert keys == [
        (p, name, hash_, after)
        for p in (8, 16)
        for name, hash_ in (("modulus", "fnv1a32"), ("jump", "xxh64"))
        for after in (p + 1, 2 * p)
    ]


def test_jump_keeps_its_default_hash_if_the_given_one_is_too_short() -> None:
    named = make_plan(TWENTY_GB, partitions=[8], members=[2], hash_="murmur2").partition_steps
    assert {(s.partitioner, s.hash) for s in named} == {("modulus", "murmur2"), ("jump", "xxh64")}
    named = make_plan(TWENTY_GB, partitions=[8], members=[2], hash_="fnv1a64").partition_steps
    assert {s.hash for s in named} == {"fnv1a64"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"partitions": [0]}, "partitions is 0: expected a whole number of at least 1"),
        ({"partitions": [2.5]}, "partitions is 2.5: expected a whole number of at least 1"),
        ({"partitions": []}, r"partitions is \[\]: expected 1 to 50 different ones"),
        ({"partitions": [8, 8]}, r"partitions is \[8, 8\]: expected 1 to 50 different ones"),
        ({"partitions": list(range(1, 52))}, "expected 1 to 50 different ones"),
        ({"partitions": [100_001]}, "partitions is 100001: expected at most 100000 to plan for"),
        ({"members": [-1]}, "members is -1: expected a whole number of at least 1"),
        ({"members": []}, r"members is \[\]"),
        ({"partitions": [100_000], "members": [11]}, "partitions x members is 1100000: expected at most 1000000"),
        (
            {"partitions": [90_000], "members": [1, 2, 3, 4, 5, 6]},
            "partitions and members of all cases is 2160084: expected at most 400000",
        ),
        (
            {"partitions": [1, 2], "members": [90_000]},
            "partitions and members of all cases is 720012: expected at most",
        ),
        ({"assignors": []}, r"assignors is \[\]"),
        ({"assignors": ["fair"]}, "assignors is 'fair': expected some of sticky, even, contiguous, least_loaded"),
        ({"partitioners": []}, r"partitioners is \[\]"),
        ({"partitioners": ["round_robin"]}, "partitioners is 'round_robin': expected some of modulus, jump"),
        ({"hash_": "md5"}, "hash is 'md5': expected one of"),
    ],
)
def test_an_invalid_plan_is_refused_before_it_is_computed(
    change: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardyard.pipeline.plan.steps.assign", lambda *_, **__: pytest.fail("it was computed"))
    monkeypatch.setattr("shardyard.pipeline.plan.report.table_size", lambda *_: pytest.fail("it was computed"))
    with pytest.raises(InvalidValue, match=message):
        make_plan(TWENTY_GB, **{"partitions": [8], "members": [2], **change})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Load(-1, 0), "records is -1: expected a whole number of at least 0"),
        (lambda: Load(0, 1.5), "bytes is 1.5"),  # type: ignore[arg-type]
        (lambda: Load.measured([1, 2], [3, -4]), "bytes of partition 1 is -4: expected a whole number of at least 0"),
        (lambda: Load.measured([], []), r"records is \[\]: expected a number for each of at least one partition"),
        (lambda: Load.measured([1, 2], [3]), "partition_bytes is 1: expected 2 numbers"),
        (lambda: Load(4, 3, (1, 2), (1, 2)), "records is 4: expected 3, the sum over the partitions"),
        (lambda: Load(1, 1, records_per_second=-0.5), "records_per_second is -0.5"),
        (lambda: Load(1, 1, records_per_second=float("nan")), "records_per_second is nan"),
        (lambda: Load(4, 99, keys=SAMPLE), "bytes in the sample is 100.0: expected at most 99 together"),
        (lambda: KeySample(pa.array([], pa.string()), np.array([])), "keys in the sample is 0: expected from 1"),
        (lambda: KeySample(PUBLISHED, np.ones(3)), "bytes in the sample is 3: expected one for each of 4 keys"),
        (lambda: KeySample(PUBLISHED, -HELD), "bytes in the sample is -40.0: expected numbers of at least 0"),
    ],
)
def test_an_invalid_load_is_refused(make: Any, message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        make()


def test_a_sample_is_scaled_to_what_it_represents() -> None:
    assert KeySample.scaled(PUBLISHED, [1, 2, 3, 4], 100).bytes.tolist() == [10, 20, 30, 40]
    assert KeySample.scaled(PUBLISHED, [0, 0, 0, 0], 100).bytes.tolist() == [0, 0, 0, 0]


def test_json_is_plain_and_its_names_are_stable() -> None:
    load = Load.measured(np.array([1, 3]), np.array([10, 90]), rate=2.0, keys=SAMPLE)  # type: ignore[arg-type]
    data = make_plan(load, partitions=[2], members=[1], assignors=["sticky"], partitioners=["jump"]).to_json()
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert list(data) == [
        "recommended_partitions",
        "recommendation",
        "load",
        "partition_counts",
        "shares",
        "member_steps",
        "partition_steps",
        "tables",
        "worker_memory",
    ]
    assert data["load"] == {
        "basis": "measured",
        "records": 4,
        "bytes": 100,
        "partition_records": [1, 3],
        "partition_bytes": [10, 90],
        "records_per_second": 2.0,
        "distinct_keys": None,
        "sampled_keys": 4,
    }
    assert data["member_steps"] == [
        {
            "assignor": "sticky",
            "partitions": 2,
            "before": 1,
            "after": 2,
            "moves": 1,
            "fraction": 0.5,
            "ideal_fraction": 0.5,
            "bytes_moved": 90,
            "most_bytes_before": 100,
            "most_bytes_after": 90,
            "max_over_mean_before": 1.0,
            "max_over_mean_after": 1.8,
            "fewest_partitions": 1,
            "most_partitions": 1,
        }
    ]
    assert set(data["partition_counts"][0]) == {
        *("partitions", "basis", "bytes_mean", "bytes_max", "max_over_mean", "records_per_second"),
    }
    assert set(data["partition_steps"][0]) == {
        *("partitioner", "hash", "before", "after", "keys", "basis", "fraction", "ideal_fraction"),
        *("bytes_moved", "bytes_fraction"),
    }
