"""How many members of each channel are online in each inbox partition."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shardyard.fanout.routing.memberships import Numbers, ragged, search_spans

_DENSE_CELLS = 2**24
"""Up to as many pairs of channel and inbox partition are counted in an array with a cell for each, which is fastest."""


FEW = 4
"""Up to as many channels are looked up one by one."""


class OnlineCounts:
    """Counts per channel and inbox partition, as compressed sparse rows: there is a cell for each pair that had members
    when it was built. Pairs that came later are in a dictionary."""

    def __init__(
        self,
        channels: Numbers,
        inboxes: Numbers,
        online: npt.NDArray[np.bool_],
        sizes: tuple[int, int],
        on_move: Callable[[], None] | None = None,
    ) -> None:
        """From memberships: the channel and the inbox partition of each, and whether the user is online. `sizes`: how
        many channels and inbox partitions there are. `on_move` is called when an array was replaced by another one."""
        self._on_move = on_move
        self.channels, self.partitions = sizes
        keys = channels.astype(np.int64) * self.partitions + inboxes
        cells, counts = _count(keys, online, self.channels * self.partitions)
        edges = np.arange(self.channels + 1) * self.partitions
        self.starts = np.searchsorted(cells, edges).astype(np.uint32)
        self.inboxes = (cells % self.partitions).astype(np.min_scalar_type(self.partitions - 1))
        self.later: dict[int, dict[int, int]] = {}
        self._starts = self.starts.data
        self._inboxes = self.inboxes.data
        self._store(counts.astype(np.min_scalar_type(counts.max(initial=0))))

    def _store(self, counts: Numbers) -> None:
        self.counts = counts
        self._counts = counts.data

    def _widen(self, count: int) -> None:
        """Make room for a count."""
        if count > np.iinfo(self.counts.dtype).max:
            self._store(self.counts.astype(np.min_scalar_type(count)))
            if self._on_move is not None:
                self._on_move()

    @property
    def nbytes(self) -> int:
        flat = self.starts.nbytes + self.inboxes.nbytes + self.counts.nbytes
        return int(flat + sum(300 + 100 * len(row) for row in self.later.values()))

    def add(self, channel: int, inbox: int, change: int) -> None:
        """Add to one count."""
        if channel < self.channels:
            end = self._starts[channel + 1]
            at = bisect_left(self._inboxes, inbox, self._starts[channel], end)
            if at < end and self._inboxes[at] == inbox:
                count = self._counts[at] + change
                try:
                    self._counts[at] = count
                except ValueError:  # it does not fit
                    self._widen(count)
                    self._counts[at] = count
                return
        row = self.later.setdefault(channel, {})
        row[inbox] = row.get(inbox, 0) + change
        if not row[inbox]:
            del row[inbox]
            if not row:
                del self.later[channel]

    def add_all(self, channels: Numbers, inboxes: Numbers, changes: npt.NDArray[np.int64]) -> None:
        """Add to many counts; a pair may occur several times."""
        inside = channels < self.channels
        channel, inbox = channels[inside].astype(np.int64), inboxes[inside].astype(np.int64)
        first, end = self.starts[channel].astype(np.int64), self.starts[channel + 1].astype(np.int64)
        place = search_spans(self.inboxes, inbox, first, end)
        found = place < end
        found[found] = self.inboxes[place[found]] == inbox[found]
        cells, inverse = np.unique(place[found], return_inverse=True)
        delta = np.bincount(inverse, changes[inside][found], len(cells)).astype(np.int64)
        counts = self.counts[cells].astype(np.int64) + delta
        self._widen(int(counts.max(initial=0)))
        self.counts[cells] = counts
        rest = np.concatenate([np.flatnonzero(inside)[~found], np.flatnonzero(~inside)])
        for row in rest.tolist():
            self.add(int(channels[row]), int(inboxes[row]), int(changes[row]))

    def total(self, channel: int) -> int:
        """The sum of the counts of a channel."""
        later = sum(self.later.get(channel, {}).values())
        if channel >= self.channels:
            return later
        return later + int(self.counts[self._starts[channel] : self._starts[channel + 1]].sum())

    def where(self, channels: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """A row for each channel, with True for each inbox partition whose count is not zero. A negative channel has
        none."""
        flags = np.zeros((len(channels), self.partitions), bool)
        if len(channels) <= FEW:
            for row, channel in enumerate(channels.tolist()):
                if 0 <= channel < self.channels:
                    start, end = self._starts[channel], self._starts[channel + 1]
                    flags[row, self.inboxes[start:end][self.counts[start:end] > 0]] = True
                if channel in self.later:
                    flags[row, list(self.later[channel])] = True
            return flags
        rows = np.flatnonzero((channels >= 0) & (channels < self.channels))
        chosen = channels[rows]
        first = self.starts[chosen].astype(np.int64)
        lengths = self.starts[chosen + 1] - first
        cells = ragged(first, lengths)
        places = np.repeat(rows * self.partitions, lengths) + self.inboxes[cells]
        flags.reshape(-1)[places[self.counts[cells] > 0]] = True
        self.mark_later(channels, flags)
        return flags

    def mark_later(self, channels: Sequence[int] | Numbers, flags: npt.NDArray[np.bool_]) -> None:
        """Set the flags of pairs that came later. `flags`: a row for each channel."""
        if later := self.later:
            for row, channel in enumerate(channels if isinstance(channels, list) else np.asarray(channels).tolist()):
                if channel in later:
                    flags[row, list(later[channel])] = True


def _count(keys: Numbers, online: npt.NDArray[np.bool_], cells: int) -> tuple[Any, Any]:
    """The distinct keys, and how many rows with each are online."""
    if cells > _DENSE_CELLS:
        found, inverse = np.unique(keys, return_inverse=True)
        return found, np.bincount(inverse[online], minlength=len(found))
    members = np.bincount(keys, minlength=cells)
    found = np.flatnonzero(members)
    if online.all():
        return found, members[found]
    return found, np.bincount(keys[online], minlength=cells)[found]
