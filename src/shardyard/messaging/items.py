"""What is delivered to clients, encoded once for all of them; and the newest of it in each partition."""

from collections import deque
from collections.abc import Iterator, Sequence

import msgspec

from shardyard.wire.channels import ChannelEvent
from shardyard.wire.inbox import InboxEntry, Mark
from shardyard.wire.messaging import Format, Marked, Message, Posted, encode


class Post(msgspec.Struct, frozen=True):
    """A post to a channel."""

    channel: str
    event: ChannelEvent

    @property
    def id(self) -> int:
        return self.event.id

    @property
    def at(self) -> int:
        return self.event.at


class Item:
    """An entry for a user's clients, or a post for those of a channel's members."""

    __slots__ = ("_json", "_msgpack", "entry", "offset", "size")

    def __init__(self, entry: InboxEntry | Post, offset: int | None, size: int) -> None:
        self.entry = entry
        self.offset = offset
        """In the user's partition; None if it did not come from there."""
        self.size = size
        """About its bytes."""
        self._json: msgspec.Raw | None = None
        self._msgpack: msgspec.Raw | None = None

    @property
    def is_away(self) -> bool:
        """Whether it only says that the user was offline from here on."""
        return isinstance(self.entry, InboxEntry) and self.entry.away

    def is_from(self, user: str, device: str) -> bool:
        """Whether that client of the user has sent it, and so does not get it."""
        entry = self.entry
        if isinstance(entry, Post):
            return entry.event.device == device and entry.event.sender == user
        return entry.copy and entry.device == device

    def encoded(self, format_: Format) -> msgspec.Raw:
        """As a part of a `Deliver` frame."""
        if format_ is Format.JSON:
            if self._json is None:
                self._json = msgspec.Raw(encode(frame_of(self.entry, self.offset), format_))
            return self._json
        if self._msgpack is None:
            self._msgpack = msgspec.Raw(encode(frame_of(self.entry, self.offset), format_))
        return self._msgpack


def frame_of(entry: InboxEntry | Post, offset: int | None) -> Message | Marked | Posted:
    """An entry as clients get it."""
    if isinstance(entry, Post):
        event = entry.event
        return Posted(str(event.id), entry.channel, event.sender, event.text, event.at, offset)
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
    """The newest items of a partition by the key of their record, which is a user, or `POST_KEY` and a channel. So
    clients that reconnect get what they missed from memory."""

    def __init__(self, first: int, *, most: int, most_bytes: int) -> None:
        """`first`: the offset from which on it has all items. `most`, `most_bytes`: that it keeps."""
        self.first = first
        self.end = first
        """It has all items before this offset."""
        self._most = most
        self._most_bytes = most_bytes
        self._bytes = 0
        self._items: deque[tuple[str, Item]] = deque()
        self._by_key: dict[str, deque[Item]] = {}

    def add(self, key: str, item: Item, offset: int) -> None:
        self._items.append((key, item))
        self._by_key.setdefault(key, deque()).append(item)
        self._bytes += item.size
        self.end = offset + 1
        while len(self._items) > self._most or self._bytes > self._most_bytes:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        key, item = self._items.popleft()
        mine = self._by_key[key]
        mine.popleft()
        if not mine:
            del self._by_key[key]
        self._bytes -= item.size
        if item.offset is not None:
            self.first = item.offset + 1

    def items(self, key: str, offset: int) -> Iterator[Item]:
        """The items of a key from an offset on, which is not below `first`."""
        return (item for item in self._by_key.get(key, ()) if item.offset is not None and item.offset >= offset)
