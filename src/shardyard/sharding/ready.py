"""The messages of a queue that are in memory and wait for delivery."""

from collections.abc import Iterable, Sequence

from shardyard.model import Record


class Ready:
    """Messages in the order of their offsets. Those that were delivered before and came back are ahead of the others:
    messages are delivered in order, so their offsets are lower."""

    __slots__ = ("_head", "_offsets", "_records", "_returned", "_returned_records", "size")

    def __init__(self) -> None:
        self._offsets: list[int] = []
        self._records: list[Record] = []
        self._head = 0
        """What lies before this index was taken."""
        self._returned: list[int] = []
        """Ascending."""
        self._returned_records: dict[int, Record] = {}
        self.size = 0
        """Bytes of the bodies, without those that came back."""

    def __len__(self) -> int:
        return len(self._offsets) - self._head + len(self._returned)

    @property
    def unread(self) -> int:
        """How many were never delivered by this owner."""
        return len(self._offsets) - self._head

    @property
    def returned(self) -> int:
        """How many came back."""
        return len(self._returned)

    def add(self, offsets: Sequence[int], records: Sequence[Record]) -> None:
        """Add messages that come after all others."""
        self._offsets.extend(offsets)
        self._records.extend(records)
        self.size += sum(len(record.value) for record in records)

    def give_back(self, messages: Iterable[tuple[int, Record]]) -> None:
        """Put messages back to their places."""
        returned = dict(messages)
        self._returned_records.update(returned)
        self._returned.extend(returned)
        self._returned.sort()

    def first(self) -> Record | None:
        """The message that is delivered next."""
        if self._returned:
            return self._returned_records[self._returned[0]]
        return self._records[self._head] if self._head < len(self._records) else None

    def take(self, most: int, most_bytes: int | None = None) -> tuple[list[int], list[Record]]:
        """The next messages, at most so many: either ones that came back, or others. Together they have at most
        `most_bytes`, or there is only one."""
        if self._returned:
            offsets = self._returned[:most]
            records = [self._returned_records[offset] for offset in offsets]
            count = len(records) if most_bytes is None else _fitting(records, most_bytes)
            del self._returned[:count]
            for offset in offsets[:count]:
                del self._returned_records[offset]
            return offsets[:count], records[:count]
        start, stop = self._head, self._head + most
        records = self._records[start:stop]
        if most_bytes is not None:
            records = records[: _fitting(records, most_bytes)]
        offsets = self._offsets[start : start + len(records)]
        self._head += len(offsets)
        self.size -= sum(len(record.value) for record in records)
        if 2 * self._head >= len(self._offsets):
            del self._offsets[: self._head]
            del self._records[: self._head]
            self._head = 0
        return offsets, records

    def clear(self) -> None:
        """Drop everything."""
        self._offsets.clear()
        self._records.clear()
        self._returned.clear()
        self._returned_records.clear()
        self._head = self.size = 0


def _fitting(records: Sequence[Record], most_bytes: int) -> int:
    """How many of these have at most so many bytes together; at least one, if there is one."""
    size = 0
    for count, record in enumerate(records):
        size += len(record.value)
        if record.headers:
            size += sum([len(name) + len(value) for name, value in record.headers])
        if size > most_bytes and count:
            return count
    return len(records)
