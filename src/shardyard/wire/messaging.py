"""The frames between a user's client and a messaging server, in JSON and MessagePack. No I/O.

A WebSocket message carries one frame, or an array of frames. The subprotocol decides on the format: JSON in text
messages, or MessagePack in binary ones. `docs/messaging-protocol.md` describes the whole protocol. Ids are strings of
digits, because JavaScript's numbers are too small for them.
"""

from enum import Enum
from typing import Annotated, Literal, Protocol, TypeVar

import msgspec
from msgspec import Meta, Struct, field

from shardyard.model import Malformed
from shardyard.wire.channels import Channel
from shardyard.wire.inbox import Device, MarkKind, User

F_co = TypeVar("F_co", covariant=True)
T = TypeVar("T")

PATH = "/v1/messaging"
"""Where a messaging server takes WebSocket connections."""
MAX_FRAME_BYTES = 64 * 1024
"""Of a WebSocket message from a client."""
MAX_PAGE = 200
"""Messages of one page of history, and chats of one list."""
CLOCKS_MS = 10_000
"""By how much the clocks of servers may differ. A client that resumes gets what its user's other clients sent from so
long before the last of it on, and drops what it knows."""
MAX_WATCHED = 200
"""Users whose presence one client watches."""
MAX_SERVERS = 16
"""Addresses of servers that a client gets and keeps."""

Number = Annotated[int, Meta(ge=0, le=2**53 - 1)]
"""A client's own number of what it sends or asks; an answer has the number of its call."""
Id = Annotated[str, Meta(pattern=r"^[0-9]{1,19}\Z", description="a string of up to 19 digits")]
_MAX_ID = 2**63 - 1
PageSize = Annotated[int, Meta(ge=1, le=MAX_PAGE)]


class Format(Enum):
    """How frames are encoded, by the name of its subprotocol."""

    JSON = "shardyard.messaging.1.json"
    MSGPACK = "shardyard.messaging.1.msgpack"


class Position(Struct, frozen=True):
    """How far a client has received its user's partition."""

    partition: Number
    """Its index. Together with the epoch it tells whether the offset still means the same."""
    epoch: Number
    offset: Number


# From a client


class Hello(Struct, frozen=True, tag="hello"):
    """The first frame: who the client is, and where it resumes. Answered with `Welcome`, or with `Elsewhere`."""

    token: Annotated[str, Meta(max_length=4096)]
    device: Device
    position: Position | None = None
    """None: begin with what arrives from now on, and with what the history may not have yet."""
    last: Id | None = None
    """The last message or mark that it received from its partition, by which it resumes if the position has become
    invalid."""
    sent: Id | None = None
    """The newest message of its own user that it knows, sent by any of the user's clients."""


class Send(Struct, frozen=True, tag="send"):
    """Send a message. Answered with `Sent` when it is durable, or with `Refused`. A client numbers what it sends in
    ascending order; the same number again, also on another connection, is the same message again, and is stored once.
    """

    number: Number
    recipient: User = field(name="to")
    text: str


class SetMark(Struct, frozen=True, tag="mark"):
    """Tell the sender of messages that they were delivered or seen, up to one of them. Numbered and answered as
    `Send`."""

    number: Number
    recipient: User = field(name="to")
    kind: MarkKind
    upto: Id


class Typing(Struct, frozen=True, tag="typing"):
    """The user is typing. It is not stored, and not answered."""

    recipient: User = field(name="to")


class Watch(Struct, frozen=True, tag="watch"):
    """Watch the presence of these users instead of those of the last `Watch`. `Presence` follows for each of them, and
    after every change."""

    users: Annotated[list[User], Meta(max_length=MAX_WATCHED)]


class GetHistory(Struct, frozen=True, tag="history"):
    """Ask for a page of a conversation, newest first. Answered with `History`."""

    number: Number
    peer: User = field(name="with")
    before: Id | None = None
    """Only messages with smaller ids: the last id of the page before."""
    limit: PageSize = 50


class GetChats(Struct, frozen=True, tag="chats"):
    """Ask for the user's conversations, the one with the newest message first. Answered with `Chats`."""

    number: Number
    before: Id | None = None
    """Only conversations whose last message has a smaller id."""
    limit: PageSize = 50


class Post(Struct, frozen=True, tag="post"):
    """Send a message to a channel that the user has joined. Numbered and answered as `Send`."""

    number: Number
    channel: Channel
    text: str


class Join(Struct, frozen=True, tag="join"):
    """Join a channel. Answered with `Done` when that is durable; joining twice changes nothing."""

    number: Number
    channel: Channel


