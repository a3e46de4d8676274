"""The frames of a WebSocket connection between a client and a broker, and how messages carry them. No I/O.

A message is a MessagePack array of frames, in both directions, so that what happens at the same time travels together.
A frame is `[number, [kind, ...fields]]`. The client numbers its calls; an answer has the number of its call. New
fields are only ever added at the end, with a default. `docs/protocol.md` describes the whole protocol.
"""

from collections.abc import Iterable, Iterator
from typing import Annotated

import msgspec
from msgspec import Meta, Raw, Struct

from shardyard.wire import requests
from shardyard.wire.columns import RecordColumns
from shardyard.wire.errors import ErrorBody
from shardyard.wire.framing import Framing, Number

SHARED_BYTES = 256 * 1024
"""How much several frames take that share a message."""
PATH = "/v1/connect"
"""Where a broker takes WebSocket connections, on the port of its HTTP API."""
SUBPROTOCOL = "shardyard.1"
"""The WebSocket subprotocol, whose number is the version of the frames."""

Name = Annotated[str, Meta(max_length=1000)]
"""Of a topic, partition, group or member; calls that wait keep these in memory."""


# Calls


class Publish(Struct, array_like=True, tag=1, frozen=True):
    """Publish records: columns, or an Arrow stream. Answered with a `responses.Published` when they are durable."""

    topic: Name
    records: RecordColumns | bytes
    options: requests.Publish
    after: Number | None = None
    """The number of an earlier publish on this connection: store these after it, and not if it failed for now. This
    keeps the order of publishes that are in flight at the same time."""


class Read(Struct, array_like=True, tag=2, frozen=True):
    """Credit for one batch of a partition that the member owns, answered with a `PackedBatch` as soon as there are
    records, or with an empty one after `wait_seconds`."""

    group: Name
    partition: Name
    query: requests.Read


class Commit(Struct, array_like=True, tag=3, frozen=True):
    """Commit positions; answered with null when they are durable."""

    group: Name
    member: Name
    body: requests.Commit


class Heartbeat(Struct, array_like=True, tag=4, frozen=True):
    """Stay a member; answered with a `responses.VersionedSettings` if the group has other settings than the member,
    else with null."""

    group: Name
    member: Name
    body: requests.Heartbeat
    seen: str = ""
    """The version of the settings that the member has."""


class Watch(Struct, array_like=True, tag=5, frozen=True):
    """Watch the assignment of a member: `Changed` follows at once, and after every change until `Cancel`."""

    group: Name
    member: Name
    epoch: int


class Cancel(Struct, array_like=True, tag=6, frozen=True):
    """End the `Read` or `Watch` with the number of this frame. It is not answered, and what it cancels may be."""


class Request(Struct, array_like=True, tag=7, frozen=True):
    """Any request of the HTTP API; answered with a `Response`."""

    method: str
    path: str
    """Encoded as in a URL."""
    query: dict[str, str] = {}
    headers: dict[str, str] = {}
    body: bytes = b""


class Fence(Struct, array_like=True, tag=8, frozen=True):
    """Fence off all earlier owners of a partition: they can no longer read it. Answered with null."""

    group: Name
    partition: Name
    epoch: requests.Whole


class Span(Struct, array_like=True, tag=9, frozen=True):
    """The offsets that a partition holds; answered with a `responses.PartitionSpan`."""

    partition: Name


class Assignment(Struct, array_like=True, tag=10, frozen=True):
    """What a member owns, and will own; answered with a `responses.Assignment`."""

    group: Name
    member: Name
    epoch: int


Call = Publish | Read | Commit | Heartbeat | Watch | Cancel | Request | Fence | Span | Assignment


# Answers


class Result(Struct, array_like=True, tag=1, frozen=True):
    """The call succeeded. The body depends on the call."""

    body: Raw = Raw(b"\xc0")


class Failed(Struct, array_like=True, tag=2, frozen=True):
    """The call failed, with the same error as over HTTP."""

    error: ErrorBody


class Changed(Struct, array_like=True, tag=3, frozen=True):
    """What a `Watch` watches has changed."""


class Response(Struct, array_like=True, tag=4, frozen=True):
    """The response to a `Request`."""

    status: int
    body: bytes


Answer = Result | Failed | Changed | Response

NOTHING = Result()
"""The result of a call that returns nothing."""
CHANGED = Changed()


# Messages

_framing: Framing[Call, Answer] = Framing(Call, Answer)
encode_frame = _framing.encode_frame
decode_calls = _framing.decode_calls
decode_answers = _framing.decode_answers


def messages(frames: Iterable[bytes]) -> Iterator[bytes]:
    """Frames in as few messages as possible: each has one frame, or several of up to `SHARED_BYTES` together."""
    together: list[bytes] = []
    size = 0
    for frame in frames:
        if together and size + len(frame) > SHARED_BYTES:
            yield message(together)
            together, size = [], 0
        together.append(frame)
        size += len(frame)
    if together:
        yield message(together)


def message(frames: list[bytes]) -> bytes:
    """A message with these frames."""
    count = len(frames)
    header = bytes([0x90 | count]) if count < 16 else b"\xdd" + count.to_bytes(4, "big")  # of an array
    return header + b"".join(frames)


def result_of(content: object) -> Result:
    """A result with this content."""
    return Result(Raw(msgspec.msgpack.encode(content)))


def raw_result(body: bytes) -> Result:
    """A result whose content is MessagePack already."""
    return Result(Raw(body))
