"""The hashes and jump, compiled by numba once and cached on disk. `numpy_kernels` has the same functions without numba.
The last section, for the routing table of fan-out, is here for the same reason as the others, and has no counterpart.

Each hash has a core that reads `data[start:end]`, `<hash>_one` for a single `bytes`, and `<hash>_many` for the
values buffer and offsets of an Arrow array. All kernels are in this one file because numba's cache only notices
changes in the file of the function it compiled. Indices are unsigned throughout: with a signed one, numba tests for
a negative index on every byte, which halves the speed.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, no-any-return"

from typing import Any

import numpy as np
from numba import float64, int64, njit, types, uint8, uint16, uint32, uint64
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.numpy_support import carray


def _jit(function):
    try:
        return njit(cache=True, nogil=True)(function)
    except RuntimeError:  # no writable cache folder (in a read-only container, for example): compile in every process
        return njit(nogil=True)(function)


def _counting(function):
    """Compile what takes microseconds: it keeps the interpreter, which other threads would not give back so soon."""
    try:
        return njit(cache=True)(function)
    except RuntimeError:
        return njit(function)


_1 = uint64(1)
_2 = uint64(2)
_3 = uint64(3)
_4 = uint64(4)
_8 = uint64(8)


@_jit
def _word32(data, i):
    """The four bytes at i as a little-endian integer (a single load, once compiled)."""
    return (
        uint32(data[i])
        | uint32(data[i + _1]) << uint32(8)
        | uint32(data[i + _2]) << uint32(16)
        | uint32(data[i + _3]) << uint32(24)
    )


@_jit
def _word64(data, i):
    return uint64(_word32(data, i)) | (uint64(_word32(data, i + _4)) << uint64(32))


@_jit
def _tail64(data, i, count):
    """The last `count` (at most 8) bytes of a key, starting at i, as a little-endian integer."""
    if i + _8 <= uint64(len(data)):  # a load and a mask, if the buffer extends far enough beyond the key
        word = _word64(data, i)
        return word if count >= _8 else word & ((_1 << (count * _8)) - _1)
    word = uint64(0)
    for j in range(count):
        word |= uint64(data[i + j]) << (j * _8)
    return word


# FNV-1a -----------------------------------------------------------------------------------------------------

_FNV32_BASIS = uint32(0x811C9DC5)
_FNV32_PRIME = uint32(0x01000193)
_FNV64_BASIS = uint64(0xCBF29CE484222325)
_FNV64_PRIME = uint64(0x00000100000001B3)


@_jit
def _fnv1a32(data, start, end, h):
    for i in range(start, end):
        h = uint32((h ^ data[i]) * _FNV32_PRIME)
    return h


@_jit
def _fnv1a64(data, start, end, h):
    for i in range(start, end):
        h = uint64((h ^ uint64(data[i])) * _FNV64_PRIME)
    return h


@_jit
def fnv1a32_one(key):
    return _fnv1a32(key, uint64(0), uint64(len(key)), _FNV32_BASIS)


@_jit
def fnv1a64_one(key):
    return _fnv1a64(key, uint64(0), uint64(len(key)), _FNV64_BASIS)


@_jit
def fnv1a32_many(data, offsets, out):
    """Hash four keys at a time: each multiplication depends on the one before it, so one key would stall the core."""
    n = uint64(len(out))
    i = uint64(0)
    while i + _4 <= n:
        s0, s1, s2 = uint64(offsets[i]), uint64(offsets[i + _1]), uint64(offsets[i + _2])
        s3, s4 = uint64(offsets[i + _3]), uint64(offsets[i + _4])
        common = min(min(s1 - s0, s2 - s1), min(s3 - s2, s4 - s3))
        h0 = h1 = h2 = h3 = _FNV32_BASIS
        for j in range(common):
            h0 = uint32((h0 ^ data[s0 + j]) * _FNV32_PRIME)
            h1 = uint32((h1 ^ data[s1 + j]) * _FNV32_PRIME)
            h2 = uint32((h2 ^ data[s2 + j]) * _FNV32_PRIME)
            h3 = uint32((h3 ^ data[s3 + j]) * _FNV32_PRIME)
        out[i] = _fnv1a32(data, s0 + common, s1, h0)
        out[i + _1] = _fnv1a32(data, s1 + common, s2, h1)
        out[i + _2] = _fnv1a32(data, s2 + common, s3, h2)
        out[i + _3] = _fnv1a32(data, s3 + common, s4, h3)
        i += _4
    while i < n:
        out[i] = _fnv1a32(data, uint64(offsets[i]), uint64(offsets[i + _1]), _FNV32_BASIS)
        i += _1


@_jit
def fnv1a64_many(data, offsets, out):
    for i in range(len(out)):
        out[i] = _fnv1a64(data, uint64(offsets[i]), uint64(offsets[i + 1]), _FNV64_BASIS)


# xxHash64, seed 0 -------------------------------------------------------------------------------------------

_XX1 = uint64(0x9E3779B185EBCA87)
_XX2 = uint64(0xC2B2AE3D27D4EB4F)
_XX3 = uint64(0x165667B19E3779F9)
_XX4 = uint64(0x85EBCA77C2B2AE63)
_XX5 = uint64(0x27D4EB2F165667C5)


@_jit
def _rotate(x, bits):
    return (x << uint64(bits)) | (x >> uint64(64 - bits))


@_jit
def _xx_round(acc, word):
    return _rotate(acc + word * _XX2, 31) * _XX1


@_jit
def _xx_merge(h, acc):
    return (h ^ _xx_round(uint64(0), acc)) * _XX1 + _XX4


@_jit
def _xxh64(data, start, end):
    i = start
    if end - start >= uint64(32):
        v1, v2, v3, v4 = _XX1 + _XX2, _XX2, uint64(0), uint64(0) - _XX1
        while i + uint64(32) <= end:
            v1 = _xx_round(v1, _word64(data, i))
            v2 = _xx_round(v2, _word64(data, i + _8))
            v3 = _xx_round(v3, _word64(data, i + uint64(16)))
            v4 = _xx_round(v4, _word64(data, i + uint64(24)))
            i += uint64(32)
        h = _rotate(v1, 1) + _rotate(v2, 7) + _rotate(v3, 12) + _rotate(v4, 18)
        h = _xx_merge(_xx_merge(_xx_merge(_xx_merge(h, v1), v2), v3), v4)
    else:
        h = _XX5
    h += end - start
    while i + _8 <= end:
        h = _rotate(h ^ _xx_round(uint64(0), _word64(data, i)), 27) * _XX1 + _XX4
        i += _8
    if i + _4 <= end:
        h = _rotate(h ^ (uint64(_word32(data, i)) * _XX1), 23) * _XX2 + _XX3
        i += _4
    while i < end:
        h = _rotate(h ^ (uint64(data[i]) * _XX5), 11) * _XX1
        i += _1
    h = (h ^ (h >> uint64(33))) * _XX2
    h = (h ^ (h >> uint64(29))) * _XX3
    return h ^ (h >> uint64(32))


@_jit
def xxh64_one(key):
    return _xxh64(key, uint64(0), uint64(len(key)))


@_jit
def xxh64_many(data, offsets, out):
    for i in range(len(out)):
        out[i] = _xxh64(data, uint64(offsets[i]), uint64(offsets[i + 1]))


# Kafka's murmur2 --------------------------------------------------------------------------------------------

_MURMUR_SEED = uint32(0x9747B28C)
_MURMUR_M = uint32(0x5BD1E995)


@_jit
def _murmur2(data, start, end):
    h = uint32(_MURMUR_SEED ^ uint32(end - start))
    i = start
    while i + _4 <= end:
        k = uint32(_word32(data, i) * _MURMUR_M)
        k = uint32((k ^ (k >> uint32(24))) * _MURMUR_M)
        h = uint32(uint32(h * _MURMUR_M) ^ k)
        i += _4
    if i < end:
        h = uint32((h ^ uint32(_tail64(data, i, end - i))) * _MURMUR_M)
    h = uint32((h ^ (h >> uint32(13))) * _MURMUR_M)
    return uint32(h ^ (h >> uint32(15)))


@_jit
def murmur2_one(key):
    return _murmur2(key, uint64(0), uint64(len(key)))


@_jit
def murmur2_many(data, offsets, out):
    for i in range(len(out)):
        out[i] = _murmur2(data, uint64(offsets[i]), uint64(offsets[i + 1]))


# Erlang's phash2: Bob Jenkins' lookup2 over the terms of a list --------------------------------------------

PHASH2_RANGE = 2**27  # the range that RabbitMQ's x-modulus-hash exchange passes to phash2
_PHASH2_MASK = uint32(PHASH2_RANGE - 1)
_LOOKUP2_INIT = uint32(0x9E3779B9)
_ERLANG_BINARY = uint32(0x08D12E65)
_ERLANG_NIL_A = uint32(0x3C6EF374)
_ERLANG_NIL_B = uint32(0x3C6EF372)
_ERLANG_NIL_OF_ZERO = uint32(3468870702)


@_jit
def _mix(a, b, c):
    a = uint32(a - b - c) ^ (c >> uint32(13))
    b = uint32(b - c - a) ^ uint32(a << uint32(8))
    c = uint32(c - a - b) ^ (b >> uint32(13))
    a = uint32(a - b - c) ^ (c >> uint32(12))
    b = uint32(b - c - a) ^ uint32(a << uint32(16))
    c = uint32(c - a - b) ^ (b >> uint32(5))
    a = uint32(a - b - c) ^ (c >> uint32(3))
    b = uint32(b - c - a) ^ uint32(a << uint32(10))
    c = uint32(c - a - b) ^ (b >> uint32(15))
    return a, b, c


@_jit
def _phash2_binary(data, start, end, previous):
    """Continue the hash of the preceding terms (`previous`) with a binary."""
    c = uint32(_ERLANG_BINARY + previous)
    if start == end:
        return c
    a = b = _LOOKUP2_INIT
    i = start
    while i + uint64(12) <= end:
        a = uint32(a + _word32(data, i))
        b = uint32(b + _word32(data, i + _4))
        c = uint32(c + _word32(data, i + _8))
        a, b, c = _mix(a, b, c)
        i += uint64(12)
    rest = end - i
    low = _tail64(data, i, min(rest, _8))
    high = _tail64(data, i + _8, rest - _8) if rest > _8 else uint64(0)
    a = uint32(a + uint32(low))
    b = uint32(b + uint32(low >> uint64(32)))
    c = uint32(c + uint32(end - start) + (uint32(high) << uint32(8)))
    return _mix(a, b, c)[2]


@_jit
def _phash2_nil(previous):
    """Continue the hash of the preceding terms with the nil that ends a list."""
    if previous == 0:
        return _ERLANG_NIL_OF_ZERO
    return _mix(_ERLANG_NIL_A, _ERLANG_NIL_B, previous)[2]


@_jit
def phash2_element(key, previous):
    return _phash2_binary(key, uint64(0), uint64(len(key)), uint32(previous))


@_jit
def phash2_end(previous):
    return _phash2_nil(uint32(previous))


@_jit
def phash2_one(key):
    return _phash2_nil(_phash2_binary(key, uint64(0), uint64(len(key)), uint32(0))) & _PHASH2_MASK


@_jit
def phash2_many(data, offsets, out):
    for i in range(len(out)):
        h = _phash2_binary(data, uint64(offsets[i]), uint64(offsets[i + 1]), uint32(0))
        out[i] = _phash2_nil(h) & _PHASH2_MASK


# Jump consistent hash (Lamping and Veach, 2014) -------------------------------------------------------------

_JUMP_LCG = uint64(2862933555777941757)
_JUMP_LANES = 16


@_jit
def jump_one(key, buckets):
    """The bucket of a 64-bit hash, passed as a signed integer: numba is slow to convert a Python int above 2**63."""
    state = uint64(key)
    bucket = int64(-1)
    after = int64(0)
    while after < buckets:
        bucket = after
        state = state * _JUMP_LCG + _1
        after = int64(float64(bucket + 1) * (2147483648.0 / float64(int64(state >> uint64(33)) + 1)))
    return bucket


@_jit
def fnv1a64_jump(key, buckets):
    return jump_one(int64(fnv1a64_one(key)), buckets)


@_jit
def xxh64_jump(key, buckets):
    return jump_one(int64(xxh64_one(key)), buckets)


@_jit
def jump_many(keys, buckets, out):
    """Run lanes in lockstep, so that the compiler can use vector registers: 3.5 times as fast as one key at a time."""
    state = np.empty(_JUMP_LANES, np.uint64)
    bucket = np.empty(_JUMP_LANES, np.int64)
    after = np.empty(_JUMP_LANES, np.int64)
    n = len(keys)
    start = 0
    while start + _JUMP_LANES <= n:
        for lane in range(_JUMP_LANES):
            state[lane] = keys[start + lane]
            bucket[lane] = -1
            after[lane] = 0
        running = True
        while running:
            running = False
            for lane in range(_JUMP_LANES):
                live = after[lane] < buckets
                bucket[lane] = after[lane] if live else bucket[lane]
                state[lane] = state[lane] * _JUMP_LCG + _1
                draw = float64(int64(state[lane] >> uint64(33)) + 1)
                step = int64(float64(bucket[lane] + 1) * (2147483648.0 / draw))
                after[lane] = step if live else after[lane]
                running |= after[lane] < buckets
        for lane in range(_JUMP_LANES):
            out[start + lane] = bucket[lane]
        start += _JUMP_LANES
    for i in range(start, n):
        out[i] = jump_one(int64(keys[i]), buckets)


# Rendezvous hashing (Thaler and Ravishankar, 1998): of all points, the one that mixes with the key to the most -----


@_jit
def _mix64(x):
    """The finaliser of splitmix64, a bijection in which every bit of the input changes half of the output."""
    x = (x ^ (x >> uint64(30))) * uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> uint64(27))) * uint64(0x94D049BB133111EB)
    return x ^ (x >> uint64(31))


@_jit
def rendezvous_one(key, points):
    """The index of the point of a 64-bit hash, passed as a signed integer as in `jump_one`."""
    hash_ = uint64(key)
    best, chosen = uint64(0), 0
    for j in range(len(points)):
        score = _mix64(hash_ ^ points[j])
        if score > best:
            best, chosen = score, j
    return chosen


@_jit
def rendezvous_many(keys, points, out):
    for i in range(len(keys)):
        out[i] = rendezvous_one(int64(keys[i]), points)


# The routing table of fan-out -------------------------------------------------------------------------------

LAYOUT = 11
"""The columns of a layout: for each fan-out partition the addresses of its arrays, the bytes of their items, and how
many users and channels they are for; see `fanout.routing.flat`."""
_STARTS, _LOW, _CHANNELS, _CHANNEL_BYTES, _BUCKETS = range(5)
_ROW_STARTS, _INBOXES, _INBOX_BYTES, _COUNTS, _COUNT_BYTES, _ROWS = range(5, LAYOUT)
_LINE = 64
"""Bytes that a processor loads into its cache at once."""


def _type_pointer(_typing, _address):
    def build(_context, builder, _signature, arguments):
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.uint64), build


_pointer: Any = intrinsic(_type_pointer)
"""An address as what `_array` takes."""
_array: Any = carray


@_jit
def _number(address, item_bytes, i):
    """Item number i of an array of unsigned integers of 1, 2 or 4 bytes."""
    at = _pointer(uint64(address + item_bytes * i))
    if item_bytes == 1:
        return int64(_array(at, 1, uint8)[0])
    if item_bytes == 2:
        return int64(_array(at, 1, uint16)[0])
    return int64(_array(at, 1, uint32)[0])


@_jit
def _lower_bound(address, item_bytes, wanted, first, end):
    """Where in a span of ascending numbers the first one is that is not below the wanted one, or its end."""
    count = end - first
    while count > 0:
        half = count >> 1
        below = _number(address, item_bytes, first + half) < wanted
        first = first + half + 1 if below else first
        count = count - half - 1 if below else half
    return first


@_jit
def _touch(address, first, end):
    """Load a span of bytes into the processor's cache."""
    touched = int64(0)
    for i in range(first, end, _LINE):
        touched += _number(address, 1, i)
    return touched


