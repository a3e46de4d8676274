"""The port of the history. Its docstrings are the specification that every engine keeps."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from shardyard.messaging.history.channel_port import ChannelHistory
from shardyard.model import Partition
from shardyard.wire.inbox import InboxEntry
from shardyard.wire.messaging import Chat, Message


@dataclass(frozen=True, slots=True)
class PlacedEntry:
    """An entry, and where it lies in the log."""

    partition: Partition
    epoch: int
    offset: int
    entry: InboxEntry


@dataclass(frozen=True, slots=True)
class Page:
    """Messages of a conversation, newest first."""

    messages: Sequence[Message]
    more: bool
    """There are older ones."""


@dataclass(frozen=True, slots=True)
class ChatList:
    """Conversations of a user, the one with the newest message first."""

    chats: Sequence[Chat]
    more: bool


class History(ABC):
    """All messages and marks, by conversation and by user.

    Entries are known by their id: storing one again changes nothing. Copies for the sender's other clients are known as
    copies, and count nowhere: not in conversations, not in chats, not as unread. Ids order a conversation, because they
    ascend with time. Marks never go backwards, whatever the order in which they are stored. A message to oneself is
    never unread.
    """

    @property
    def channels(self) -> ChannelHistory | None:
        """Posts and memberships of channels, if this history has them."""
        return None

    @abstractmethod
    async def store(self, entries: Sequence[PlacedEntry]) -> None:
        """Store entries, all or nothing. Returns when they are durable."""

    @abstractmethod
    async def page(self, user: str, peer: str, *, before: int | None = None, limit: int = 50) -> Page:
        """The newest messages between two users, with ids below `before`."""

    @abstractmethod
    async def chats(self, user: str, *, before: int | None = None, limit: int = 50) -> ChatList:
        """The user's conversations whose last message has an id below `before`."""

    @abstractmethod
    async def addressed_to(self, user: str, epoch: int, first: int, end: int, limit: int) -> Sequence[PlacedEntry]:
        """What the user's partition held for the user (messages, marks and copies) with offsets from `first` up to, but
        not including, `end`, under this epoch, in the order of offsets; at most `limit` of them."""

    @abstractmethod
    async def sent_by(self, user: str, after: int, limit: int) -> Sequence[PlacedEntry]:
        """Messages and marks that the user sent with ids above `after`, in the order of ids; at most `limit` of them.
        No copies."""
