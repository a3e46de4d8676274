"""What is delivered to clients, encoded once for all of them; and the newest of it in each partition."""

from collections import deque
from collections.abc import Iterator, Sequence

import msgspec

from shardyard.wire.inbox import InboxEntry, Mark
from shardyard.wire.messaging import Format, Marked, Message, encode


class Item:
    """An entry for a user's clients."""

    __slots__ = ("_json", "_msgpack", "entry", "offset", "size")

    def __init__(self, entry: InboxEntry, offset: int | None, size: int) -> None:
        self.entry = entry
        self.offset = offset
        """In the user's partition; None if it did not come from there."""
        self.size = size
        """About its bytes."""
        self._json: msgspec.Raw | None = None
        self._msgpack: msgspec.Raw | None = None

    def encoded(self, format_: Format) -> msgspec.Raw:
        """As a part of a `Deliver` frame."""
        if format_ is Format.JSON:
            if self._json is None:
                self._json = msgspec.Raw(encode(frame_of(self.entry, self.offset), format_))
            return self._json
        if self._msgpack is None:
            self._msgpack = msgspec.Raw(encode(frame_of(self.entry, self.offset), format_))
        return self._msgpack


def frame_of(entry: InboxEntry, offset: int | None) -> Message | Marked:
    """An entry as clients get it."""
    content = entry.content
    if isinstance(content, Mark):
        return Marked(
            str(entry.id), entry.sender, entry.recipient, content.kind, str(content.upto), entry.at, offset=offset
        )
    return Message(str(entry.id), entry.sender, entry.recipient, content, entry.at, offset=offset)


class Deliver(msgspec.Struct, frozen=True, tag="deliver"):
    """`wire.messaging.Deliver` with entries that are encoded already."""

    seq: int
    epoch: int
    entries: Sequence[msgspec.Raw]


class Tail:
    """The newest items of a partition, by user, so that clients that reconnect get what they missed from memory."""

    def __init__(self, first: int, *, most: int, most_bytes: int) -> None:
        """`first`: the offset from which on it has all items. `most`, `most_bytes`: that it keeps."""
        self.first = first
        self.end = first
        """It has all items before this offset."""
        self._most = most
        self._most_bytes = most_bytes
        self._bytes = 0
        self._items: deque[tuple[str, Item]] = deque()
        self._by_user: dict[str, deque[Item]] = {}

    def add(self, user: str, item: Item, offset: int) -> None:
        self._items.append((user, item))
        self._by_user.setdefault(user, deque()).append(item)
        self._bytes += item.size
        self.end = offset + 1
        while len(self._items) > self._most or self._bytes > self._most_bytes:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        user, item = self._items.popleft()
        mine = self._by_user[user]
        mine.popleft()
        if not mine:
            del self._by_user[user]
        self._bytes -= item.size
        if item.offset is not None:
            self.first = item.offset + 1

    def items(self, user: str, offset: int) -> Iterator[Item]:
        """The user's items from an offset on, which is not below `first`."""
        return (item for item in self._by_user.get(user, ()) if item.offset is not None and item.offset >= offset)
