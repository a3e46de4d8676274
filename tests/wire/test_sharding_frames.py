"""The frames of sharded queues as bytes, and that the documentation lists all of them."""

import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from shardyard.model import Malformed
from shardyard.model.sharding import OutgoingMessage
from shardyard.wire import sharding_frames as frames
from shardyard.wire.sharding_frames import MessageColumns, decode_answers, decode_calls, encode_frame
from tests.wire.sharding_samples import ANSWERS, CALLS, COLUMNS

DOCUMENTATION = (Path(__file__).parent.parent.parent / "docs" / "protocol.md").read_text()

CALLS_AS_BYTES = [
    b"\x92\x01\x95\x01\xa6images\x82\xa6bodies\x91\xc4\x011\xacrouting_keys\x91\xa7cat.png\xc0\xc0",
    (
        b"\x92\x02\x95\x01\xa6images\x87\xa6bodies\x92\xc4\x011\xc4\x012\xacrouting_keys\x92\xa7cat.png\xa0\xa7headers"
        b"\x92\x91\x92\xa3tag\xc4\x01q\x90\xa2cc\x92\x91\xa7dog.png\x90\xa3bcc\x92\x90\x91\xa8bird.png\xaaproperties"
        b"\x92\x91\x92\xaamessage_id\xa17\x90\xaeexpirations_ms\x92\xc0\xcd\x01\xf4\xa1p\x03"
    ),
    b"\x92\x03\x93\x02\xa6images\xc2",
    b"\x92\x04\x93\x02\xa6images\xc3",
    b"\x92\x05\x94\x03\xb8sharding: images - a - 0d\xc2",
    b"\x92\x06\x93\x04\xb8sharding: images - a - 0\xc3",
    b"\x92\x07\x94\x05\x05\x92\x01\x02\xc3",
    b"\x92\x08\x96\x06\x05\x91\x03\xc2\xc2\xc3",
    b"\x92\x09\x96\x06\x05\x91\x04\xc3\xc2\xc2",
    b"\x92\x0a\x91\x07",
]
ANSWERS_AS_BYTES = [
    b"\x92\x01\x91\x01",
    (
        b"\x92\x02\x92\x02\x83\xa4code\xb0unknown_exchange\xa7message\xbbexchange 'x' does not exist\xa6fields\x81"
        b"\xa8exchange\xa1x"
    ),
    b"\x92\x03\x93\x03\x92\x01\x00\x81\x01\x83\xa4code\xaaqueue_full\xa7message\xa4full\xa6fields\x80",
    b"\x92\x04\x92\x04\x92\x92\xa1q\xb5http://127.0.0.1:7400\x92\xa1r\xc0",
    b"\x92\x05\x98\x05\x01\x91\xc4\x011\x91\xa7cat.png\x91\x07\xc0\xc0\xc0",
    b"\x92\x06\x98\x05\x02\x91\xc4\x012\x91\xa0\x91\x08\x91\x91\x92\xb3property.message_id\xc4\x017\x91\xc3\x91\x03",
    b"\x92\x07\x91\x06",
]


def test_every_kind_of_frame_has_a_sample() -> None:
    assert {type(call) for call in CALLS} == set(get_args(frames.Call))
    assert {type(answer) for answer in ANSWERS} == set(get_args(frames.Answer))


@pytest.mark.parametrize(("number", "expected"), list(enumerate(CALLS_AS_BYTES, 1)))
def test_a_call_is_encoded_as_these_bytes_and_decoded_from_them(number: int, expected: bytes) -> None:
    call = CALLS[number - 1]
    assert encode_frame(number, call) == expected
    assert decode_calls(b"\x91" + expected) == [(number, call)]


@pytest.mark.parametrize(("number", "expected"), list(enumerate(ANSWERS_AS_BYTES, 1)))
def test_an_answer_is_encoded_as_these_bytes_and_decoded_from_them(number: int, expected: bytes) -> None:
    answer = ANSWERS[number - 1]
    assert encode_frame(number, answer) == expected
    assert decode_answers(b"\x91" + expected) == [(number, answer)]


