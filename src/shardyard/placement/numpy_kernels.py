"""The hashes and jump in NumPy and plain Python, for installations without numba: the functions of `numba_kernels`.

`<hash>_many` hashes short keys together, one byte or word of all of them at a time, and longer ones one by one.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from xxhash import xxh64_intdigest

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint32]
Numbers = npt.NDArray[Any]

SHORT_BYTES = 128
"""Keys up to this length are hashed together: a step costs as much for one key as for a hundred, so that keys of very
different lengths are better hashed one by one."""
TOGETHER_KEYS = 4096
"""As many keys are hashed at a time, which takes about 5 MB."""
_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF


class _Keys:
    """Short keys as a table with one row per position and one column per key, the longest first.

    At position i only the first keys are that long, so a step works on `table[i, :count]`.
    """

    def __init__(self, data: Bytes, starts: Numbers, lengths: Numbers, width: int) -> None:
        """`width`: the bytes of a position. The last word of a key is filled up with zeros."""
        self.order = np.argsort(lengths.astype(np.uint8), kind="stable")[::-1]  # NumPy sorts bytes in linear time
        self.lengths = lengths[self.order]
        longest = int(self.lengths[0])
        rows = -(-longest // width)
        positions = np.arange(rows * width)
        places = starts[self.order][:, None] + positions
        inside = positions < self.lengths[:, None]
        table = data.take(places, mode="clip") * inside
        self.table = np.ascontiguousarray(table.view(f"<u{width}").T)
        self._counts = np.searchsorted(-self.lengths, -width * np.arange(1, rows + 1), side="right").tolist()

    def whole(self) -> Iterator[tuple[int, int]]:
        """(position, how many keys fill it), as long as there is one."""
        return ((i, count) for i, count in enumerate(self._counts) if count)


def _hash_many(
    data: Bytes,
    offsets: Numbers,
    out: Numbers,
    width: int,
    one: Callable[[bytes], int],
    together: Callable[[_Keys], Numbers],
) -> None:
    starts = offsets[:-1].astype(np.int64)
    lengths = np.diff(offsets).astype(np.int64)
    is_long = lengths > SHORT_BYTES
    for i in np.flatnonzero(is_long).tolist():
        out[i] = one(data[starts[i] : starts[i] + lengths[i]].tobytes())
    short = np.flatnonzero(~is_long) if is_long.any() else np.arange(len(out))
    for first in range(0, len(short), TOGETHER_KEYS):
        chosen = short[first : first + TOGETHER_KEYS]
        keys = _Keys(data, starts[chosen], lengths[chosen], width)
        out[chosen[keys.order]] = together(keys)


# FNV-1a -----------------------------------------------------------------------------------------------------

_FNV32_BASIS, _FNV32_PRIME = 0x811C9DC5, 0x01000193
_FNV64_BASIS, _FNV64_PRIME = 0xCBF29CE484222325, 0x100000001B3


def fnv1a32_one(key: bytes) -> int:
    h = _FNV32_BASIS
    for byte in key:
        h = (h ^ byte) * _FNV32_PRIME & _MASK32
    return h


def fnv1a64_one(key: bytes) -> int:
    h = _FNV64_BASIS
    for byte in key:
        h = (h ^ byte) * _FNV64_PRIME & _MASK64
    return h


def _fnv1a(keys: _Keys, h: Numbers, prime: Any) -> Numbers:
    table = keys.table.astype(h.dtype)
    for i, count in keys.whole():
        active = h[:count]
        active ^= table[i, :count]
        active *= prime
    return h


def fnv1a32_many(data: Bytes, offsets: Numbers, out: Numbers) -> None:
    def together(keys: _Keys) -> Numbers:
        return _fnv1a(keys, np.full(len(keys.order), _FNV32_BASIS, np.uint32), np.uint32(_FNV32_PRIME))

    _hash_many(data, offsets, out, 1, fnv1a32_one, together)


def fnv1a64_many(data: Bytes, offsets: Numbers, out: Numbers) -> None:
    def together(keys: _Keys) -> Numbers:
        return _fnv1a(keys, np.full(len(keys.order), _FNV64_BASIS, np.uint64), np.uint64(_FNV64_PRIME))

    _hash_many(data, offsets, out, 1, fnv1a64_one, together)


# xxHash64, seed 0: the C library is fast enough for one key at a time ---------------------------------------


def xxh64_one(key: bytes) -> int:
    return xxh64_intdigest(key)


def xxh64_many(data: Bytes, offsets: Numbers, out: Numbers) -> None:
    buffer, ends = data.data, offsets.tolist()
    out[:] = [xxh64_intdigest(buffer[start:end]) for start, end in pairwise(ends)]


# Kafka's murmur2 --------------------------------------------------------------------------------------------

_MURMUR_SEED, _MURMUR_M = 0x9747B28C, 0x5BD1E995


def murmur2_one(key: bytes) -> int:
    h = _MURMUR_SEED ^ len(key)
    whole = len(key) & ~3
    for i in range(0, whole, 4):
        k = int.from_bytes(key[i : i + 4], "little") * _MURMUR_M & _MASK32
        k = (k ^ k >> 24) * _MURMUR_M & _MASK32
        h = h * _MURMUR_M & _MASK32 ^ k
    if len(key) > whole:
        h = (h ^ int.from_bytes(key[whole:], "little")) * _MURMUR_M & _MASK32
    h = (h ^ h >> 13) * _MURMUR_M & _MASK32
    return h ^ h >> 15


def _murmur2(keys: _Keys) -> Numbers:
    m = np.uint32(_MURMUR_M)
    h = keys.lengths.astype(np.uint32) ^ np.uint32(_MURMUR_SEED)
    for i, count in keys.whole():
        k = keys.table[i, :count] * m
        k ^= k >> np.uint32(24)
        k *= m
        active = h[:count]
        active *= m
        active ^= k
    partial = np.flatnonzero(keys.lengths % 4)
    h[partial] = (h[partial] ^ keys.table[keys.lengths[partial] // 4, partial]) * m
    h ^= h >> np.uint32(13)
    h *= m
    return h ^ (h >> np.uint32(15))


def murmur2_many(data: Bytes, offsets: Numbers, out: Numbers) -> None:
    _hash_many(data, offsets, out, 4, murmur2_one, _murmur2)


# Erlang's phash2: Bob Jenkins' lookup2 over the terms of a list --------------------------------------------

PHASH2_RANGE = 2**27  # the range that RabbitMQ's x-modulus-hash exchange passes to phash2
_LOOKUP2_INIT = 0x9E3779B9
_ERLANG_BINARY = 0x08D12E65
_ERLANG_NIL_A, _ERLANG_NIL_B = 0x3C6EF374, 0x3C6EF372
_ERLANG_NIL_OF_ZERO = 3468870702


def _mix(a: int, b: int, c: int) -> tuple[int, int, int]:
    a = (a - b - c ^ c >> 13) & _MASK32
    b = (b - c - a ^ a << 8) & _MASK32
    c = (c - a - b ^ b >> 13) & _MASK32
    a = (a - b - c ^ c >> 12) & _MASK32
    b = (b - c - a ^ a << 16) & _MASK32
    c = (c - a - b ^ b >> 5) & _MASK32
    a = (a - b - c ^ c >> 3) & _MASK32
    b = (b - c - a ^ a << 10) & _MASK32
    c = (c - a - b ^ b >> 15) & _MASK32
    return a, b, c


def phash2_element(key: bytes, previous: int) -> int:
    """Continue the hash of the preceding terms (`previous`) with a binary."""
    c = _ERLANG_BINARY + previous & _MASK32
    if not key:
        return c
    a = b = _LOOKUP2_INIT
    whole = len(key) // 12 * 12
    for i in range(0, whole, 12):
        a = a + int.from_bytes(key[i : i + 4], "little") & _MASK32
        b = b + int.from_bytes(key[i + 4 : i + 8], "little") & _MASK32
        c = c + int.from_bytes(key[i + 8 : i + 12], "little") & _MASK32
        a, b, c = _mix(a, b, c)
    rest = int.from_bytes(key[whole:], "little")
    a = a + rest & _MASK32
    b = b + (rest >> 32) & _MASK32
    c = c + len(key) + (rest >> 64 << 8) & _MASK32
    return _mix(a, b, c)[2]


def phash2_end(previous: int) -> int:
    """Continue the hash of the preceding terms with the nil that ends a list."""
    return _mix(_ERLANG_NIL_A, _ERLANG_NIL_B, previous)[2] if previous else _ERLANG_NIL_OF_ZERO


def phash2_one(key: bytes) -> int:
    return phash2_end(phash2_element(key, 0)) & PHASH2_RANGE - 1


def _mix_arrays(a: Words, b: Words, c: Words) -> None:
    """`_mix` in place, for many at once."""
    for right1, left, right2 in ((13, 8, 13), (12, 16, 5), (3, 10, 15)):
        a -= b
        a -= c
        a ^= c >> np.uint32(right1)
        b -= c
        b -= a
        b ^= a << np.uint32(left)
        c -= a
        c -= b
        c ^= b >> np.uint32(right2)


def _phash2(keys: _Keys) -> Numbers:
    count, words = len(keys.order), len(keys.table)
    a, b = np.full(count, _LOOKUP2_INIT, np.uint32), np.full(count, _LOOKUP2_INIT, np.uint32)
    c = np.full(count, _ERLANG_BINARY, np.uint32)
    table = np.vstack([keys.table, np.zeros((3, count), np.uint32)])  # so that each key has three words after its last
    for i, filled in keys.whole():
        if i % 3 == 2:  # the third word of a block, of those keys that have it
            for part, word in ((a, i - 2), (b, i - 1), (c, i)):
                part[:filled] += table[word, :filled]
            _mix_arrays(a[:filled], b[:filled], c[:filled])
    tail = keys.lengths // 12 * 3
    column = np.arange(count)
    a += table[tail, column]
    b += table[np.minimum(tail + 1, words + 2), column]
    c += keys.lengths.astype(np.uint32)
    c += table[np.minimum(tail + 2, words + 2), column] << np.uint32(8)
    _mix_arrays(a, b, c)
    c[keys.lengths == 0] = _ERLANG_BINARY
    is_zero = c == 0
    a[:], b[:] = _ERLANG_NIL_A, _ERLANG_NIL_B
    _mix_arrays(a, b, c)
    c[is_zero] = _ERLANG_NIL_OF_ZERO
    return c & np.uint32(PHASH2_RANGE - 1)


def phash2_many(data: Bytes, offsets: Numbers, out: Numbers) -> None:
    _hash_many(data, offsets, out, 4, phash2_one, _phash2)


# Jump consistent hash (Lamping and Veach, 2014) -------------------------------------------------------------

_JUMP_LCG = 2862933555777941757


def jump_one(key: int, buckets: int) -> int:
    """The bucket of a 64-bit hash, signed or unsigned."""
    state = key & _MASK64
    bucket, after = -1, 0
    while after < buckets:
        bucket = after
        state = state * _JUMP_LCG + 1 & _MASK64
        after = int((bucket + 1) * (2147483648.0 / ((state >> 33) + 1)))
    return bucket


def fnv1a64_jump(key: bytes, buckets: int) -> int:
    return jump_one(fnv1a64_one(key), buckets)


def xxh64_jump(key: bytes, buckets: int) -> int:
    return jump_one(xxh64_intdigest(key), buckets)


def jump_many(keys: npt.NDArray[np.uint64], buckets: int, out: Numbers) -> None:
    state = keys.copy()
    running = np.arange(len(keys))
    after = np.zeros(len(keys), np.int64)
    while len(running):
        out[running] = after
        state *= np.uint64(_JUMP_LCG)
        state += np.uint64(1)
        draw = ((state >> np.uint64(33)) + np.uint64(1)).astype(np.float64)
        after = ((after + 1).astype(np.float64) * (2147483648.0 / draw)).astype(np.int64)
        live = after < buckets
        running, state, after = running[live], state[live], after[live]


# Rendezvous hashing (Thaler and Ravishankar, 1998): of all points, the one that mixes with the key to the most -----


def _mix64(x: Numbers) -> Numbers:
    """The finaliser of splitmix64, in place."""
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def rendezvous_one(key: int, points: npt.NDArray[np.uint64]) -> int:
    """The index of the point of a 64-bit hash, signed or unsigned."""
    return int(np.argmax(_mix64(points ^ np.uint64(key & _MASK64))))


def rendezvous_many(keys: npt.NDArray[np.uint64], points: npt.NDArray[np.uint64], out: Numbers) -> None:
    best = _mix64(keys ^ points[0])
    out[:] = 0
    for j in range(1, len(points)):
        scores = _mix64(keys ^ points[j])
        is_better = scores > best
        out[is_better] = j
        np.maximum(best, scores, out=best)
