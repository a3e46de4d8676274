"""Schemes: a partitioner with a hash and a number of partitions, to be compared with others."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shardyard.model import InvalidValue
from shardyard.placement import DEFAULT_HASH, hash_named, partitioner_named
from shardyard.placement.kernels import kernels

MAX_PARTITIONS = 1_000_000
"""Limit of one scheme: each partition has a counter in memory."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """A partitioner that places by key, its hash and the number of partitions."""

    partitioner: str
    hash: str
    partitions: int

    def __post_init__(self) -> None:
        if self.partitioner == "round_robin":
            raise InvalidValue("partitioner", self.partitioner, "modulus or jump: round_robin does not place by key")
        partitioner_named(self.partitioner, self.partitions, self.hash)  # raises if it can't be
        if self.partitions > MAX_PARTITIONS:
            raise InvalidValue("partitions", self.partitions, f"at most {MAX_PARTITIONS} to compare")

    @property
    def name(self) -> str:
        return f"{self.hash} {self.partitioner} {self.partitions}"

    def place(self, hashes: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
        """The partitions of keys with these hashes, as the partitioner would place the keys.

        Schemes with the same hash share the work of hashing.
        """
        if self.partitioner == "jump":
            out = np.empty(len(hashes), np.int32)
            kernels.jump_many(hashes, self.partitions, out)
            return out
        number = hashes.dtype.type
        kept = hashes & number(hash_named(self.hash).modulus_mask)
        partitions: npt.NDArray[np.int32] = (kept % number(self.partitions)).astype(np.int32)
        return partitions


def every_scheme(
    partitioners: Iterable[str], hashes: Iterable[str] | None, partitions: Iterable[int]
) -> tuple[Scheme, ...]:
    """All combinations. If no hashes are named, each partitioner gets its default hash.

    `jump` needs a 64-bit hash, so its combinations with other hashes are left out.
    """
    named = None if hashes is None else list(dict.fromkeys(hashes))
    counts = list(dict.fromkeys(partitions))
    found = []
    for partitioner in dict.fromkeys(partitioners):
        for hash_ in named or [DEFAULT_HASH.get(partitioner) or ""]:
            if partitioner == "jump" and named and hash_named(hash_).jump_one is None:
                continue
            found += [Scheme(partitioner, hash_, count) for count in counts]
    if not found:
        raise InvalidValue("hashes", named, "one that the partitioner can use: fnv1a64 or xxh64 for jump")
    return tuple(found)
