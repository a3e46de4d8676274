"""What the records of the topic `inbox` hold. The record's key is the user whose clients get it, and its id is that of
the entry. A post to a channel is for all members of the channel among the partition's users: its key is `POST_KEY` and
the channel, its value a `wire.channels.ChannelEvent`, and its id the `wire.channels.Source`. No I/O."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from shardyard.model import Malformed

TOPIC = "inbox"
"""The topic whose partitions messaging servers own."""
GROUP = "messaging"
"""The group whose members are messaging servers."""

POST_KEY = b"\0"
"""What the key of a post begins with; no name of a user does."""
MAX_USER_LENGTH = 128
MAX_TEXT_BYTES = 16 * 1024

User = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=MAX_USER_LENGTH,
        pattern=r"^[^\x00]*\Z",
        description=f"a name of 1 to {MAX_USER_LENGTH} characters, without NUL",
    ),
]
"""The name of a user. Databases take no NUL characters."""
Device = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[^\x00]*\Z")]
"""The name of one client of a user, which the client chooses. No two clients of a user have the same."""
MarkKind = Literal["delivered", "seen"]


class Mark(Struct, array_like=True, frozen=True):
    """The sender has got, or read, all messages of the recipient up to one."""

    kind: MarkKind
    upto: int
    """The id of that message."""


class InboxEntry(Struct, array_like=True, frozen=True):
    """A message or a mark from one user to another, or the copy of one for the other clients of its sender."""

    id: int
    """A snowflake: see `messaging.snowflakes`."""
    sender: str
    recipient: str
    device: str
    """The sender's client, which does not get the copy."""
    number: int
    """The client's own number of it."""
    at: int
    """When the server got it, in milliseconds since 1970."""
    content: str | Mark
    """The text of a message, or a mark."""
    copy: bool = False
    """It is addressed to the sender, whose other clients get it."""
    away: bool = False
    """No message: from here on, posts to the recipient's channels were not stored in this partition for the recipient,
    who was offline."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(InboxEntry)


def encode_entry(entry: InboxEntry) -> bytes:
    """The value of a record."""
    return _encoder.encode(entry)


def decode_entry(value: bytes) -> InboxEntry:
    """The entry in the value of a record. `Malformed` says what is wrong with it."""
    try:
        return _decoder.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Malformed("inbox record", str(error)) from None