@_jit
def _add(address, item_bytes, i, change):
    """Add 1 or -1 to a count. Returns whether the sum fits; if not, nothing was changed."""
    if item_bytes > 4:
        return False
    count = _number(address, item_bytes, i) + change
    if count < 0 or count >= 1 << 8 * item_bytes:
        return False
    at = _pointer(uint64(address + item_bytes * i))
    if item_bytes == 1:
        _array(at, 1, uint8)[0] = count
    elif item_bytes == 2:
        _array(at, 1, uint16)[0] = count
    else:
        _array(at, 1, uint32)[0] = count
    return True


@_jit
def _find_rows(layout, user, skipped, spans, rows):
    """Set the first of `rows` to the partitions of a user's channels, and where in these they are. Returns how many
    there are, even if there is no room for all."""
    bucket, low = user >> 8, user & 255
    touched = int64(0)
    for p in range(len(layout)):
        first = end = int64(0)
        if not skipped[p] and bucket < layout[p, _BUCKETS]:
            first, end = _number(layout[p, _STARTS], 4, bucket), _number(layout[p, _STARTS], 4, bucket + 1)
        spans[p, 0], spans[p, 1] = first, end
    for p in range(len(layout)):
        touched += _touch(layout[p, _LOW], spans[p, 0], spans[p, 1])
    found = 0
    for p in range(len(layout)):
        first, end = spans[p, 0], spans[p, 1]
        at = _lower_bound(layout[p, _LOW], 1, low, first, end)
        while at < end and _number(layout[p, _LOW], 1, at) == low:
            if found < len(rows):
                rows[found, 0], rows[found, 1] = p, at
            found += 1
            at += 1
    return found, touched


