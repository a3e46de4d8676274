"""Weighted rendezvous hashing: each key goes to the target that scores highest for it.

When a target comes, goes, or changes its weight, only keys move that it gets or gives up: between any two other targets
no key moves. Jump hashing promises that only for the last of its partitions.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from shardyard.model import InvalidValue, whole_number
from shardyard.placement.hashes import HASHES, Key
from shardyard.placement.kernels import kernels


class Rendezvous:
    """Maps keys to named targets. A target gets keys in proportion to its weight.

    A target has as many points as its weight, and each point has a score for each key: its 64-bit hash mixed with that
    of the key. The highest score wins. (The highest of w random numbers is distributed as weighted rendezvous hashing
    asks for, so that no logarithms are needed, which differ from machine to machine in the last bit.)
    """

    def __init__(self, weights: Mapping[str, int]) -> None:
        if not weights:
            raise InvalidValue("weights", {}, "at least one target")
        self.targets = tuple(sorted(weights))
        """The names; places are indexes in this."""
        self._hash = HASHES["xxh64"]
        points, owners = [], []
        for index, name in enumerate(self.targets):
            for number in range(whole_number(f"weight of {name!r}", weights[name], at_least=1)):
                points.append(self._hash(f"{number}/{name}"))
                owners.append(index)
        self._points = np.array(points, np.uint64)
        self._owners = np.array(owners, np.int32)

    def place(self, key: Key) -> int:
        """The index of the target of one key."""
        hash_ = self._hash(key)
        return int(self._owners[kernels.rendezvous_one(hash_ - 2**64 if hash_ >= 2**63 else hash_, self._points)])

    def place_array(self, keys: pa.Array | pa.ChunkedArray) -> npt.NDArray[np.int32]:
        """The indexes of the targets of an Arrow array of keys."""
        out = np.empty(len(keys), np.int32)
        kernels.rendezvous_many(self._hash.array(keys), self._points, out)
        return self._owners.take(out)
