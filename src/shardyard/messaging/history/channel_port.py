"""The port of the history of channels: what was posted to them, and who has joined them."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardyard.wire.channels import ChannelEvent
from shardyard.wire.messaging import Posted


@dataclass(frozen=True, slots=True)
class ChannelPost:
    """An event, and the channel that it was posted to."""

    channel: str
    event: ChannelEvent


@dataclass(frozen=True, slots=True)
class MemberChange:
    """A user has joined or left a channel."""

    channel: str
    user: str
    joined: bool
    epoch: int
    """Of the topic `members`."""
    offset: int
    """In the channel's partition of it."""


@dataclass(frozen=True, slots=True)
class PostPage:
    """Posts of a channel, newest first."""

    posts: Sequence[Posted]
    more: bool
    """There are older ones."""


@dataclass(frozen=True, slots=True)
class MemberPage:
    """Members of a channel, in the order of their names."""

    members: Sequence[str]
    more: bool


class ChannelHistory(ABC):
    """All posts by channel, and all memberships by user.

    A post is known by its channel and its id: storing it again changes nothing. Of the changes of one membership the
    one with the greatest position counts, whatever the order in which they are stored, and however often.
    """

    @abstractmethod
    async def store_posts(self, posts: Sequence[ChannelPost]) -> None:
        """Store posts, all or nothing. Returns when they are durable."""

    @abstractmethod
    async def store_changes(self, changes: Sequence[MemberChange]) -> None:
        """Store changes of memberships, all or nothing. Returns when they are durable."""

    @abstractmethod
    async def posts(self, channel: str, *, before: int | None = None, limit: int = 50) -> PostPage:
        """The newest posts of a channel with ids below `before`."""

    @abstractmethod
    async def channels_of(self, users: Sequence[str]) -> Mapping[str, set[str]]:
        """The channels that each of these users has joined; users without any are left out."""

    @abstractmethod
    async def members_of(self, channel: str, *, after: str = "", limit: int = 50) -> MemberPage:
        """The members of a channel whose names come after `after`, by their code points."""