class Leave(Struct, frozen=True, tag="leave"):
    """Leave a channel. Answered with `Done` when that is durable; a user who is not a member may leave, too."""

    number: Number
    channel: Channel


class TypingIn(Struct, frozen=True, tag="typing-in"):
    """The user is typing in a channel. It is not stored, and not answered."""

    channel: Channel


class GetPosts(Struct, frozen=True, tag="posts"):
    """Ask for a page of a channel that the user has joined, newest first. Answered with `Posts`."""

    number: Number
    channel: Channel
    before: Id | None = None
    limit: PageSize = 50


class GetChannels(Struct, frozen=True, tag="channels"):
    """Ask for the channels that the user has joined, in the order of their names. Answered with `Channels`."""

    number: Number
    after: Channel | None = None
    """Only channels whose names come after this one."""
    limit: PageSize = 50


class Ping(Struct, frozen=True, tag="ping"):
    """Answered with `Pong`. For clients that can't send the pings of WebSocket, such as browsers."""


ClientFrame = (
    Hello
    | Send
    | SetMark
    | Typing
    | Watch
    | GetHistory
    | GetChats
    | Post
    | Join
    | Leave
    | TypingIn
    | GetPosts
    | GetChannels
    | Ping
)


# From a server


class Welcome(Struct, frozen=True, tag="welcome"):
    """The connection is open. What the client missed follows, then `CaughtUp`."""

    user: str
    position: Position
    """Where the client's partition is read from: its own position, or the end of the partition."""
    mirror: Literal["log", "local"]
    resume: Literal["new", "position", "id", "lost"]
    """How the client resumes: not at all, from its position, from its last id because the position became invalid, or
    from the end, because neither is known any more: then the client has to load the history."""
    sent: str | None = None
    """With mirror "local": for `Hello.sent` of a client that knows no message of its own user yet. What the user's
    other clients send from now on has greater ids."""
    server: str = ""
    """The name of the server in its group."""
    ownership: int = 0
    """The epoch under which it owns the user's partition. No two servers serve a user under the same one."""
    servers: tuple[str, ...] = ()
    """Addresses of some servers, up to `MAX_SERVERS`: any of them knows where the user is served when this one is gone.
    """


class Message(Struct, frozen=True, tag="message", omit_defaults=True):
    """A message, in `Deliver` and in pages of history."""

    id: str
    sender: str = field(name="from")
    recipient: str = field(name="to")
    text: str
    at: int
    """When it was sent, in milliseconds since 1970."""
    offset: int | None = None
    """Its offset in the user's partition; none if it did not come from there."""


class Marked(Struct, frozen=True, tag="marked", omit_defaults=True):
    """The sender has got or read the recipient's messages up to one."""

    id: str
    sender: str = field(name="from")
    recipient: str = field(name="to")
    kind: MarkKind
    upto: str
    at: int
    offset: int | None = None


class Posted(Struct, frozen=True, tag="posted", omit_defaults=True):
    """A message in a channel, in `Deliver` and in `Posts`."""

    id: str
    channel: str
    sender: str = field(name="from")
    text: str
    at: int
    offset: int | None = None


class Deliver(Struct, frozen=True, tag="deliver"):
    """Messages, marks and posts of the user's partition, in its order, and copies of what the user's other clients
    sent."""

    seq: int
    """How many were put on this connection's queue before the first of these. If it is not the number that were
    received, some are missing: reconnect from the last position."""
    epoch: int
    entries: list[Message | Marked | Posted]


class CaughtUp(Struct, frozen=True, tag="caught-up"):
    """The client has got everything that it missed."""

    position: Position


class Gap(Struct, frozen=True, tag="gap"):
    """Something that the client missed can't be delivered any more: load the history."""

    reason: str


class Sent(Struct, frozen=True, tag="sent"):
    """A message or a mark is durable."""

    number: int
    id: str
    at: int
    duplicate: bool = False
    """It had been stored before."""


class Refused(Struct, frozen=True, tag="refused"):
    """What the client asked was not done, and changed nothing."""

    number: int | None
    code: str
    """Of the error: see `docs/messaging-protocol.md`."""
    message: str
    retry: bool = False
    """The same may succeed later."""


class IsTyping(Struct, frozen=True, tag="typing"):
    """Another user is typing to this one."""

    sender: str = field(name="from")


class IsTypingIn(Struct, frozen=True, tag="typing-in"):
    """Another user is typing in a channel."""

    channel: str
    sender: str = field(name="from")


class Done(Struct, frozen=True, tag="done"):
    """What the client asked is done, and durable."""

    number: int


class Membership(Struct, frozen=True, tag="membership"):
    """The user has joined or left a channel, by this or another client, or by an administrator."""

    channel: str
    joined: bool