def test_unknown_fields_at_the_end_are_ignored() -> None:
    for decode, samples in ((decode_calls, CALLS), (decode_answers, ANSWERS)):
        for number, frame in enumerate(samples):
            kind = msgspec.msgpack.decode(msgspec.msgpack.encode(frame))
            message = msgspec.msgpack.encode([[number, [*kind, "new", {"newer": [1]}]]])
            assert decode(message) == [(number, frame)]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ([1, [0]], "Invalid value 0"),
        ([1, [8]], "Invalid value 8"),
        ([1, [1, "images", {"bodies": [b"1"], "routing_keys": []}]], "the same length"),
        ([1, [1, "images", {"bodies": [], "routing_keys": [], "more": []}]], "unknown field `more`"),
        ([1, [1, "images", {"bodies": [b"1"], "routing_keys": [b"1"]}]], "Expected `str`"),
        ([1, [1, "images", {"bodies": [b"1"], "routing_keys": [""]}, "p", -1]], ">= 0"),
        ([1, [3, "q", 0]], ">= 1"),
        ([1, [3, "q", 10_001]], "<= 10000"),
        ([1, [3, "q", 1.5]], "Expected `int`"),
        ([1, [5, 1, [-1]]], ">= 0"),
        ([1, [2, "x" * 1001]], "<= 1000"),
    ],
)
def test_a_frame_that_is_wrong_is_malformed_and_the_error_says_where(call: object, says: str) -> None:
    [(_, found)] = decode_calls(msgspec.msgpack.encode([call]))
    assert isinstance(found, Malformed)
    assert says in str(found)


def test_a_call_that_is_wrong_leaves_the_others_of_its_message_valid() -> None:
    first, wrong, last = decode_calls(msgspec.msgpack.encode([[1, [7]], [2, [0]], [3, [7]]]))
    assert (first, last) == ((1, frames.Cancel()), (3, frames.Cancel()))
    assert isinstance(wrong[1], Malformed)


@pytest.mark.parametrize("message", [b"", b"\xc0", b"\x80", b"\x90\x90", b"\xdd\xff\xff\xff\xff", b"\x91" * 1_000_000])
def test_what_is_no_array_of_frames_is_malformed(message: bytes) -> None:
    for decode in (decode_calls, decode_answers):
        with pytest.raises(Malformed, match="the message can't be read"):
            decode(message)


def test_columns_of_deliveries_have_the_same_length() -> None:
    with pytest.raises(Malformed, match="the same length"):
        decode_answers(msgspec.msgpack.encode([[1, [5, 1, [b"1"], [""], []]]]))


def test_messages_become_columns_and_come_back() -> None:
    messages = COLUMNS.messages()
    assert messages == [
        OutgoingMessage(b"1", "cat.png", (("tag", b"q"),), ("dog.png",), (), (("message_id", "7"),)),
        OutgoingMessage(b"2", "", bcc=("bird.png",), expiration_ms=500),
    ]
    assert MessageColumns.of(messages) == COLUMNS
    plain = [OutgoingMessage(b"1", "a"), OutgoingMessage(b"2", "b")]
    assert MessageColumns.of(plain) == MessageColumns([b"1", b"2"], ["a", "b"])
    assert MessageColumns.of(plain).messages() == plain


@pytest.mark.processes
def test_damaged_messages_are_frames_or_malformed() -> None:
    """In a process of its own, whose memory is measured."""
    command = [sys.executable, "-m", "tests.wire.sharding_damage", "5", "20000"]
    result = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr[-2000:]


@pytest.mark.parametrize(
    ("title", "union"), [("Calls of sharded queues", frames.Call), ("Answers of sharded queues", frames.Answer)]
)
def test_the_documentation_lists_every_kind_of_frame_with_its_fields(title: str, union: object) -> None:
    found = re.search(rf"^### {title}\n(.*?)(?=^#{{1,3}} |\Z)", DOCUMENTATION, re.MULTILINE | re.DOTALL)
    assert found is not None
    rows = re.findall(r"^\| (\d+) \| (\w+) \| ([^|]*)\|", found[1], re.MULTILINE)
    documented = {
        int(kind): (name, [re.sub(r" \(.*", "", field.strip()) for field in fields.split(",") if field.strip()])
        for kind, name, fields in rows
    }
    assert documented == {
        kind.__struct_config__.tag: (kind.__name__.lower(), list(kind.__struct_fields__)) for kind in get_args(union)
    }
