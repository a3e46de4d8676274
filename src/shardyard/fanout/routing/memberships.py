"""The memberships of one fan-out partition in about three bytes each."""

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

BUCKET_USERS = 256
"""Users whose numbers differ only in the low byte."""
_BYTES = [bytes([i]) for i in range(BUCKET_USERS)]

Numbers = npt.NDArray[Any]


class Searchable(Protocol):
    """Bytes in memory or in a mapped file."""

    def find(self, sub: bytes, start: int, end: int, /) -> int: ...

    def rfind(self, sub: bytes, start: int, end: int, /) -> int: ...


class Memberships:
    """Which channels each user is a member of, both as numbers. It does not change, and may be memory-mapped.

    Rows are sorted by user, then by channel. Of a user only the low byte is stored; the rest is the bucket, whose rows
    are found by `starts`.
    """

    def __init__(
        self,
        starts: npt.NDArray[np.uint32],
        low: npt.NDArray[np.uint8],
        channels: Numbers,
        *,
        searchable: Searchable | None = None,
        origin: int = 0,
    ) -> None:
        """`searchable`: what holds `low`, from the place `origin` on; a copy in memory if None."""
        self.starts = starts
        self.low = low
        self.channels = channels
        self._buckets = len(starts) - 1
        self._starts = starts.data
        self._channels = channels.data
        self._searchable: Searchable
        if searchable is None:
            self._searchable = low.tobytes()
            self.low = np.frombuffer(self._searchable, np.uint8)
        else:
            self._searchable = searchable
        self._origin = origin

    @classmethod
    def build(cls, users: Numbers, channels: Numbers) -> "Memberships":
        """From numbers of users and channels in any order. A pair that is there twice counts once."""
        return cls.of_keys(distinct(pair_keys(users, channels)))

    @classmethod
    def of_keys(cls, keys: npt.NDArray[np.uint64]) -> "Memberships":
        """From the ascending, distinct keys of `pair_keys`."""
        users = (keys >> np.uint64(32)).astype(np.uint32)
        channels = keys.astype(np.uint32)
        buckets = int(users[-1]) // BUCKET_USERS + 1 if len(users) else 0
        starts = np.searchsorted(users, np.arange(buckets + 1) * BUCKET_USERS).astype(np.uint32)
        wide = len(channels) > 0 and int(channels.max()) > 0xFFFF
        return cls(starts, users.astype(np.uint8), channels if wide else channels.astype(np.uint16))

    def __len__(self) -> int:
        return len(self.low)

    @property
    def nbytes(self) -> int:
        return int(self.starts.nbytes + self.low.nbytes + self.channels.nbytes)

    def of(self, user: int) -> list[int]:
        """The channels of one user, ascending."""
        bucket = user >> 8
        if bucket >= self._buckets:
            return []
        origin, low = self._origin, _BYTES[user & 255]
        end = origin + self._starts[bucket + 1]
        first = self._searchable.find(low, origin + self._starts[bucket], end)
        if first < 0:
            return []
        last = self._searchable.rfind(low, first, end)
        return self._channels[first - origin : last - origin + 1].tolist()

    def of_many(self, users: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], Numbers]:
        """The rows of many users: the place of the row's user in `users`, and the channel."""
        places = np.flatnonzero(users < self._buckets * BUCKET_USERS)
        buckets, low = users[places] // BUCKET_USERS, users[places] % BUCKET_USERS
        first, end = self.starts[buckets].astype(np.int64), self.starts[buckets + 1].astype(np.int64)
        first = search_spans(self.low, low, first, end)
        counts = search_spans(self.low, low + 1, first, end) - first
        return np.repeat(places, counts), self.channels[ragged(first, counts)]

    def rows(self) -> tuple[npt.NDArray[np.uint32], Numbers]:
        """All rows: users and channels."""
        buckets = np.arange(self._buckets, dtype=np.uint32) * np.uint32(BUCKET_USERS)
        users: npt.NDArray[np.uint32] = np.repeat(buckets, np.diff(self.starts))
        users += self.low
        return users, self.channels

    def keys(self) -> npt.NDArray[np.uint64]:
        """All rows as `pair_keys`, ascending."""
        return pair_keys(*self.rows())


def pair_keys(users: Numbers, channels: Numbers) -> npt.NDArray[np.uint64]:
    """One number for each pair of a user and a channel, which sorts as the pairs do."""
    return (users.astype(np.uint64) << np.uint64(32)) | channels.astype(np.uint64)


def distinct(values: Numbers) -> Numbers:
    """The distinct values, ascending. NumPy's `unique` hashes them, which takes many times as long for integers."""
    ascending = np.sort(values)
    new = np.ones(len(ascending), bool)
    new[1:] = ascending[1:] != ascending[:-1]
    return ascending[new]


def search_spans(
    values: Numbers, wanted: Numbers, first: npt.NDArray[np.int64], end: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """For each span of `values`, which ascend in it: where the first value is that is not below the wanted one, or the
    end of the span."""
    low, high = first, end
    while len(values) and (searching := low < high).any():
        middle = (low + high) // 2
        below = searching & (values[np.minimum(middle, len(values) - 1)] < wanted)
        low, high = np.where(below, middle + 1, low), np.where(below, high, np.minimum(high, middle))
    return low


def ragged(first: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The numbers first[0], first[0] + 1, ..., `counts[0]` of them, then those from first[1] on, and so forth."""
    before = np.cumsum(counts) - counts
    return np.repeat(first - before, counts) + np.arange(int(counts.sum()))
