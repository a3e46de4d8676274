"""The usual frames of a WebSocket connection: whole binary messages. Parsing and building these directly takes a tenth
of the time that the `websockets` package takes, which is left with all others: parts of messages, pings, closing, and
everything that breaks the protocol."""

import struct

try:
    from websockets.speedups import apply_mask
except ImportError:  # there is no compiled version for this platform
    from websockets.utils import apply_mask

WHOLE_BINARY = 0x82
"""The first byte of a frame that is a whole binary message."""
_MASKED = 0x80
_MASK_BYTES = 4
_UINT16, _UINT64 = struct.Struct("!H"), struct.Struct("!Q")


def whole_message(data: bytes, at: int, most: int) -> tuple[bytes, int] | None:
    """The message of a client whose frame begins at this place, and where that frame ends. None if it is not a whole
    binary message, not complete, or has more than `most` bytes."""
    left = len(data) - at
    if left < 2 + _MASK_BYTES or data[at] != WHOLE_BINARY or not data[at + 1] & _MASKED:
        return None
    size, start = data[at + 1] & ~_MASKED, at + 2
    if size == 126:
        (size,) = _UINT16.unpack_from(data, start)
        start += 2
    elif size == 127:
        if left < 10 + _MASK_BYTES:
            return None
        (size,) = _UINT64.unpack_from(data, start)
        start += 8
    end = start + _MASK_BYTES + size
    if size > most or len(data) < end:
        return None
    mask, start = data[start : start + _MASK_BYTES], start + _MASK_BYTES
    return apply_mask(data[start:end], mask), end


def message_frame(message: bytes) -> bytes:
    """The frame of a binary message to a client."""
    size = len(message)
    if size < 126:
        return bytes((WHOLE_BINARY, size)) + message
    if size < 2**16:
        return b"\x82\x7e" + _UINT16.pack(size) + message
    return b"\x82\x7f" + _UINT64.pack(size) + message
