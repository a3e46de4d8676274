"""Hash keys one at a time, or a whole Arrow array at once, with the same result bit for bit.

A key is `bytes`, `str` (hashed as UTF-8) or `int` (hashed as 8 little-endian bytes, so from -2**63 to 2**64 - 1).
A missing key (None, or null in an array) hashes as the empty key, so that every record has a partition.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from shardyard.model import InvalidValue, whole_number
from shardyard.placement.kernels import kernels

Key = bytes | str | int | None


def key_bytes(key: Key) -> bytes:
    """The bytes that are hashed for `key`."""
    if isinstance(key, str):
        try:
            return key.encode()
        except UnicodeEncodeError:
            raise InvalidValue("key", key, "text that UTF-8 can hold") from None
    if isinstance(key, bytes):
        return key
    if key is None:
        return b""
    if isinstance(key, bool) or not hasattr(key, "to_bytes"):
        raise InvalidValue("key", key, "bytes, str, int or None")
    if not -(2**63) <= key < 2**64:
        raise InvalidValue("key", key, "a whole number from -2**63 up to 2**64")
    return (key & 0xFFFFFFFFFFFFFFFF).to_bytes(8, "little")


@dataclass(frozen=True, slots=True)
class Hash:
    """A named hash function. Call it to hash one key; call `array` to hash an Arrow array of keys."""

    name: str
    bits: int
    """The number of bits in a hash."""
    modulus_mask: int
    """The bits that the modulus partitioner uses: all of them, except murmur2's sign bit, which Kafka masks out."""
    _one: Callable[[bytes], int]
    _many: Callable[[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]], None]
    jump_one: Callable[[bytes, int], int] | None = None
    """Hash a key and jump in one compiled call, which takes half the time of two calls; 64-bit hashes only."""

    def __call__(self, key: Key) -> int:
        return self._one(key_bytes(key))

    def array(self, keys: pa.Array | pa.ChunkedArray) -> npt.NDArray[Any]:
        """Hash an array of binary, string or integer type; the hashes are unsigned integers."""
        if isinstance(keys, pa.ChunkedArray):
            chunks = [self.array(chunk) for chunk in keys.chunks]
            return np.concatenate(chunks) if chunks else np.empty(0, self._dtype)
        if pa.types.is_dictionary(keys.type):
            # A null index refers to no entry: point it at the hash of the empty key, appended to the dictionary's own.
            hashes = np.append(self.array(keys.dictionary), self._dtype(self(None)))
            indices: npt.NDArray[Any] = keys.indices.cast(pa.int64()).fill_null(len(hashes) - 1).to_numpy()
            return hashes.take(indices)
        if pa.types.is_null(keys.type):
            return np.full(len(keys), self(None), self._dtype)
        out = np.empty(len(keys), self._dtype)
        values, starts = _bytes_and_offsets(keys)
        if len(keys):
            self._many(values, starts, out)
            if keys.null_count:
                out[keys.is_null().to_numpy(zero_copy_only=False)] = self(None)
        return out

    @property
    def _dtype(self) -> type[np.uint32] | type[np.uint64]:
        return np.uint64 if self.bits == 64 else np.uint32


def _bytes_and_offsets(keys: pa.Array) -> tuple[npt.NDArray[np.uint8], npt.NDArray[Any]]:
    """The values buffer of `keys`, and the offset of each key in it. The bytes of a null key are undefined."""
    kind = keys.type
    if pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
        keys = keys.cast(pa.large_binary())
        kind = keys.type
    if pa.types.is_integer(kind):
        if kind not in (pa.int64(), pa.uint64()):
            keys = keys.cast(pa.int64())
        return _fixed_width(keys, 8)
    if pa.types.is_fixed_size_binary(kind):
        return _fixed_width(keys, kind.byte_width)
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        width: type[np.int32] | type[np.int64] = np.int32
    elif pa.types.is_large_string(kind) or pa.types.is_large_binary(kind):
        width = np.int64
    else:
        raise InvalidValue("type of the key array", str(kind), "binary, string or an integer")
    _, offsets, values = keys.buffers()
    if not len(keys):  # an empty array may have no buffers
        return _as_uint8(None), _read_only(np.zeros(1, width))
    starts = np.frombuffer(offsets, width, len(keys) + 1, keys.offset * np.dtype(width).itemsize)
    return _as_uint8(values), _read_only(starts)


def _fixed_width(keys: pa.Array, width: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[Any]]:
    starts = np.arange(keys.offset, keys.offset + len(keys) + 1, dtype=np.int64) * width
    return _as_uint8(keys.buffers()[1]), _read_only(starts)


def _as_uint8(buffer: pa.Buffer | None) -> npt.NDArray[np.uint8]:
    return _read_only(np.frombuffer(buffer if buffer else b"\0", np.uint8))


def _read_only(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Mark the array read-only. To numba a writable array is another type, for which it would compile again."""
    values.flags.writeable = False
    return values


HASHES = {
    h.name: h
    for h in (
        Hash("fnv1a32", 32, 0xFFFFFFFF, kernels.fnv1a32_one, kernels.fnv1a32_many),
        Hash("fnv1a64", 64, 0xFFFFFFFFFFFFFFFF, kernels.fnv1a64_one, kernels.fnv1a64_many, kernels.fnv1a64_jump),
        Hash("xxh64", 64, 0xFFFFFFFFFFFFFFFF, kernels.xxh64_one, kernels.xxh64_many, kernels.xxh64_jump),
        Hash("murmur2", 32, 0x7FFFFFFF, kernels.murmur2_one, kernels.murmur2_many),
        Hash("phash2", 27, kernels.PHASH2_RANGE - 1, kernels.phash2_one, kernels.phash2_many),
    )
}


def hash_named(name: str) -> Hash:
    """Return the hash with this name."""
    try:
        return HASHES[name]
    except KeyError:
        raise InvalidValue("hash", name, "one of " + ", ".join(HASHES)) from None


def phash2(keys: Iterable[Key], hash_range: int = kernels.PHASH2_RANGE) -> int:
    """Erlang's `phash2(Keys, Range)` of a list of binaries, which RabbitMQ computes for [RoutingKey | CC ++ BCC].

    The hash named `phash2` applies this function to a list that holds a single key.
    """
    if isinstance(keys, str | bytes):
        raise InvalidValue("keys", keys, "a list of keys")
    whole_number("hash_range", hash_range, at_least=1)
    state = 0
    for key in keys:
        state = kernels.phash2_element(key_bytes(key), state)
    result: int = kernels.phash2_end(state) % hash_range
    return result
