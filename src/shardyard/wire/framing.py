"""Encoding and decoding the frames of a WebSocket connection, whichever calls and answers these are. No I/O."""

from typing import Annotated, Any, Generic, TypeVar

import msgspec
from msgspec import Meta, Raw

from shardyard.model import Malformed

T = TypeVar("T")
CallT = TypeVar("CallT")
AnswerT = TypeVar("AnswerT")

Number = Annotated[int, Meta(ge=0, le=2**53)]
"""Of a call; unique among the calls of a connection that are in progress."""


class Framing(Generic[CallT, AnswerT]):
    """The frames of one protocol: `[number, [kind, ...fields]]`. See `wire.frames.messages` for how they travel."""

    def __init__(self, calls: Any, answers: Any) -> None:
        """The union of all calls, and that of all answers."""
        self._encoder = msgspec.msgpack.Encoder()
        self._numbered = msgspec.msgpack.Decoder(list[tuple[Number, Raw]])
        self._call = msgspec.msgpack.Decoder(calls)
        self._answers = msgspec.msgpack.Decoder(list[tuple[Number, answers]])

    def encode_frame(self, number: int, frame: CallT | AnswerT) -> bytes:
        """A frame, as a part of a message."""
        return self._encoder.encode((number, frame))

    def decode_calls(self, message: bytes) -> list[tuple[int, CallT | Malformed]]:
        """The calls of a message that a client sent; in place of a call that is not valid, what is wrong with it.
        Raises `Malformed` if the message as a whole is not valid."""
        return [(number, self._decode_call(call)) for number, call in _decode(self._numbered, message)]

    def decode_answers(self, message: bytes) -> list[tuple[int, AnswerT]]:
        """The answers of a message that a server sent. `Malformed` says what is wrong with it."""
        return _decode(self._answers, message)

    def _decode_call(self, raw: Raw) -> CallT | Malformed:
        try:
            call: CallT = _decode(self._call, raw)
        except Malformed as error:
            return error
        return call


def _decode(decoder: "msgspec.msgpack.Decoder[T]", message: bytes | Raw) -> T:
    try:
        return decoder.decode(message)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Malformed("message", str(error)) from None
