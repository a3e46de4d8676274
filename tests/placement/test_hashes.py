import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from shardyard.model import InvalidValue
from shardyard.placement import HASHES, Key, generate_ids, hash_named, phash2
from shardyard.placement.kernels import kernels
from tests.placement import reference

PHASH2_VECTORS = json.loads((Path(__file__).parent / "phash2.json").read_text())["vectors"]

ORACLES = {
    "fnv1a32": reference.fnv1a32,
    "fnv1a64": reference.fnv1a64,
    "murmur2": reference.murmur2,
    "xxh64": xxhash.xxh64_intdigest,
}


@pytest.mark.parametrize(
    ("key", "expected32", "expected64"),
    [
        ("", 0x811C9DC5, 0xCBF29CE484222325),
        ("a", 0xE40C292C, 0xAF63DC4C8601EC8C),
        ("b", 0xE70C2DE5, 0xAF63DF4C8601F1A5),
        ("foobar", 0xBF9CF968, 0x85944171F73967E8),
        ("chongo was here!\n", 0xD49930D5, 0x46810940EFF5F915),
    ],
)
def test_fnv1a_matches_its_published_vectors(key: str, expected32: int, expected64: int) -> None:
    assert hash_named("fnv1a32")(key) == expected32
    assert hash_named("fnv1a64")(key) == expected64


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("", 0xEF46DB3751D8E999),
        ("a", 0xD24EC4F1A98C6E5B),
        ("abc", 0x44BC2CF5AD770999),
        ("Nobody inspects the spammish repetition", 0xFBCEA83C8A378BF1),
    ],
)
def test_xxh64_matches_its_published_vectors(key: str, expected: int) -> None:
    assert hash_named("xxh64")(key) == expected


@pytest.mark.parametrize(
    ("key", "signed"),
    [
        ("21", -973932308),
        ("foobar", -790332482),
        ("a-little-bit-long-string", -985981536),
        ("a-little-bit-longer-string", -1486304829),
        ("lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58897971),
        ("abc", 479470107),
    ],
)
def test_murmur2_matches_the_vectors_of_kafkas_own_tests(key: str, signed: int) -> None:
    assert hash_named("murmur2")(key) == signed % 2**32


@pytest.mark.parametrize("vector", [v for v in PHASH2_VECTORS if v["kind"] != "binary"], ids=lambda v: v["term"])
def test_phash2_of_a_list_matches_erlang(vector: dict[str, Any]) -> None:
    keys = [bytes.fromhex(key["hex"]) for key in vector["keys"]]
    assert phash2(keys) == vector["phash2_27"]
    assert phash2(keys, 2**32) == vector["hash32"]
    for shards, index in vector["rem"].items():
        assert phash2(keys) % int(shards) == index
    if len(keys) == 1:
        assert hash_named("phash2")(keys[0]) == vector["phash2_27"]


@pytest.mark.parametrize("vector", [v for v in PHASH2_VECTORS if v["kind"] == "binary"], ids=lambda v: v["term"])
def test_phash2_of_a_bare_binary_matches_erlang(vector: dict[str, Any]) -> None:
    assert kernels.phash2_element(bytes.fromhex(vector["keys"][0]["hex"]), 0) == vector["hash32"]


@pytest.mark.parametrize(("keys", "hash_range"), [("key", 4), (b"key", 4), (["key"], 0), (["key"], 1.5)])
def test_phash2_requires_a_list_and_a_range(keys: Any, hash_range: Any) -> None:
    with pytest.raises(InvalidValue, match="expected a"):
        phash2(keys, hash_range)


def test_phash2_hashes_the_list_of_keys_and_not_the_bare_key() -> None:
    bare = next(v for v in PHASH2_VECTORS if v["kind"] == "binary" and v["keys"][0]["hex"])
    assert phash2([bytes.fromhex(bare["keys"][0]["hex"])]) != bare["phash2_27"]


@pytest.mark.parametrize("name", ORACLES)
@given(key=st.binary(max_size=100))
def test_a_compiled_hash_equals_its_reference_implementation(name: str, key: bytes) -> None:
    assert hash_named(name)(key) == ORACLES[name](key)


keys_and_types: st.SearchStrategy[tuple[list[Key], pa.DataType]] = st.one_of(
    st.tuples(
        st.lists(st.none() | st.binary(max_size=40)),
        st.sampled_from([pa.binary(), pa.large_binary(), pa.binary_view()]),
    ),
    st.tuples(
        st.lists(st.none() | st.text(max_size=20)),
        st.sampled_from([pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())]),
    ),
    st.tuples(st.lists(st.none() | st.binary(min_size=6, max_size=6)), st.just(pa.binary(6))),
    st.tuples(st.lists(st.none() | st.just(b"")), st.just(pa.binary(0))),
    st.tuples(st.lists(st.none()), st.just(pa.null())),
    st.tuples(st.lists(st.none() | st.integers(-(2**63), 2**63 - 1)), st.just(pa.int64())),
    st.tuples(st.lists(st.none() | st.integers(0, 2**64 - 1)), st.just(pa.uint64())),
    st.tuples(st.lists(st.none() | st.integers(-(2**15), 2**15 - 1)), st.just(pa.int16())),
)


