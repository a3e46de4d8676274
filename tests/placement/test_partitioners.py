from collections import Counter
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardyard.model import InvalidValue
from shardyard.placement import Jump, Modulus, Partitioner, RoundRobin, balance, generate_ids, jump, partitioner_named
from tests.placement import reference


@pytest.mark.parametrize(
    ("channel", "partition"), [("ch_general", 25), ("ch_dev", 40), ("ch_random", 123), ("dm_alice_bob", 189)]
)
def test_jump_over_xxh64_places_channels_on_their_documented_partitions(channel: str, partition: int) -> None:
    assert Jump("xxh64", 256).place(channel) == partition


@pytest.mark.parametrize(
    ("key", "buckets", "expected"),
    [(42, 57, 43), (0xDEAD10CC, 666, 361), (256, 1024, 520), (0, 1000, 0), (2**64 - 1, 1000, 313)],
)
def test_jump_matches_its_published_vectors(key: int, buckets: int, expected: int) -> None:
    assert jump(key, buckets) == expected


@pytest.mark.parametrize(("key", "buckets"), [(5, 0), (5, 2.5), (2**64, 5), (-1, 5)])
def test_jump_requires_a_64_bit_hash_and_at_least_one_bucket(key: Any, buckets: Any) -> None:
    with pytest.raises(InvalidValue):
        jump(key, buckets)


@given(key=st.integers(0, 2**64 - 1), buckets=st.integers(1, 5000))
def test_jump_equals_its_reference_implementation(key: int, buckets: int) -> None:
    assert jump(key, buckets) == reference.jump(key, buckets)


def test_modulus_of_murmur2_places_keys_as_kafkas_own_partitioner_does() -> None:
    for key in ("21", "foobar", "a-little-bit-long-string"):
        assert Modulus("murmur2", 12).place(key) == (reference.murmur2(key.encode()) & 0x7FFFFFFF) % 12


@pytest.mark.parametrize(
    ("prefix", "keys", "shards", "expected"),
    [("key", 100, 4, [24, 27, 20, 29]), ("k", 600, 3, [203, 190, 207])],
)
def test_modulus_of_phash2_spreads_keys_as_rabbitmq_does(
    prefix: str, keys: int, shards: int, expected: list[int]
) -> None:
    places = Modulus("phash2", shards).place_array(pa.array([f"{prefix}{i}" for i in range(keys)]))
    assert np.bincount(places.to_numpy(), minlength=shards).tolist() == expected


def test_a_partition_of_weight_k_gets_k_slots() -> None:
    weighted, plain = Modulus("phash2", 3, weights=[1, 2, 1]), Modulus("phash2", 4)
    for i in range(200):
        assert weighted.place(f"key{i}") == [0, 1, 1, 2][plain.place(f"key{i}")]


rules = st.one_of(
    st.builds(Modulus, st.sampled_from(["fnv1a32", "fnv1a64", "xxh64", "murmur2", "phash2"]), st.integers(1, 3000)),
    st.builds(Jump, st.sampled_from(["fnv1a64", "xxh64"]), st.integers(1, 3000)),
    st.lists(st.integers(1, 5), min_size=1, max_size=9).map(lambda w: Modulus("phash2", len(w), w)),
)


@given(rule=rules, keys=st.lists(st.none() | st.text(max_size=30), max_size=60))
def test_placing_an_array_equals_placing_its_keys_one_by_one(rule: Partitioner, keys: list[str | None]) -> None:
    places = rule.place_array(pa.array(keys, pa.string()))
    assert places.type == pa.int32()
    assert places.to_pylist() == [rule.place(key) for key in keys]
    assert all(0 <= place < rule.partitions for place in places.to_pylist())


def test_round_robin_continues_across_single_keys_and_arrays() -> None:
    rule = RoundRobin(3)
    assert [rule.place("a"), rule.place()] == [0, 1]
    assert rule.place_array(pa.array(["b"] * 4)).to_pylist() == [2, 0, 1, 2]
    assert rule.place(None) == 0


def test_from_12_to_13_partitions_jump_moves_a_thirteenth_and_modulus_nearly_all() -> None:
    (keys,) = generate_ids("text", 200_000)
    moved = {}
    for name in ("modulus", "jump"):
        before = partitioner_named(name, 12, "xxh64").place_array(keys).to_numpy()
        after = partitioner_named(name, 13, "xxh64").place_array(keys).to_numpy()
        moved[name] = (before != after).mean()
        if name == "jump":
            assert set(after[before != after]) == {12}, "jump moves keys to the new partition only"
    assert moved["modulus"] == pytest.approx(12 / 13, abs=0.003)
    assert moved["jump"] == pytest.approx(1 / 13, abs=0.003)


def test_fnv1a_32_on_100_million_dense_ids_gives_the_known_deviations() -> None:
    rule = Modulus("fnv1a32", 1000)
    counts = np.zeros(1000, np.int64)
    for chunk in generate_ids("dense", 100_000_000):
        counts += np.bincount(rule.place_array(chunk).to_numpy(), minlength=1000)
    figures = balance(counts)
    assert (figures.total_deviation, figures.max_deviation) == (53_634, 185)


@pytest.mark.parametrize("ids", ["strided", "sparse", "snowflake", "text"])
def test_xxh64_spreads_every_kind_of_ids_as_evenly_as_chance(ids: str) -> None:
    rule = Modulus("xxh64", 1000)
    places: Counter[int] = Counter()
    for chunk in generate_ids(ids, 1_000_000):
        places.update(rule.place_array(chunk).to_pylist())
    assert 0.8 < balance([places[p] for p in range(1000)]).chi2_per_df < 1.2


@pytest.mark.parametrize("bad", [0, -1, 2.0, "12", True, None, 2**31])
def test_a_partition_count_must_be_an_integer_of_at_least_1(bad: Any) -> None:
    for make in (lambda: Modulus("fnv1a32", bad), lambda: Jump("xxh64", bad), lambda: RoundRobin(bad)):
        with pytest.raises(InvalidValue, match="partitions is"):
            make()


@pytest.mark.parametrize("weights", [[1, 2.5, 1], [1, 0, 1], [1, 1], [1, -1, 1], [1, "2", 1]])
def test_weights_must_be_integers_one_for_each_partition(weights: Any) -> None:
    with pytest.raises(InvalidValue, match="weight"):
        Modulus("phash2", 3, weights)


@pytest.mark.parametrize("name", ["fnv1a32", "murmur2", "phash2"])
def test_the_jump_partitioner_requires_a_64_bit_hash(name: str) -> None:
    with pytest.raises(InvalidValue, match="64-bit hash for jump"):
        Jump(name, 4)


def test_an_unknown_partitioner_or_hash_is_refused() -> None:
    with pytest.raises(InvalidValue, match="expected one of modulus, jump, round_robin"):
        partitioner_named("ring", 4)
    for name in ("modulus", "jump", "round_robin"):
        with pytest.raises(InvalidValue, match="hash is 'md5'"):
            partitioner_named(name, 4, "md5")
