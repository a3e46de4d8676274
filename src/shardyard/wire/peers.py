"""What messaging servers and fan-out workers tell and ask each other directly: what is never stored. No I/O.

A typing notice for a channel goes from the typist's messaging server to the worker that serves the channel (POST
`TYPING_PATH`, a `ChannelTyping`), which looks up where members are online, and from there to the messaging servers of
those inbox partitions (POST `PEER_PATH`, `PeerCall.channel_typing`).
"""

from msgspec import Struct

from shardyard.wire.channels import Channel
from shardyard.wire.inbox import User
from shardyard.wire.messaging import Presence

PEER_PATH = "/v1/peer"
"""Of messaging servers: a `PeerCall`, answered with a `PeerAnswer`."""
TYPING_PATH = "/v1/typing"
"""Of fan-out workers: a `ChannelTyping`, answered with a `TypingRouted`."""


class TypingNotice(Struct, frozen=True, array_like=True):
    """A user is typing to another one."""

    sender: str
    recipient: str


class ChannelTyping(Struct, frozen=True):
    """A user is typing to a channel."""

    channel: Channel
    sender: User
    device: str = ""
    """The sender's client."""


class TypingRouted(Struct, frozen=True):
    """How far a typing notice went."""

    partitions: int
    """Inbox partitions with online members of the channel."""


class PeerCall(Struct, frozen=True):
    """What another server tells and asks a messaging server."""

    typing: list[TypingNotice] = []
    presence: list[str] = []
    """Users whose presence it asks for."""
    channel_typing: list[ChannelTyping] = []
    """For the channels' members among the server's users, except the sender."""


class PeerAnswer(Struct, frozen=True):
    presence: list[Presence] = []
