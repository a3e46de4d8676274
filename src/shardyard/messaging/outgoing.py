"""What a client sends that is stored: to another user, or in a channel."""

from msgspec import Struct

from shardyard.wire import messaging as wire
from shardyard.wire.inbox import MAX_TEXT_BYTES, POST_KEY, Mark

Sendable = wire.Send | wire.SetMark | wire.Post | wire.Join | wire.Leave


class Outgoing(Struct, frozen=True):
    """What a client sends to another user, or does in a channel."""

    number: int
    recipient: str
    """The user, or `POST_KEY` and the channel: everything for one of them is carried out in order."""
    content: str | Mark | wire.Post | wire.Join | wire.Leave

    @property
    def is_numbered(self) -> bool:
        """Whether the log knows it by the client's number."""
        return not isinstance(self.content, wire.Join | wire.Leave)


def outgoing_of(frame: Sendable) -> Outgoing | wire.Refused:
    """What is to be stored; refused if its text is too long."""
    if isinstance(frame, wire.SetMark):
        return Outgoing(frame.number, frame.recipient, Mark(frame.kind, wire.number_of(frame.upto)))
    if isinstance(frame, wire.Join | wire.Leave):
        return Outgoing(frame.number, POST_KEY.decode() + frame.channel, frame)
    if len(frame.text) > MAX_TEXT_BYTES or len(frame.text.encode()) > MAX_TEXT_BYTES:
        text = f"the text may have at most {MAX_TEXT_BYTES} bytes of UTF-8"
        return wire.Refused(frame.number, "too_large", text)
    if isinstance(frame, wire.Post):
        return Outgoing(frame.number, POST_KEY.decode() + frame.channel, frame)
    return Outgoing(frame.number, frame.recipient, frame.text)
