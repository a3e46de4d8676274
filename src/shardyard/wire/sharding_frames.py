"""The frames of a WebSocket connection for sharded queues, between a client and a node. No I/O.

Messages are arrays of frames `[number, [kind, ...fields]]`, as in `wire.frames`, on a path of their own and with other
kinds. A `Consume` and a `Subscribe` are answered many times, until they end. `docs/protocol.md` describes all of it.
"""

from typing import Annotated

from msgspec import Meta, Struct

from shardyard.model import Headers
from shardyard.model.sharding import OutgoingMessage
from shardyard.wire.errors import ErrorBody
from shardyard.wire.framing import Framing, Number

PATH = "/v1/sharding/connect"
"""Where a node takes these connections, on the port of its HTTP API."""
MAX_PREFETCH = 10_000
"""Deliveries of one subscription that are not acknowledged."""

Name = Annotated[str, Meta(max_length=1000)]
"""Of an exchange or a queue."""
Tag = Annotated[int, Meta(ge=0, le=2**62)]
"""Of a delivery: ascending, within a subscription."""
Sequence = Annotated[int, Meta(ge=0, le=2**62)]
Milliseconds = Annotated[int, Meta(ge=0, le=2**53)]
Strings = tuple[str, ...]


# Messages by column


class MessageColumns(Struct, omit_defaults=True, forbid_unknown_fields=True):
    """Messages to publish; each list has one item per message."""

    bodies: list[bytes]
    routing_keys: list[str]
    headers: list[Headers] | None = None
    """None: no message has one. The same for the others."""
    cc: list[Strings] | None = None
    bcc: list[Strings] | None = None
    properties: list[tuple[tuple[str, str], ...]] | None = None
    expirations_ms: list[Milliseconds | None] | None = None

    def __post_init__(self) -> None:
        """Called by the decoder, too."""
        columns = (self.routing_keys, self.headers, self.cc, self.bcc, self.properties, self.expirations_ms)
        if any(column is not None and len(column) != len(self.bodies) for column in columns):
            raise ValueError("all columns must have the same length")

    def __len__(self) -> int:
        return len(self.bodies)

    @classmethod
    def of(cls, messages: "list[OutgoingMessage]") -> "MessageColumns":
        return cls(
            [message.body for message in messages],
            [message.routing_key for message in messages],
            [m.headers for m in messages] if any(m.headers for m in messages) else None,
            [m.cc for m in messages] if any(m.cc for m in messages) else None,
            [m.bcc for m in messages] if any(m.bcc for m in messages) else None,
            [m.properties for m in messages] if any(m.properties for m in messages) else None,
            [m.expiration_ms for m in messages] if any(m.expiration_ms is not None for m in messages) else None,
        )

    def messages(self) -> list[OutgoingMessage]:
        others = (self.headers, self.cc, self.bcc, self.properties, self.expirations_ms)
        if not any(others):
            return list(map(OutgoingMessage, self.bodies, self.routing_keys))
        none: list[tuple[()]] = [()] * len(self)
        return [
            OutgoingMessage(*fields)
            for fields in zip(
                self.bodies,
                self.routing_keys,
                self.headers or none,
                self.cc or none,
                self.bcc or none,
                self.properties or none,
                self.expirations_ms or [None] * len(self),
                strict=True,
            )
        ]


# Calls


class Publish(Struct, array_like=True, tag=1, frozen=True):
    """Publish messages to an exchange; answered with a `Routed` when they are durable. With the same producer and
    sequence again, they are stored once."""

    exchange: Name
    messages: MessageColumns
    producer: Name | None = None
    sequence: Sequence | None = None


class Consume(Struct, array_like=True, tag=2, frozen=True):
    """Become a consumer of an exchange or a queue: `Attached` follows at once and after every change, until
    `Cancel`."""

    name: Name
    local: bool = False
    """Only shards that this node owns."""


