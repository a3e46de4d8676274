"""What the users of this server sent lately, for their clients that connect before the history has it."""

from collections import OrderedDict, deque

from shardyard.messaging.items import Item
from shardyard.wire.inbox import InboxEntry

MOST = 50_000
"""Entries that are remembered. The history has older ones."""
MOST_BYTES = 32 * 1024 * 1024
"""Of their texts, about."""


class RecentlySent:
    """The newest entries that this server stored for each sender. For `mirror = "local"`, where the log has no copies
    for the sender's other clients."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._bytes = 0
        self._entries: OrderedDict[int, InboxEntry] = OrderedDict()
        self._by_user: dict[str, deque[InboxEntry]] = {}

    def add(self, entry: InboxEntry) -> bool:
        """Remember an entry. Returns whether it was not known."""
        if entry.id in self._entries:
            return False
        self._entries[entry.id] = entry
        self._by_user.setdefault(entry.sender, deque()).append(entry)
        self._bytes += _size(entry)
        while len(self._entries) > self._most or self._bytes > MOST_BYTES:
            _, oldest = self._entries.popitem(last=False)
            self._bytes -= _size(oldest)
            mine = self._by_user[oldest.sender]
            mine.popleft()
            if not mine:
                del self._by_user[oldest.sender]
        return True

    def items(self, user: str, device: str, after: int) -> list[Item]:
        """What other clients of the user sent, with ids above `after`. What the user sent to itself is none of it:
        its partition has that for all of its clients."""
        return [
            Item(entry, None, 0)
            for entry in self._by_user.get(user, ())
            if entry.id > after and entry.device != device and entry.recipient != user
        ]


def _size(entry: InboxEntry) -> int:
    return len(entry.content) if isinstance(entry.content, str) else 0
