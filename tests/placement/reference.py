"""Plain Python versions of the hashes, to check the compiled ones against."""

import struct

MASK32 = 0xFFFFFFFF
MASK64 = 0xFFFFFFFFFFFFFFFF


def fnv1a32(data: bytes) -> int:
    h = 0x811C9DC5
    for byte in data:
        h = (h ^ byte) * 0x01000193 & MASK32
    return h


def fnv1a64(data: bytes) -> int:
    h = 0xCBF29CE484222325
    for byte in data:
        h = (h ^ byte) * 0x100000001B3 & MASK64
    return h


def murmur2(data: bytes) -> int:
    m = 0x5BD1E995
    h = 0x9747B28C ^ len(data)
    whole = len(data) // 4 * 4
    for (word,) in struct.iter_unpack("<I", data[:whole]):
        k = word * m & MASK32
        k = (k ^ k >> 24) * m & MASK32
        h = h * m & MASK32 ^ k
    if rest := data[whole:]:
        h = (h ^ int.from_bytes(rest, "little")) * m & MASK32
    h = (h ^ h >> 13) * m & MASK32
    return h ^ h >> 15


def jump(key: int, buckets: int) -> int:
    b, j = -1, 0
    while j < buckets:
        b = j
        key = (key * 2862933555777941757 + 1) & MASK64
        j = int((b + 1) * (float(1 << 31) / float((key >> 33) + 1)))
    return b
