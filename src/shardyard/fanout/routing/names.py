"""Finds names among many that are sorted by their hash."""

from bisect import bisect_left

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from xxhash import xxh64_intdigest

from shardyard.fanout.routing.changes import Names
from shardyard.placement import hash_named

_xxh64 = hash_named("xxh64")
UNKNOWN = -1
"""In place of the number of a name that is not there."""

Ids = npt.NDArray[np.int64]


class NameIndex:
    """Distinct names, sorted by their xxh64 and then by themselves. The number of a name is its rank.

    A name is found by its hash and then compared, so that two names with the same hash are not confused. The arrays may
    be memory-mapped; they are not copied.
    """

    def __init__(self, hashes: npt.NDArray[np.uint64], names: pa.Array) -> None:
        """`names`: of type binary, without nulls, and without an offset into its buffers."""
        self.hashes = hashes
        self.names = names
        # For one name at a time: views that give Python numbers without creating NumPy's.
        self._hashes = hashes.data
        empty = not len(names)
        self._starts = memoryview(b"\0\0\0\0" if empty else names.buffers()[1]).cast("B").cast("i")
        data = None if empty else names.buffers()[2]
        self._data = memoryview(data or b"").cast("B")  # signed bytes, as Arrow has them, equal none above 127

    @classmethod
    def build(cls, names: pa.Array) -> tuple["NameIndex", Ids]:
        """An index of these distinct names, and the number of each."""
        names = names if names.type == pa.binary() else names.cast(pa.binary())
        hashes = _xxh64.array(names)
        order = np.argsort(hashes, kind="stable")
        ascending = hashes[order]
        if len(ascending) and (ascending[1:] == ascending[:-1]).any():
            by_name = pc.sort_indices(names).to_numpy()
            order = by_name[np.argsort(hashes[by_name], kind="stable")]
        ranks = np.empty(len(names), np.int64)
        ranks[order] = np.arange(len(names))
        return cls(hashes[order], names.take(pa.array(order))), ranks

    def __len__(self) -> int:
        return len(self.hashes)

    @property
    def nbytes(self) -> int:
        return int(self.hashes.nbytes + self.names.nbytes)

    def find(self, name: bytes) -> int:
        """The number of a name, or `UNKNOWN`."""
        hash_ = xxh64_intdigest(name)
        at = bisect_left(self._hashes, hash_)
        while at < len(self._hashes) and self._hashes[at] == hash_:
            if self._data[self._starts[at] : self._starts[at + 1]] == name:
                return at
            at += 1
        return UNKNOWN

    def find_all(self, names: Names) -> Ids:
        """The number of each name, or `UNKNOWN`."""
        if isinstance(names, list):
            return np.array([self.find(name) for name in names], np.int64)
        found = np.full(len(names), UNKNOWN, np.int64)
        if not len(self):
            return found
        hashes = _xxh64.array(names)
        rows = np.arange(len(names))
        at = np.searchsorted(self.hashes, hashes)
        while len(rows):
            same = at < len(self)
            same[same] = self.hashes[at[same]] == hashes[rows[same]]
            rows, at = rows[same], at[same]
            asked = names if len(rows) == len(names) else names.take(pa.array(rows))
            equal = pc.fill_null(pc.equal(self.names.take(pa.array(at)), asked), False).to_numpy(zero_copy_only=False)
            found[rows[equal]] = at[equal]
            rows, at = rows[~equal], at[~equal] + 1
        return found


class GrowingNames:
    """Names of an index, followed by names that were added since, in the order in which they were added."""

    def __init__(self, base: NameIndex | None = None) -> None:
        self.base = base or NameIndex(np.empty(0, np.uint64), pa.array([], pa.binary()))
        self.added: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self.base) + len(self.added)

    def find(self, name: bytes) -> int:
        """The number of a name, or `UNKNOWN`."""
        number = self.added.get(name)
        return self.base.find(name) if number is None else number

    def find_all(self, names: Names) -> Ids:
        """The number of each name, or `UNKNOWN`."""
        if isinstance(names, list):
            return np.array([self.find(name) for name in names], np.int64)
        found = self.base.find_all(names)
        missing = np.flatnonzero(found == UNKNOWN) if self.added else ()
        if len(missing):
            get = self.added.get
            found[missing] = [get(name, UNKNOWN) for name in names.take(pa.array(missing)).to_pylist()]
        return found

    def number(self, names: Names) -> Ids:
        """The number of each name. Those that are not known yet are added."""
        if isinstance(names, list):
            return np.array([self.number_of(name) for name in names], np.int64)
        encoded = names.dictionary_encode()
        found = self.base.find_all(encoded.dictionary)
        missing = np.flatnonzero(found == UNKNOWN)
        if len(missing):
            added, first = self.added, len(self.base)
            found[missing] = [
                added.setdefault(name, first + len(added))
                for name in encoded.dictionary.take(pa.array(missing)).to_pylist()
            ]
        numbers: Ids = found[encoded.indices.to_numpy()]
        return numbers

    def number_of(self, name: bytes) -> int:
        """The number of one name, which is added if it is not known yet."""
        number = self.find(name)
        return self.added.setdefault(name, len(self)) if number == UNKNOWN else number

    def all(self) -> pa.Array:
        """All names, by number."""
        return pa.concat_arrays([self.base.names, pa.array(list(self.added), pa.binary())])
