"""The functions that hash keys, compiled by numba and in NumPy, give the same results bit for bit."""

import subprocess
import sys
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shardyard.placement import HASH_NAMES, HASHES, ID_KINDS, generate_ids, numba_kernels, numpy_kernels
from shardyard.placement.hashes import _bytes_and_offsets
from tests.placement import reference

SHORT = numpy_kernels.SHORT_BYTES
lengths = st.integers(0, 40) | st.sampled_from([SHORT - 1, SHORT, SHORT + 1, 3 * SHORT])
keys_of_all_lengths = st.lists(lengths.flatmap(lambda n: st.binary(min_size=n, max_size=n)), min_size=1, max_size=60)
some_hashes = st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=50)


def hash_all(kernels: Any, name: str, keys: pa.Array) -> list[int]:
    out = np.empty(len(keys), np.uint64 if HASHES[name].bits == 64 else np.uint32)
    getattr(kernels, f"{name}_many")(*_bytes_and_offsets(keys), out)
    hashes: list[int] = out.tolist()
    return hashes


@pytest.mark.parametrize("name", HASHES)
@given(keys=keys_of_all_lengths)
@example(keys=[b""])
@example(keys=[bytes([n]) * n for n in range(SHORT + 2)])
def test_numpy_and_numba_hash_alike_one_by_one_and_together(name: str, keys: list[bytes]) -> None:
    one_by_one = [getattr(numpy_kernels, f"{name}_one")(key) for key in keys]
    assert one_by_one == [int(getattr(numba_kernels, f"{name}_one")(key)) for key in keys]
    array = pa.array([b"before", *keys], pa.binary()).slice(1)
    assert hash_all(numpy_kernels, name, array) == one_by_one
    assert hash_all(numba_kernels, name, array) == one_by_one


@pytest.mark.parametrize("name", HASHES)
def test_more_keys_than_are_hashed_at_a_time_keep_their_order(name: str) -> None:
    keys = pa.array([b"%d" % n * (n % 4) for n in range(2 * numpy_kernels.TOGETHER_KEYS + 100)], pa.binary())
    assert hash_all(numpy_kernels, name, keys) == hash_all(numba_kernels, name, keys)


@given(terms=st.lists(st.binary(max_size=30), max_size=4))
def test_numpy_and_numba_continue_phash2_alike(terms: list[bytes]) -> None:
    states = [0, 0]
    for term in terms:
        states = [int(k.phash2_element(term, s)) for k, s in zip((numpy_kernels, numba_kernels), states, strict=True)]
    ends = [int(k.phash2_end(s)) for k, s in zip((numpy_kernels, numba_kernels), states, strict=True)]
    assert ends[0] == ends[1]


@given(hashes=some_hashes, buckets=st.integers(1, 100_000))
@example(hashes=[0, 2**64 - 1, 2**63], buckets=1)
def test_numpy_and_numba_jump_alike(hashes: list[int], buckets: int) -> None:
    expected = [reference.jump(key, buckets) for key in hashes]
    assert [numpy_kernels.jump_one(key, buckets) for key in hashes] == expected
    for kernels in (numpy_kernels, numba_kernels):
        keys, out = np.array(hashes, np.uint64), np.empty(len(hashes), np.int32)
        kernels.jump_many(keys, buckets, out)
        assert out.tolist() == expected
        assert keys.tolist() == hashes, "the hashes stay as they are"


@given(key=st.binary(max_size=50), buckets=st.integers(1, 1000))
def test_hash_and_jump_in_one_call_are_the_same_as_in_two(key: bytes, buckets: int) -> None:
    for kernels in (numpy_kernels, numba_kernels):
        assert kernels.xxh64_jump(key, buckets) == reference.jump(numpy_kernels.xxh64_one(key), buckets)
        assert kernels.fnv1a64_jump(key, buckets) == reference.jump(reference.fnv1a64(key), buckets)


@pytest.mark.processes
def test_without_numba_keys_are_placed_by_numpy_as_with_it() -> None:
    program = (
        "import sys\n{}from shardyard.placement import Jump, Modulus\n"
        "from shardyard.placement.kernels import kernels\nimport pyarrow as pa\n"
        "keys = pa.array([f'user-{{n}}' for n in range(1000)])\n"
        "print([Modulus(name, 12).place_array(keys).to_pylist() for name in ('fnv1a32', 'murmur2', 'phash2')],"
        "Jump('xxh64', 256).place_array(keys).to_pylist())\nprint(kernels.__name__)"
    )
    printed = []
    for blocked in ("sys.modules['numba'] = None\n", ""):
        command = [sys.executable, "-c", program.format(blocked)]
        printed.append(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines())
    assert [lines[-1].rpartition(".")[2] for lines in printed] == ["numpy_kernels", "numba_kernels"]
    assert printed[0][0] == printed[1][0]


def test_the_names_are_those_of_the_hashes_and_kinds_of_ids() -> None:
    assert tuple(HASHES) == HASH_NAMES
    for kind in ID_KINDS:
        assert len(next(generate_ids(kind, 10))) == 10


@given(hashes=some_hashes, points=st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=30))
@example(hashes=[0, 2**64 - 1, 2**63], points=[0, 0, 2**63])
def test_numpy_and_numba_choose_points_alike(hashes: list[int], points: list[int]) -> None:
    keys, places = np.array(hashes, np.uint64), np.array(points, np.uint64)
    results = []
    for kernels in (numpy_kernels, numba_kernels):
        out = np.empty(len(keys), np.int32)
        kernels.rendezvous_many(keys, places, out)
        signed = [key - 2**64 if key >= 2**63 else key for key in hashes]
        assert [int(kernels.rendezvous_one(key, places)) for key in signed] == out.tolist()
        results.append(out.tolist())
    assert results[0] == results[1]
