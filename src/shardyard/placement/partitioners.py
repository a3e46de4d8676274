"""Partitioners map a key to a partition.

`Modulus` is what Kafka and RabbitMQ do: simple, but nearly every key moves when the number of partitions changes.
`Jump` moves only the keys that a new partition needs. `RoundRobin` ignores the keys.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import numpy as np
import pyarrow as pa

from shardyard.model import InvalidValue, whole_number
from shardyard.placement.hashes import Hash, Key, hash_named, key_bytes
from shardyard.placement.kernels import kernels
from shardyard.placement.names import DEFAULT_HASH, PARTITIONERS

MAX_PARTITIONS = 2**31 - 1
"""Partition numbers are stored as int32 in arrays, as in Kafka."""


class Partitioner(Protocol):
    """Maps a key to a partition from 0 to `partitions` - 1."""

    @property
    def partitions(self) -> int: ...

    def place(self, key: Key) -> int:
        """The partition of one key."""
        ...

    def place_array(self, keys: pa.Array | pa.ChunkedArray) -> pa.Array:
        """The partitions of an Arrow array of keys (binary, string or integer), as int32."""
        ...


def _partition_count(partitions: int) -> int:
    count = whole_number("partitions", partitions, at_least=1)
    if count > MAX_PARTITIONS:
        raise InvalidValue("partitions", partitions, f"at most {MAX_PARTITIONS}")
    return count


class Modulus:
    """`hash(key) % partitions`; with murmur2, the same result as Kafka's own partitioner.

    With weights, partition i gets `weights[i]` slots, as RabbitMQ does for a queue that is bound several times to an
    x-modulus-hash exchange.
    """

    def __init__(self, hash_: Hash | str, partitions: int, weights: Sequence[int] | None = None) -> None:
        self.hash = hash_named(hash_) if isinstance(hash_, str) else hash_
        self.partitions = _partition_count(partitions)
        self._slots = partitions
        self._ends: list[int] | None = None
        if weights is not None:
            if len(weights) != partitions:
                raise InvalidValue("weights", list(weights), f"one weight for each of {partitions} partitions")
            for i, weight in enumerate(weights):
                whole_number(f"weight of partition {i}", weight, at_least=1)
            self._ends = list(accumulate(weights))
            self._slots = self._ends[-1]
            if self._slots > MAX_PARTITIONS:
                raise InvalidValue("sum of the weights", self._slots, f"at most {MAX_PARTITIONS}")

    def place(self, key: Key) -> int:
        slot = (self.hash(key) & self.hash.modulus_mask) % self._slots
        return slot if self._ends is None else bisect_right(self._ends, slot)

    def place_array(self, keys: pa.Array | pa.ChunkedArray) -> pa.Array:
        hashes = self.hash.array(keys)
        hashes &= hashes.dtype.type(self.hash.modulus_mask)
        slots = np.remainder(hashes, hashes.dtype.type(self._slots), out=hashes)
        if self._ends is not None:
            slots = np.searchsorted(self._ends, slots, side="right")
        return pa.array(slots.astype(np.int32))


class Jump:
    """Jump consistent hashing over a 64-bit hash: going from P to P+1 partitions moves 1/(P+1) of the keys."""

    def __init__(self, hash_: Hash | str, partitions: int) -> None:
        self.hash = hash_named(hash_) if isinstance(hash_, str) else hash_
        if self.hash.jump_one is None:
            raise InvalidValue("hash", self.hash.name, "a 64-bit hash for jump: fnv1a64 or xxh64")
        self._jump = self.hash.jump_one
        self.partitions = _partition_count(partitions)

    def place(self, key: Key) -> int:
        return self._jump(key_bytes(key), self.partitions)

    def place_array(self, keys: pa.Array | pa.ChunkedArray) -> pa.Array:
        out = np.empty(len(keys), np.int32)
        kernels.jump_many(self.hash.array(keys), self.partitions, out)
        return pa.array(out)


class RoundRobin:
    """Distributes records round-robin, ignoring keys: sizes differ by at most one, and there is no order per key."""

    def __init__(self, partitions: int, start: int = 0) -> None:
        self.partitions = _partition_count(partitions)
        self._next = whole_number("start", start, at_least=0)

    def place(self, key: Key = None) -> int:  # noqa: ARG002 the protocol passes a key, which is ignored here
        self._next += 1
        return (self._next - 1) % self.partitions

    def place_array(self, keys: pa.Array | pa.ChunkedArray) -> pa.Array:
        numbers = np.arange(self._next, self._next + len(keys))
        self._next += len(keys)
        return pa.array((numbers % self.partitions).astype(np.int32))


def jump(hash_: int, buckets: int) -> int:
    """The bucket, from 0 to `buckets` - 1, that jump consistent hashing gives to a 64-bit hash."""
    if not 0 <= whole_number("hash", hash_, at_least=0) < 2**64:
        raise InvalidValue("hash", hash_, "an unsigned 64-bit integer")
    whole_number("buckets", buckets, at_least=1)
    bucket: int = kernels.jump_one(hash_ - 2**64 if hash_ >= 2**63 else hash_, buckets)
    return bucket


def partitioner_named(name: str, partitions: int, hash_: str | None = None) -> Partitioner:
    """Return the partitioner with this name, using its default hash if `hash_` is None."""
    if name not in DEFAULT_HASH:
        raise InvalidValue("partitioner", name, "one of " + ", ".join(PARTITIONERS))
    hash_ = hash_ or DEFAULT_HASH[name]
    if hash_ is None:
        return RoundRobin(partitions)
    function = hash_named(hash_)
    match name:
        case "modulus":
            return Modulus(function, partitions)
        case "jump":
            return Jump(function, partitions)
        case _:
            return RoundRobin(partitions)
