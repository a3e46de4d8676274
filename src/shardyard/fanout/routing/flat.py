"""Compiled loops over the flat arrays of all fan-out partitions of a table at once."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from shardyard.fanout.routing.memberships import Numbers
from shardyard.placement.kernels import kernels

if TYPE_CHECKING:
    from shardyard.fanout.routing.partition import FanoutPartition

_count_user: Callable[..., tuple[int, int, int]] | None = getattr(kernels, "count_user", None)
_mark_inboxes: Callable[..., None] | None = getattr(kernels, "mark_inboxes", None)
"""None without numba."""
IS_COMPILED = _count_user is not None
_ROWS = 1024
"""Room for so many channels of a user at first."""


class FlatArrays:
    """Shared by a table and its partitions. These tell which users' memberships have changed since their flat arrays
    were built, and when arrays have moved in memory.

    Without numba, or for what is not in flat arrays, it lets the partitions do it one by one.
    """

    def __init__(self) -> None:
        self._changed: dict[int, int] = {}
        """User -> the partitions with changes beside their flat arrays, one bit for each."""
        self._places: dict[int, int] = {}
        """The row of each partition in the layout."""
        self._moved: set[int] = set()
        """Partitions whose rows have to be set again. Until then they are zero: a partition without members."""
        self._arrays: dict[int, Any] = {}
        """The arrays whose addresses are in the layout."""
        self._make_room(1)
        self._rows: npt.NDArray[np.int64] = np.zeros((_ROWS, 4), np.int64)

    def _make_room(self, partitions: int) -> None:
        """Begin a layout for so many partitions."""
        self._layout: npt.NDArray[np.int64] = np.zeros((partitions, kernels.LAYOUT if IS_COMPILED else 0), np.int64)
        self._skipped: npt.NDArray[np.bool_] = np.zeros(partitions, np.bool_)
        self._spans: npt.NDArray[np.int64] = np.zeros((partitions, 2), np.int64)

    @property
    def nbytes(self) -> int:
        """By estimate."""
        return 150 * len(self._changed)

    def note_change(self, p: int, user: int) -> None:
        """A partition has changes of a user's memberships beside its flat arrays."""
        self._changed[user] = self._changed.get(user, 0) | 1 << p

    def forget_changes(self, p: int, users: Iterable[int]) -> None:
        """A partition has no changes of these users any more."""
        others = ~(1 << p)
        for user in users:
            left = self._changed.get(user, 0) & others
            if left:
                self._changed[user] = left
            else:
                self._changed.pop(user, None)

    def move(self, p: int) -> None:
        """Arrays of a partition are elsewhere in memory, or are gone."""
        self._moved.add(p)
        if self._arrays.pop(p, None) is not None:
            self._layout[self._places[p]] = 0

    def count(self, partitions: Mapping[int, "FanoutPartition"], user: int, inbox: int, change: int) -> None:
        """Count a user of an inbox partition in (1) or out (-1) in all of its channels."""
        if _count_user is None:
            for partition in partitions.values():
                partition.change_presence(user, inbox, change)
            return
        if self._moved:
            self._lay_out(partitions)
        changed = self._changed.get(user, 0)
        apart = [p for p in _bits(changed) if p in partitions] if changed else ()
        skipped = self._skipped
        for p in apart:
            skipped[self._places[p]] = True
        rows = self._rows
        found, left, _ = _count_user(self._layout, user, inbox, change, skipped, self._spans, rows)
        if found > len(rows):  # nothing was counted
            self._rows = rows = np.zeros((2 * found, 4), np.int64)
            _, left, _ = _count_user(self._layout, user, inbox, change, skipped, self._spans, rows)
        if left:
            numbers = {place: p for p, place in self._places.items()}
            for place, channel in rows[:left, :2].tolist():
                partitions[numbers[place]].change_count(channel, inbox, change)
        for p in apart:
            skipped[self._places[p]] = False
            partitions[p].change_presence(user, inbox, change)

    def mark(
        self,
        partitions: Mapping[int, "FanoutPartition"],
        groups: Sequence[tuple[int, Sequence[int] | Numbers]],
        inboxes: int,
    ) -> npt.NDArray[np.bool_]:
        """A row for each channel of the groups, which are fan-out partitions and numbers of channels: True for each of
        the inbox partitions with online members of it. A negative number has none."""
        if _mark_inboxes is None:
            rows = [partitions[p].where(np.asarray(channels, np.int64)) for p, channels in groups]
            return np.concatenate(rows) if rows else np.zeros((0, inboxes), np.bool_)
        if self._moved:
            self._lay_out(partitions)
        sizes = [len(channels) for _, channels in groups]
        flags = np.zeros((sum(sizes), inboxes), np.bool_)
        if len(flags):
            places = np.repeat([self._places[p] for p, _ in groups], sizes)
            numbers = np.concatenate([channels for _, channels in groups], dtype=np.int64, casting="unsafe")
            _mark_inboxes(self._layout, places, numbers, flags)
        start = 0
        for (p, channels), size in zip(groups, sizes, strict=True):
            partitions[p].mark_later(channels, flags[start : start + size])
            start += size
        return flags

    def _lay_out(self, partitions: Mapping[int, "FanoutPartition"]) -> None:
        """Set the rows of the partitions that have moved."""
        for p in self._moved - partitions.keys():
            self._places.pop(p, None)
        new = [p for p in self._moved if p in partitions and p not in self._places]
        if new and len(self._places) + len(new) > len(self._layout):
            self._make_room(len(partitions) + len(partitions) // 4)
            self._places, self._moved, new = {}, set(partitions), list(partitions)
        free = set(range(len(self._layout))) - set(self._places.values()) if new else set()
        self._places |= dict(zip(new, sorted(free), strict=False))
        for p in self._moved & partitions.keys():
            self._arrays[p] = partitions[p].lay_out(self._layout[self._places[p]])
        self._moved = set()


def address(array: npt.NDArray[Any], item_bytes: int = 0) -> int:
    """Where an array begins, all of whose items follow each other. `item_bytes`: those that its items must have."""
    if not array.flags.c_contiguous or item_bytes not in (0, array.itemsize):
        raise TypeError(f"an array of {array.dtype} that the compiled loop can't read")
    return int(array.__array_interface__["data"][0])


def compile_loops() -> None:
    """Compile the loops, or load what was compiled before. It takes up to some seconds: call it in a thread, before
    others depend on a quick answer."""
    layout, none = np.zeros((0, kernels.LAYOUT if IS_COMPILED else 0), np.int64), np.zeros(0, np.int64)
    if _count_user is not None:
        rows = np.zeros((1, 4), np.int64)
        _count_user(layout, 0, 0, 1, np.zeros(0, np.bool_), np.zeros((0, 2), np.int64), rows)
    if _mark_inboxes is not None:
        _mark_inboxes(layout, none, none, np.zeros((0, 1), np.bool_))


def _bits(mask: int) -> list[int]:
    """The numbers of the bits that are set."""
    found = []
    while mask:
        lowest = mask & -mask
        found.append(lowest.bit_length() - 1)
        mask ^= lowest
    return found