@_counting
def count_user(layout, user, inbox, change, skipped, spans, rows):
    """Count a user of an inbox partition in (1) or out (-1) in all of its channels. `layout`: of all fan-out
    partitions; the `skipped` ones are left alone. `spans`, `rows`: room for 2 numbers per partition, and 4 per channel.

    Returns how many channels were found, and how many of them are left to the caller, because there is no count to
    change, or it does not fit: they are the first of `rows`, with the partition's row of the layout and the channel. If
    `rows` has no room for all that were found, nothing was changed. The third number means nothing.

    Nearly every number lies in a place of memory that is not in the processor's cache. So the same step is taken for
    all partitions or channels before the next one: the processor then waits for many of these places at the same time.
    """
    found, touched = _find_rows(layout, user, skipped, spans, rows)
    if found > len(rows):
        return found, 0, touched
    for i in range(found):
        p = rows[i, 0]
        rows[i, 1] = _number(layout[p, _CHANNELS], layout[p, _CHANNEL_BYTES], rows[i, 1])
    for i in range(found):
        p, channel = rows[i, 0], rows[i, 1]
        rows[i, 2] = rows[i, 3] = 0
        if channel < layout[p, _ROWS]:
            rows[i, 2] = _number(layout[p, _ROW_STARTS], 4, channel)
            rows[i, 3] = _number(layout[p, _ROW_STARTS], 4, channel + 1)
    for i in range(found):
        p = rows[i, 0]
        width = layout[p, _INBOX_BYTES]
        touched += _touch(layout[p, _INBOXES], rows[i, 2] * width, rows[i, 3] * width)
    for i in range(found):
        p, end = rows[i, 0], rows[i, 3]
        at = _lower_bound(layout[p, _INBOXES], layout[p, _INBOX_BYTES], inbox, rows[i, 2], end)
        is_there = at < end and _number(layout[p, _INBOXES], layout[p, _INBOX_BYTES], at) == inbox
        rows[i, 2] = at if is_there else -1
    left = 0
    for i in range(found):
        p, at = rows[i, 0], rows[i, 2]
        if at < 0 or not _add(layout[p, _COUNTS], layout[p, _COUNT_BYTES], at, change):
            rows[left, 0], rows[left, 1] = p, rows[i, 1]
            left += 1
    return found, left, touched


@_counting
def mark_inboxes(layout, places, channels, flags):
    """For each channel, set the flags of the inbox partitions with a count above zero. `places`: the numbers of the
    channels' partitions in the layout. A negative channel, and one that came later than the arrays, has none."""
    for i in range(len(channels)):
        p, channel = places[i], channels[i]
        if 0 <= channel < layout[p, _ROWS]:
            starts = layout[p, _ROW_STARTS]
            for at in range(_number(starts, 4, channel), _number(starts, 4, channel + 1)):
                if _number(layout[p, _COUNTS], layout[p, _COUNT_BYTES], at) > 0:
                    flags[i, _number(layout[p, _INBOXES], layout[p, _INBOX_BYTES], at)] = True