class Presence(Struct, frozen=True, tag="presence"):
    """How many clients of a user are connected."""

    user: str
    online: int
    since: int
    """When the user came online or went offline, in milliseconds since 1970; 0 if that is not known."""


class History(Struct, frozen=True, tag="page"):
    """A page of a conversation, newest first."""

    number: int
    messages: list[Message]
    more: bool
    """There are older messages."""


class Chat(Struct, frozen=True):
    """A conversation as one of its users sees it."""

    peer: str = field(name="with")
    last: Message
    unread: int
    """Messages of the peer that the user has not seen."""
    seen: str | None
    """The peer's last message that the user has seen."""
    peer_delivered: str | None
    """The user's last message that was delivered to the peer."""
    peer_seen: str | None
    """The user's last message that the peer has seen."""


class Chats(Struct, frozen=True, tag="chat-list"):
    """The user's conversations."""

    number: int
    chats: list[Chat]
    more: bool


class Posts(Struct, frozen=True, tag="posts-page"):
    """A page of a channel, newest first."""

    number: int
    posts: list[Posted]
    more: bool
    """There are older ones."""


class Channels(Struct, frozen=True, tag="channel-list"):
    """The channels that the user has joined."""

    number: int
    channels: list[str]
    more: bool


class Elsewhere(Struct, frozen=True, tag="elsewhere"):
    """Another server serves this user. The connection is closed after this frame."""

    address: str | None
    """Where to connect; None: ask the directory."""
    after: float
    """Seconds to wait before connecting, so that not all clients arrive at once."""


class Pong(Struct, frozen=True, tag="pong", omit_defaults=True):
    """The answer to `Ping`."""

    position: Position | None
    """Everything before it was sent to the client before this frame: resume from here. None if that is not known."""
    servers: tuple[str, ...] = ()
    """As in `Welcome`, if they have changed since the client was told."""


ServerFrame = (
    Welcome
    | Deliver
    | CaughtUp
    | Gap
    | Sent
    | Refused
    | IsTyping
    | IsTypingIn
    | Done
    | Membership
    | Presence
    | History
    | Chats
    | Posts
    | Channels
    | Elsewhere
    | Pong
)


# Over HTTP


class SessionGranted(Struct, frozen=True):
    """The answer to `POST /v1/session`."""

    user: str
    token: str
    """For `Hello`."""
    expires_at: int
    """In milliseconds since 1970."""
    address: str
    """Where to connect."""


class Drained(Struct, frozen=True):
    """The answer to `POST /v1/drain`."""

    others: int
    """Servers that serve its users now. Without any, nobody does."""


class Where(Struct, frozen=True):
    """The answer to `GET /v1/where/{user}`."""

    user: str
    partition: int
    """Its index in the topic `inbox`."""
    address: str
    member: str
    epoch: int
    """Of the ownership."""


class _Decoder(Protocol[F_co]):
    def decode(self, message: bytes, /) -> F_co | list[F_co]: ...


_json_encoder = msgspec.json.Encoder()
_msgpack_encoder = msgspec.msgpack.Encoder()
_from_client: dict[Format, _Decoder[ClientFrame]] = {
    Format.JSON: msgspec.json.Decoder(ClientFrame | list[ClientFrame]),
    Format.MSGPACK: msgspec.msgpack.Decoder(ClientFrame | list[ClientFrame]),
}
_from_server: dict[Format, _Decoder[ServerFrame]] = {
    Format.JSON: msgspec.json.Decoder(ServerFrame | list[ServerFrame]),
    Format.MSGPACK: msgspec.msgpack.Decoder(ServerFrame | list[ServerFrame]),
}


def number_of(id_: str) -> int:
    """An id as a number. One that is larger than any is taken for the largest."""
    return min(int(id_), _MAX_ID)


def encode(frame: object, format_: Format) -> bytes:
    """A frame, or anything in it."""
    return _json_encoder.encode(frame) if format_ is Format.JSON else _msgpack_encoder.encode(frame)


def decode_from_client(message: bytes, format_: Format) -> list[ClientFrame]:
    """The frames of a WebSocket message from a client. `Malformed` says what is wrong with it."""
    return _decode(_from_client[format_], message)


def decode_from_server(message: bytes, format_: Format) -> list[ServerFrame]:
    """The frames of a WebSocket message from a server. `Malformed` says what is wrong with it."""
    return _decode(_from_server[format_], message)


def _decode(decoder: _Decoder[T], message: bytes) -> list[T]:
    try:
        frames = decoder.decode(message)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Malformed("frame", str(error)) from None
    return frames if isinstance(frames, list) else [frames]