class Subscribe(Struct, array_like=True, tag=3, frozen=True):
    """Get the messages of a queue that this node owns: `Deliveries` follow, until `Cancel`."""

    queue: Name
    prefetch: Annotated[int, Meta(ge=1, le=MAX_PREFETCH)]
    no_ack: bool = False
    """Messages are acknowledged as they are delivered."""


class Get(Struct, array_like=True, tag=4, frozen=True):
    """Get one message of a queue that this node owns: answered with `Deliveries` of one message or none. It is
    acknowledged by the number of this call."""

    queue: Name
    no_ack: bool = False


class Ack(Struct, array_like=True, tag=5, frozen=True):
    """Acknowledge deliveries; answered with null. If a tag is unknown, none of them is acknowledged."""

    subscription: Number
    """The number of the `Subscribe` or `Get`."""
    tags: list[Tag]
    multiple: bool = False
    """Also all earlier deliveries of the subscription."""


class Nack(Struct, array_like=True, tag=6, frozen=True):
    """Refuse deliveries, likewise: they are delivered again, or become dead letters."""

    subscription: Number
    tags: list[Tag]
    requeue: bool = True
    multiple: bool = False
    failed: bool = True
    """False: the consumer did not try. They are delivered again, and this delivery does not count as failed; it goes
    without `multiple`."""


class Cancel(Struct, array_like=True, tag=7, frozen=True):
    """End the `Consume` or `Subscribe` with the number of this frame; answered with `Ended`. What was delivered can
    still be acknowledged."""


Call = Publish | Consume | Subscribe | Get | Ack | Nack | Cancel


# Answers


class Result(Struct, array_like=True, tag=1, frozen=True):
    """The call succeeded."""


class Failed(Struct, array_like=True, tag=2, frozen=True):
    """The call failed, or ended, with the same error as over HTTP. What was delivered can no longer be acknowledged."""

    error: ErrorBody


class Routed(Struct, array_like=True, tag=3, frozen=True):
    """How many queues took each message of a `Publish`."""

    counts: list[int]
    refused: dict[int, ErrorBody] = {}
    """Messages that were not stored, by their place, such as those for a queue that is full."""


class Attached(Struct, array_like=True, tag=4, frozen=True):
    """The queues that a consumer has to subscribe to from now on."""

    queues: list[tuple[str, str | None]]
    """Each with the address of the node that owns it; null if none does at the moment."""


class Deliveries(Struct, array_like=True, tag=5, frozen=True):
    """Messages of a queue, by column."""

    first_tag: int
    """The delivery tag of the first one; those after it follow."""
    bodies: list[bytes]
    routing_keys: list[str]
    timestamps: list[int]
    """When a node took them, to store them; ms since 1970."""
    headers: list[Headers] | None = None
    """As they are stored: those that begin with `property.` are properties, those with `shardyard.` are Shardyard's
    own. None: no message has one."""
    redelivered: list[bool] | None = None
    """None: none of them was delivered before."""
    counts: list[int] | None = None
    """How many deliveries of each have failed. None: none."""

    def __post_init__(self) -> None:
        """Called by the decoder, too."""
        columns = (self.routing_keys, self.timestamps, self.headers, self.redelivered, self.counts)
        if any(column is not None and len(column) != len(self.bodies) for column in columns):
            raise ValueError("all columns must have the same length")

    def __len__(self) -> int:
        return len(self.bodies)

    @property
    def tags(self) -> range:
        return range(self.first_tag, self.first_tag + len(self.bodies))


class Ended(Struct, array_like=True, tag=6, frozen=True):
    """No more deliveries or attachments follow."""


Answer = Result | Failed | Routed | Attached | Deliveries | Ended

DONE = Result()
ENDED = Ended()


# Messages

_framing: Framing[Call, Answer] = Framing(Call, Answer)
encode_frame = _framing.encode_frame
decode_calls = _framing.decode_calls
decode_answers = _framing.decode_answers
