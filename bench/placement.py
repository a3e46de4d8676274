"""Placement on one core: keys of about 16 bytes in an Arrow array, compared with plain Python code.

Run it with `make bench` or `python -m bench.placement`; `bench/README.md` explains how each figure is measured.
"""

import time
from collections.abc import Callable
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from shardyard.placement import (
    HASH_NAMES,
    Jump,
    Modulus,
    Partitioner,
    balance,
    generate_ids,
    hash_named,
    numba_kernels,
    numpy_kernels,
)
from shardyard.placement.hashes import _bytes_and_offsets

KEYS = 4_000_000
ROUNDS = 9


def best(work: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Seconds of the fastest of `rounds` runs, after one run to warm up and compile."""
    work()
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def report(name: str, per_second: float, target: float, unit: str) -> None:
    print(f"{name:<52} {per_second:>10.1f} {unit:<12} target {target:g}")


def text_keys() -> pa.Array:
    """Distinct keys of 12 to 20 bytes, 16 on average."""
    rng = np.random.default_rng(1)
    lengths = rng.integers(0, 9, KEYS)
    suffixes = pa.array(["x" * n for n in range(9)]).take(pa.array(lengths))
    return pc.binary_join_element_wise(
        "user", pa.array(rng.permutation(KEYS) + 10_000_000).cast(pa.string()), suffixes, ""
    )


def bench_arrays(keys: pa.Array) -> None:
    cases: tuple[tuple[str, Partitioner, int], ...] = (
        ("fnv1a32 + modulus(1000)", Modulus("fnv1a32", 1000), 50),
        ("xxh64 + jump(256)", Jump("xxh64", 256), 20),
        ("phash2 + modulus(12)", Modulus("phash2", 12), 30),
        ("murmur2 + modulus(12)", Modulus("murmur2", 12), 30),
    )
    for name, partitioner, target in cases:
        seconds = best(partial(partitioner.place_array, keys))
        report(f"{name}, Arrow array", KEYS / seconds / 1e6, target, "M keys/s")


def bench_single_keys() -> None:
    key = "user-1234567890a"
    cases: tuple[tuple[str, Partitioner], ...] = (
        ("fnv1a32 + modulus", Modulus("fnv1a32", 12)),
        ("xxh64 + jump(256)", Jump("xxh64", 256)),
        ("murmur2 + modulus", Modulus("murmur2", 12)),
        ("phash2 + modulus", Modulus("phash2", 12)),
    )
    for name, partitioner in cases:
        place = partitioner.place

        def loop() -> None:
            for _ in range(100_000):
                place(key)  # noqa: B023 called before `place` changes

        report(f"{name}, one key", best(loop) / 100_000 * 1e9, 1000, "ns")


def bench_alternative(keys: pa.Array) -> None:
    """What a Python user would write instead: a list comprehension over the hash of a C library."""
    sample = keys.slice(0, 200_000)
    values = sample.cast(pa.binary()).to_pylist()
    xxh64 = xxhash.xxh64_intdigest
    plain = len(values) / best(lambda: [xxh64(key) % 1000 for key in values], 3)
    ours = len(values) / best(lambda: Modulus("xxh64", 1000).place_array(sample), 3)
    print(f"xxhash in a list comprehension: {plain / 1e6:.1f} M keys/s; Shardyard is {ours / plain:.0f} times as fast")


def bench_small_batches(keys: pa.Array) -> None:
    """Batches of 500, as brokers place them, with numba and without it."""
    values, offsets = _bytes_and_offsets(keys.slice(0, 500))
    for name in HASH_NAMES:
        out = np.empty(500, np.uint64 if hash_named(name).bits == 64 else np.uint32)
        rates = []
        for kernels in (numba_kernels, numpy_kernels):
            work = partial(getattr(kernels, f"{name}_many"), values, offsets, out)
            rates.append(500 / best(work, 500) / 1e6)
        print(f"{name}, batches of 500: {rates[0]:.0f} M keys/s with numba, {rates[1]:.1f} M keys/s without it")


def bench_check() -> None:
    partitioner = Modulus("fnv1a32", 1000)
    start = time.perf_counter()
    counts = np.zeros(1000, np.int64)
    for chunk in generate_ids("dense", 100_000_000):
        counts += np.bincount(partitioner.place_array(chunk).to_numpy(), minlength=1000)
    seconds = time.perf_counter() - start
    figures = balance(counts)
    print(
        f"check of 100 M dense ids: {seconds:.1f} s (target 10), total deviation {figures.total_deviation:.0f}, "
        f"largest deviation {figures.max_deviation:.0f}"
    )


if __name__ == "__main__":
    all_keys = text_keys()
    bench_arrays(all_keys)
    bench_single_keys()
    bench_small_batches(all_keys)
    bench_alternative(all_keys)
    bench_check()