@pytest.mark.parametrize("name", HASHES)
@given(keys_and_type=keys_and_types, data=st.data())
def test_hashing_an_array_equals_hashing_its_keys_one_by_one(
    name: str, keys_and_type: tuple[list[Key], pa.DataType], data: st.DataObject
) -> None:
    keys, kind = keys_and_type
    start = data.draw(st.integers(0, len(keys)))
    function = hash_named(name)
    array = pa.array(keys, kind).slice(start)
    assert function.array(array).tolist() == [function(key) for key in keys[start:]]
    assert function.array(pa.chunked_array([array, array], kind)).tolist() == function.array(array).tolist() * 2


@pytest.mark.parametrize("name", HASHES)
def test_a_missing_key_hashes_as_the_empty_key(name: str) -> None:
    function = hash_named(name)
    assert function(None) == function(b"") == function("")
    assert function.array(pa.array([None, 7], pa.int64())).tolist() == [function(b""), function(7)]
    assert function.array(pa.chunked_array([], pa.string())).tolist() == []


def test_a_null_hashes_as_the_empty_key_whatever_bytes_the_buffer_holds_for_it() -> None:
    valid = pa.array([b"abc", b"def"])
    masked = pa.Array.from_buffers(pa.binary(), 2, [pa.py_buffer(b"\x01"), *valid.buffers()[1:]])
    assert masked.to_pylist() == [b"abc", None]
    function = hash_named("fnv1a32")
    assert function.array(masked).tolist() == [function(b"abc"), function(b"")]


@pytest.mark.parametrize("name", HASHES)
def test_an_int_hashes_as_eight_little_endian_bytes(name: str) -> None:
    function = hash_named(name)
    assert function(1) == function(b"\x01" + bytes(7))
    assert function(-1) == function(2**64 - 1) == function(b"\xff" * 8)


@pytest.mark.parametrize("bad", [1.5, True, 2**64, -(2**63) - 1, ["a"], "\ud800"])
def test_a_key_that_cannot_be_hashed_is_refused(bad: Any) -> None:
    with pytest.raises(InvalidValue, match="key is"):
        hash_named("fnv1a32")(bad)


@pytest.mark.parametrize("bad", [pa.array([1.5]), pa.array([[1]]), pa.array([True]), pa.array([], pa.float64())])
def test_an_array_of_another_type_is_refused(bad: pa.Array) -> None:
    with pytest.raises(InvalidValue, match="expected binary, string or an integer"):
        hash_named("fnv1a32").array(bad)


def test_an_unknown_hash_is_refused_with_a_list_of_the_known_ones() -> None:
    with pytest.raises(InvalidValue, match="'md5': expected one of fnv1a32, fnv1a64, xxh64, murmur2, phash2"):
        hash_named("md5")


@pytest.mark.parametrize("kind", ["dense", "strided", "sparse", "snowflake", "text"])
def test_ids_of_every_kind_are_distinct(kind: str) -> None:
    chunks = list(generate_ids(kind, 25_000, chunk=10_000))
    assert [len(chunk) for chunk in chunks] == [10_000, 10_000, 5_000]
    assert len(pa.chunked_array(chunks).unique()) == 25_000


def test_snowflake_ids_have_41_8_and_14_bits_and_sort_by_time() -> None:
    ids = np.concatenate([chunk.to_numpy() for chunk in generate_ids("snowflake", 1000)])
    assert (ids > 0).all()
    assert (np.diff(ids >> 22) >= 0).all()
    assert set((ids >> 14 & 0xFF).tolist()) == set(range(8))
