"""Schemes: ways to place keys, to be compared."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shardyard.model import InvalidValue
from shardyard.placement import DEFAULT_HASH, hash_named, kernels, partitioner_named

MOST_PARTITIONS = 1_000_000
"""Of one scheme: each is counted in memory."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """A partitioner that goes by the key, its hash and the number of partitions."""

    partitioner: str
    hash: str
    partitions: int

    def __post_init__(self) -> None:
        if self.partitioner == "round_robin":
            raise InvalidValue("partitioner", self.partitioner, "modulus or jump: round_robin does not go by the key")
        partitioner_named(self.partitioner, self.partitions, self.hash)  # complains
        if self.partitions > MOST_PARTITIONS:
            raise InvalidValue("partitions", self.partitions, f"at most {MOST_PARTITIONS} to compare")

    @property
    def name(self) -> str:
        return f"{self.hash} {self.partitioner} {self.partitions}"

    def places(self, hashes: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
        """The partitions of keys whose hashes are known: what the partitioner gives for the keys, at less cost, since
        schemes share their hashes."""
        if self.partitioner == "jump":
            out = np.empty(len(hashes), np.int32)
            kernels.jump_many(hashes, self.partitions, out)
            return out
        number = hashes.dtype.type
        kept = hashes & number(hash_named(self.hash).modulus_mask)
        places: npt.NDArray[np.int32] = (kept % number(self.partitions)).astype(np.int32)
        return places


def every_scheme(
    partitioners: Iterable[str], hashes: Iterable[str] | None, partitions: Iterable[int]
) -> tuple[Scheme, ...]:
    """All of them side by side; each partitioner on its default hash where none is named. Jump takes only the hashes of
    64 bits, and is left out on the others."""
    named = None if hashes is None else list(dict.fromkeys(hashes))
    counts = list(dict.fromkeys(partitions))
    found = []
    for partitioner in dict.fromkeys(partitioners):
        for hash_ in named or [DEFAULT_HASH.get(partitioner) or ""]:
            if partitioner == "jump" and named and hash_named(hash_).jump_one is None:
                continue
            found += [Scheme(partitioner, hash_, count) for count in counts]
    if not found:
        raise InvalidValue("hashes", named, "one that the partitioner takes: fnv1a64 or xxh64 for jump")
    return tuple(found)
