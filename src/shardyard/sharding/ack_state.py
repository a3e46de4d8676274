"""What was settled of the messages of a queue: a prefix, ranges after it, and failed deliveries. Pure, without I/O."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec
import numpy as np

from shardyard.model import Damaged

FORMAT: Final = 1


class _Stored(msgspec.Struct, array_like=True):
    """An `AckState` as it is stored. Ranges and offsets are distances, which are small numbers."""

    format: int
    floor: int
    end: int
    is_clean: bool
    ranges: list[int]
    counts: list[int]


class AckState:
    """The acknowledgement state of a queue. A message is settled when it needs no delivery any more: it was
    acknowledged, dropped, or stored elsewhere as a dead letter.

    Settling is cheap: the offsets are collected, and merged into ranges when somebody looks (`merge`).
    """

    __slots__ = ("_fresh", "_starts", "_stops", "counts", "end", "floor", "is_clean")

    def __init__(self, floor: int = 0, end: int = 0) -> None:
        self.floor = floor
        """Everything below this offset is settled."""
        self.end = max(floor, end)
        """Nothing from this offset on was delivered."""
        self.is_clean = True
        """The owner stopped in an orderly way, or has delivered nothing: the state is exact."""
        self.counts: dict[int, int] = {}
        """By offset, how many deliveries failed, of messages that came back and are not settled. It may be 0, if their
        consumer did not try."""
        self._starts: list[int] = []
        self._stops: list[int] = []
        """The settled ranges beyond `floor`: ascending, and apart from each other."""
        self._fresh: list[int] = []
        """Offsets that were settled and are not merged."""

    def settle(self, offsets: Iterable[int]) -> None:
        """These messages need no delivery any more."""
        self._fresh.extend(offsets)

    def settle_range(self, start: int, stop: int) -> None:
        """Nothing from `start` up to, but not including, `stop` needs a delivery any more; there may be no messages."""
        if stop <= max(start, self.floor):
            return
        self.merge()
        self._merge_ranges([start], [stop])
        self._drop_counts()

    @property
    def settled_end(self) -> int:
        """Nothing from this offset on was settled before the last merge."""
        return self._stops[-1] if self._stops else self.floor

    def is_settled(self, offset: int) -> bool:
        """Whether it was settled before the last merge."""
        if offset < self.floor:
            return True
        place = bisect_right(self._starts, offset)
        return place > 0 and offset < self._stops[place - 1]

    def ranges(self) -> list[tuple[int, int]]:
        """The settled ranges beyond the prefix, (first offset, offset after the last one)."""
        self.merge()
        return list(zip(self._starts, self._stops, strict=True))

    def merge(self) -> None:
        """Move the prefix and the ranges on by what was settled since."""
        if not self._fresh:
            return
        offsets = np.unique(np.array(self._fresh, dtype=np.int64))
        self._fresh.clear()
        offsets = offsets[offsets >= self.floor]
        if not len(offsets):
            return
        breaks = np.flatnonzero(np.diff(offsets) != 1)
        starts = offsets[np.concatenate(([0], breaks + 1))].tolist()
        stops = (offsets[np.concatenate((breaks, [len(offsets) - 1]))] + 1).tolist()
        self._merge_ranges(starts, stops)
        self._drop_counts()

    def trimmed(self, first: int) -> None:
        """The log has nothing below this offset any more."""
        self.settle_range(self.floor, first)

    def encode(self) -> bytes:
        self.merge()
        ranges: list[int] = []
        counts: list[int] = []
        last = self.floor
        for start, stop in zip(self._starts, self._stops, strict=True):
            ranges += (start - last, stop - start)
            last = stop
        last = self.floor
        for offset in sorted(self.counts):
            counts += (offset - last, self.counts[offset])
            last = offset
        return msgspec.msgpack.encode(_Stored(FORMAT, self.floor, self.end, self.is_clean, ranges, counts))

    @classmethod
    def decode(cls, content: bytes, where: str) -> "AckState":
        """`Damaged` if it is none. `where`: for the message."""
        try:
            stored = msgspec.msgpack.decode(content, type=_Stored)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Damaged(where, f"it is no acknowledgement state ({error})") from None
        if stored.format != FORMAT:
            raise Damaged(where, f"an acknowledgement state of format {stored.format}, expected {FORMAT}")
        numbers = (stored.floor, *stored.ranges, *stored.counts)
        if min(numbers) < 0 or len(stored.ranges) % 2 or len(stored.counts) % 2:
            raise Damaged(where, "an acknowledgement state with numbers that make no ranges")
        state = cls(stored.floor, stored.end)
        state.is_clean = stored.is_clean
        last = stored.floor
        for gap, length in _pairs(stored.ranges):
            state._starts.append(last + gap)
            last += gap + length
            state._stops.append(last)
        last = stored.floor
        for gap, count in _pairs(stored.counts):
            last += gap
            state.counts[last] = count
        return state

    def _merge_ranges(self, starts: list[int], stops: list[int]) -> None:
        """Both lists ascend, and so do the ranges that are known: they are merged like sorted lists."""
        if self._starts:
            pairs = sorted([*zip(self._starts, self._stops, strict=True), *zip(starts, stops, strict=True)])
        else:
            pairs = list(zip(starts, stops, strict=True))
        merged_starts: list[int] = []
        merged_stops: list[int] = []
        floor = self.floor
        for start, stop in pairs:
            if start <= floor:
                floor = max(floor, stop)
            elif merged_stops and start <= merged_stops[-1]:
                merged_stops[-1] = max(merged_stops[-1], stop)
            else:
                merged_starts.append(start)
                merged_stops.append(stop)
        self.floor, self._starts, self._stops = floor, merged_starts, merged_stops
        self.end = max(self.end, floor)

    def _drop_counts(self) -> None:
        if self.counts:
            self.counts = {offset: n for offset, n in self.counts.items() if not self.is_settled(offset)}


def _pairs(flat: Sequence[int]) -> Iterable[tuple[int, int]]:
    return zip(flat[::2], flat[1::2], strict=True)
