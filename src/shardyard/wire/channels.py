"""What the records of channels hold, in the topics between those who post and those who receive. No I/O.

    events     what is posted to channels, by channel; any number of partitions
    fanout     the same, in partition `jump(xxh64(channel), 256)`; a fan-out worker owns a share of the partitions
    members    who joined and left a channel, in the partition of the channel as in `fanout`
    presence   which clients of a user are connected, in the partition of the user as in `inbox`
    inbox      one record of a post in each partition with online members of its channel; see `wire.inbox`

A change of `members` and `presence` is one byte, `+` or `-`, followed by a name, so that millions of them are read and
written without decoding each.
"""

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from shardyard.model import Malformed

EVENTS = "events"
FANOUT = "fanout"
MEMBERS = "members"
PRESENCE = "presence"

FANOUT_PARTITIONS = 256
"""Of `fanout` and `members`."""
PARTITIONER = "jump"
HASH = "xxh64"
"""By which these two place a channel."""
EVENT_PARTITIONS = 16
"""Of `events`, if it does not exist yet."""

MAX_CHANNEL_LENGTH = 128
Channel = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=MAX_CHANNEL_LENGTH,
        pattern=r"^[^\x00]*\Z",
        description=f"a name of 1 to {MAX_CHANNEL_LENGTH} characters, without NUL",
    ),
]
"""The name of a channel."""

ADDED = b"+"
REMOVED = b"-"
CLEARED = b"="
"""In `presence`, without a key: no client of the partition's users is connected, but for those that follow."""

DELIVERED = "delivered"
"""The header of an event in `events` that is not forwarded, because the pipeline job `fanout` stores it in `inbox`. Its
value is the id of the run."""
BULK = "bulk"
"""Instead of a topic in the `Source` of a post that this job stored: the rest is the event's place in `events`. Another
name, because whoever forwards `events` takes all posts from there for its own."""


class ChannelEvent(Struct, array_like=True, frozen=True):
    """The value of a record of `events`, of `fanout`, and of a post in `inbox`. The key of the first two is the
    channel."""

    id: int
    """No two events of a channel have the same. Later ones have greater ids."""
    sender: str
    device: str
    """The sender's client, which does not get it; empty if no client sent it."""
    number: int
    """The client's own number of it."""
    at: int
    """In milliseconds since 1970."""
    text: str


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(ChannelEvent)


def encode_event(event: ChannelEvent) -> bytes:
    """The value of a record."""
    return _encoder.encode(event)


def decode_event(value: bytes) -> ChannelEvent:
    """The event in the value of a record. `Malformed` says what is wrong with it."""
    try:
        event = _decoder.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Malformed("channel event", str(error)) from None
    if not 0 <= event.id < 2**63:
        raise Malformed("channel event", f"the id {event.id} is not between 0 and 2**63 - 1")
    return event


def change(name: str, *, added: bool) -> bytes:
    """The value of a record of `members` (the name of a user; the key is the channel) or of `presence` (the name of a
    client; the key is the user)."""
    return (ADDED if added else REMOVED) + name.encode()


def parse_change(value: bytes) -> tuple[str, bool]:
    """The name, and whether it was added."""
    if value[:1] not in (ADDED, REMOVED) or len(value) < 2:
        raise Malformed("change", "it is '+' or '-', and a name")
    try:
        return value[1:].decode(), value[:1] == ADDED
    except UnicodeDecodeError as error:
        raise Malformed("change", str(error)) from None


class Source(Struct, frozen=True):
    """Where a forwarded record comes from. It is the id of the record, as text, so that whoever continues to forward
    finds what was forwarded before."""

    topic: str
    index: int
    """Of the partition."""
    epoch: int
    """Of the topic."""
    offset: int
    members: int = 0
    """Of a post in `inbox`: its channel's members were known up to this offset of `members`."""


def source_prefix(topic: str, index: int, epoch: int) -> str:
    """What the ids of all records begin with that are forwarded from a partition."""
    return f"{topic}.{index}.{epoch}."


def parse_source(id_: str) -> Source:
    """The source in the id of a forwarded record: `<prefix><offset>`, and `.<members>` for a post in `inbox`."""
    parts = id_.split(".")
    try:
        if len(parts) not in (4, 5):
            raise ValueError
        return Source(parts[0], *(int(part) for part in parts[1:]))
    except ValueError:
        raise Malformed("source", f"{id_!r} is not <topic>.<partition>.<epoch>.<offset>") from None


def event_producer(id_: int, channel: str) -> str:
    """The producer of the stamp, with the sequence 0, under which an event with a given id is stored: whoever stores it
    again, it is stored once."""
    return f"event {id_} of {channel}"
