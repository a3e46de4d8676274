"""Frames as bytes, messages, close codes, and that the documentation lists all of them."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from shardyard.model import Malformed
from shardyard.wire import frames
from shardyard.wire.close_codes import Advice, CloseCode, advice
from shardyard.wire.frames import SHARED_BYTES, decode_answers, decode_calls, encode_frame, messages
from tests.wire.frame_samples import ANSWERS, CALLS

DOCUMENTATION = (Path(__file__).parent.parent.parent / "docs" / "protocol.md").read_text()

CALLS_AS_BYTES = [
    b"\x92\x01\x95\x01\xa6orders\x83\xa3ids\x91\xa1a\xa6values\x91\xc4\x011\xaatimestamps\x91\x07\x80\xc0",
    (
        b"\x92\x02\x95\x01\xa6orders\x85\xa3ids\x92\xa1a\xa1b\xa6values\x92\xc4\x011\xc4\x012\xaatimestamps\x92\x07\x08"
        b"\xa4keys\x92\xc4\x01k\xc0\xa7headers\x92\x91\x92\xa3tag\xc4\x01q\x90\x82\xa8producer\xa1p\xa8sequence\x03\x04"
    ),
    b"\x92\x03\x95\x01\xa6orders\xc4\x0fan Arrow stream\x81\xa9partition\x02\xc0",
    (
        b"\x92\x04\x94\x02\xa7billing\xa8orders/3\x84\xa6offset\xcd\x02\xbc\xa5owner\x02\xa5epoch\x01"
        b"\xacwait_seconds\xcb@\x14\x00\x00\x00\x00\x00\x00"
    ),
    b"\x92\x05\x94\x03\xa7billing\xa8worker-1\x82\xa5epoch\x03\xa9positions\x81\xa8orders/0\x93\x05\x01\xcd\x02\xbc",
    b"\x92\x06\x95\x04\xa7billing\xa8worker-1\x82\xa5epoch\x03\xa8progress\x91\xa8orders/0\xa0",
    b"\x92\x07\x94\x05\xa7billing\xa8worker-1\x03",
    b"\x92\x08\x91\x06",
    b"\x92\x09\x96\x07\xa4POST\xaa/v1/topics\x81\xa1a\xa1b\x81\xaccontent-type\xb0application/json\xc4\x02{}",
    b"\x92\x0a\x94\x08\xa7billing\xa8orders/3\x02",
    b"\x92\x0b\x92\x09\xa8orders/3",
    b"\x92\x0c\x94\x0a\xa7billing\xa8worker-1\x03",
]
ANSWERS_AS_BYTES = [
    b"\x92\x01\x92\x01\xc0",
    (
        b"\x92\x02\x92\x01\x82\xa6stored\x91\x86\xa5topic\xa6orders\xa9partition\x00\xa5epoch\x01\xa6offset\xcd\x02\xbc"
        b"\xa5count\x02\xa9duplicate\xc2\xa7delayed\x00"
    ),
    b"\x92\x03\x92\x02\x83\xa4code\xadunknown_topic\xa7message\xb8topic 'x' does not exist\xa6fields\x81\xa5topic\xa1x",
    b"\x92\x04\x91\x03",
    b'\x92\x05\x93\x04\xcc\xc8\xc4\x0f{"alive": true}',
]


def a_message(*frames: object) -> bytes:
    """A message of frames that are given as lists."""
    return msgspec.msgpack.encode(frames)


# Frames


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


def test_fields_at_the_end_that_have_a_default_may_be_left_out() -> None:
    columns = {"ids": ["a"], "values": [b"1"], "timestamps": [7]}
    assert decode_calls(a_message([1, [1, "orders", columns, {}]])) == [(1, CALLS[0])]
    assert decode_calls(a_message([2, [7, "GET", "/healthz"]])) == [(2, frames.Request("GET", "/healthz"))]
    assert decode_answers(a_message([3, [1]])) == [(3, frames.NOTHING)]


def test_unknown_fields_at_the_end_are_ignored() -> None:
    for number, call in enumerate(CALLS):
        kind = msgspec.msgpack.decode(msgspec.msgpack.encode(call))
        assert decode_calls(a_message([number, [*kind, "new", {"newer": [1]}]])) == [(number, call)]
    for number, answer in enumerate(ANSWERS):
        kind = msgspec.msgpack.decode(msgspec.msgpack.encode(answer))
        assert decode_answers(a_message([number, [*kind, "new", {"newer": [1]}]])) == [(number, answer)]


def error_of(decode: Callable[[bytes], list[tuple[int, Any]]], message: bytes) -> str:
    """What is wrong with a message of one frame: with the message as a whole, or with the frame."""
    try:
        [(_, found)] = decode(message)
    except Malformed as error:
        return str(error)
    assert isinstance(found, Malformed)
    return str(found)


def test_a_call_that_is_wrong_leaves_the_others_of_its_message_valid() -> None:
    first, wrong, last = decode_calls(a_message([1, [6]], [2, [0]], [3, [6]]))
    assert (first, last) == ((1, frames.Cancel()), (3, frames.Cancel()))
    assert wrong[0] == 2
    assert isinstance(wrong[1], Malformed)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ([-1, [6]], ">= 0"),
        ([2**53 + 1, [6]], "<= 9007199254740992"),
        (["1", [6]], "Expected `int`"),
        ([1, [0]], "Invalid value 0"),
        ([1, [11]], "Invalid value 11"),
        ([1, []], "at least length"),
        ([1, [5, "billing", "worker-1"]], "at least length"),
        ([1, [6], 2], "length 2"),
        ([1, [1, "orders", {"ids": ["a"], "values": [], "timestamps": [7]}, {}]], "the same length"),
        ([1, [1, "orders", {"ids": [], "values": [], "timestamps": [], "more": []}, {}]], "unknown field `more`"),
        ([1, [1, "orders", b"", {}, -1]], ">= 0"),
        ([1, [2, "billing", "orders/3", {"offset": 0, "owner": 1, "wait_seconds": float("nan")}]], ">= 0"),
        ([1, [3, "billing", "worker-1", {"epoch": 3, "positions": {"orders/0": [5, 1]}}]], "length 3"),
    ],
)
def test_a_frame_that_is_wrong_is_malformed_and_the_error_says_where(call: object, says: str) -> None:
    assert says in error_of(decode_calls, a_message(call))


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\xc0",
        b"\x80",
        b"\x90\x90",
        b"\xdd\xff\xff\xff\xff",
        b"\x91" * 1_000_000,
        b"\x91\x92\x01\x92\x06" + b"\x91" * 1_000_000,
        b"\x91\x92\x01\x94\x05\xa1\xff\xa1m\x01",
        b"\x91\x92\x01\x93\x01\xa6orders\x83\xa3ids\xdd\x7f\xff\xff\xff",
    ],
)
def test_what_is_no_array_of_frames_is_malformed(message: bytes) -> None:
    for decode in (decode_calls, decode_answers):
        assert "the message can't be read" in error_of(decode, message)


def test_an_empty_array_is_a_message_without_frames() -> None:
    assert decode_calls(b"\x90") == []
    assert decode_answers(b"\x90") == []


@pytest.mark.processes
def test_damaged_messages_are_frames_or_malformed() -> None:
    """In a process of its own, whose memory is measured."""
    command = [sys.executable, "-m", "tests.wire.frame_damage", "5", "20000"]
    result = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr[-2000:]


# Messages


@pytest.mark.parametrize("count", [0, 1, 15, 16, 70_000])
def test_small_frames_travel_together(count: int) -> None:
    calls = [(number, frames.Cancel()) for number in range(count)]
    encoded = [encode_frame(number, call) for number, call in calls]
    made = list(messages(encoded))
    assert len(made) == -(-sum(map(len, encoded)) // SHARED_BYTES)
    assert [call for message in made for call in decode_calls(message)] == calls


@pytest.mark.parametrize("count", [15, 16, 70_000])
def test_an_array_of_any_length_is_decoded_however_it_is_written(count: int) -> None:
    whole = b"".join(encode_frame(number, frames.CHANGED) for number in range(count))
    headers = [b"\xdd" + count.to_bytes(4, "big")]
    if count < 2**16:
        headers.append(b"\xdc" + count.to_bytes(2, "big"))
    if count < 16:
        headers.append(bytes([0x90 + count]))
    for header in headers:
        assert decode_answers(header + whole) == [(number, frames.CHANGED) for number in range(count)]


def test_messages_of_several_frames_stay_within_the_size_that_they_share() -> None:
    exact = SHARED_BYTES // 4
    assert [len(message) for message in messages([b"x" * exact] * 4)] == [SHARED_BYTES + 1]
    assert [len(message) for message in messages([b"x" * exact] * 4 + [b"y"])] == [SHARED_BYTES + 1, 2]
    sizes = [10, SHARED_BYTES, SHARED_BYTES - 1, 1, 3 * SHARED_BYTES, 5, 5]
    made = list(messages(b"x" * size for size in sizes))
    assert [len(message) - 1 for message in made] == [10, SHARED_BYTES, SHARED_BYTES, 3 * SHARED_BYTES, 10]
    assert [message[0] & 15 for message in made] == [1, 1, 2, 1, 2]
    assert list(messages([])) == []


# Close codes


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (1000, Advice.RECONNECT),
        (CloseCode.IDLE, Advice.RECONNECT),
        (CloseCode.NOT_READING, Advice.RECONNECT),
        (CloseCode.STALLED, Advice.RECONNECT),
        (CloseCode.OVERLOADED, Advice.RECONNECT),
        (4099, Advice.RECONNECT),
        (CloseCode.DRAINING, Advice.GO_ELSEWHERE),
        (4199, Advice.GO_ELSEWHERE),
        (CloseCode.MALFORMED, Advice.GIVE_UP),
        (4299, Advice.GIVE_UP),
        (1001, Advice.GO_ELSEWHERE),
        (1012, Advice.GO_ELSEWHERE),
        (1002, Advice.GIVE_UP),
        (1003, Advice.GIVE_UP),
        (1007, Advice.GIVE_UP),
        (1009, Advice.GIVE_UP),
        (1005, Advice.RECONNECT),
        (1006, Advice.RECONNECT),
        (1011, Advice.RECONNECT),
        (4300, Advice.RECONNECT),
        (0, Advice.RECONNECT),
    ],
)
def test_a_close_code_says_what_the_client_does(code: int, expected: Advice) -> None:
    assert advice(code) is expected


# Documentation


def section(title: str) -> str:
    """The text below a heading of the documentation."""
    found = re.search(rf"^(#+) {title}\n(.*?)(?=^#{{1,3}} |\Z)", DOCUMENTATION, re.MULTILINE | re.DOTALL)
    assert found is not None, title
    return found[2]


def test_the_documentation_lists_every_kind_of_frame_with_its_fields() -> None:
    for title, union in (("Calls", frames.Call), ("Answers", frames.Answer)):
        rows = re.findall(r"^\| (\d+) \| (\w+) \| ([^|]*)\|", section(title), re.MULTILINE)
        documented = {
            int(kind): re.findall(r"(\w+)(?: \([^)]*\))?(?:,|:|$)", fields.split(": `")[0].strip())
            for kind, _, fields in rows
        }
        assert documented == {kind.__struct_config__.tag: list(kind.__struct_fields__) for kind in get_args(union)}
        names = {int(kind): name for kind, name, _ in rows}
        for kind in get_args(union):
            assert names[kind.__struct_config__.tag] in kind.__name__.lower()


def test_the_documentation_lists_every_close_code_with_what_a_client_does() -> None:
    rows = re.findall(r"^\| (?:\*\*)?([\d, to]+)(?:\*\*)? \|[^|]*\| ([^|]*)\|", section("Close codes"), re.MULTILINE)
    documented: dict[int, str] = {}
    group = ""
    for codes, text in rows:
        if "to" in codes:
            group = text
        for code in re.findall(r"\d+", codes):
            documented.setdefault(int(code), text.strip() or group)
    of_brokers = {int(code) for code in CloseCode if code // 10 % 10 == 0}  # the others are those of messaging servers
    assert of_brokers <= documented.keys()
    says = {Advice.RECONNECT: "reconnects", Advice.GO_ELSEWHERE: "goes elsewhere", Advice.GIVE_UP: "gives up"}
    for code, text in documented.items():
        if code != 1000:  # the client itself has closed it
            assert says[advice(code)] in text, code
