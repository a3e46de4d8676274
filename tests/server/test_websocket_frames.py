"""The usual frames of a WebSocket connection, beside the `websockets` package as the reference."""

from hypothesis import given
from hypothesis import strategies as st
from websockets.frames import Frame, Opcode
from websockets.protocol import CLIENT, SERVER, Protocol

from shardyard.server.websocket_frames import message_frame, whole_message

MOST = 100_000
messages = st.one_of(st.binary(max_size=300), st.sampled_from([125, 126, 127, 65_535, 65_536, 70_000]).map(bytes))


def sent(message: bytes, opcode: Opcode = Opcode.BINARY, *, fin: bool = True) -> bytes:
    """The frame of a client."""
    return Frame(opcode, message, fin).serialize(mask=True)


@given(st.lists(messages, max_size=4), st.binary(max_size=5))
def test_whole_messages_are_taken_one_after_another(expected: list[bytes], rest: bytes) -> None:
    data, at = b"".join(map(sent, expected)) + rest, 0
    found: list[bytes] = []
    while (taken := whole_message(data, at, MOST)) is not None and len(found) < len(expected):
        found.append(taken[0])
        at = taken[1]
    assert (found, data[at:]) == (expected, rest)


@given(messages, st.data())
def test_a_message_that_is_not_complete_is_not_taken(message: bytes, data: st.DataObject) -> None:
    frame = sent(message)
    assert whole_message(frame[: data.draw(st.integers(0, len(frame) - 1))], 0, MOST) is None


def test_all_other_frames_are_left_to_the_package() -> None:
    others = [
        sent(b"a", Opcode.TEXT),
        sent(b"a", Opcode.PING),
        sent(b"a", Opcode.CONT),
        sent(b"a", fin=False),
        sent(bytes(MOST + 1)),
        bytes([0xC2]) + sent(b"a")[1:],  # with a reserved bit
        Frame(Opcode.BINARY, b"abcdef").serialize(mask=False),
    ]
    assert [whole_message(frame, 0, MOST) for frame in others] == [None] * len(others)


@given(messages)
def test_a_client_understands_our_frames(message: bytes) -> None:
    client = Protocol(CLIENT)
    client.receive_data(message_frame(message))
    (frame,) = client.events_received()
    assert isinstance(frame, Frame)
    assert (frame.opcode, frame.fin, bytes(frame.data)) == (Opcode.BINARY, True, message)
    server = Protocol(SERVER)
    server.send_binary(message)
    assert server.data_to_send() == [message_frame(message)]
