"""The frames of messaging servers as text and bytes, and their documentation."""

import re
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from shardyard.model import Malformed
from shardyard.wire import messaging as wire
from shardyard.wire.close_codes import Advice, CloseCode, advice
from shardyard.wire.inbox import InboxEntry, Mark, decode_entry, encode_entry
from shardyard.wire.messaging import Format, decode_from_client, decode_from_server, encode
from tests.wire.messaging_samples import FROM_CLIENT, FROM_SERVER

DOCUMENTATION = (Path(__file__).parents[2] / "docs" / "messaging-protocol.md").read_text()
OF_BROKERS = {CloseCode.STALLED, CloseCode.OVERLOADED}


@pytest.mark.parametrize(("frame", "text", "hexadecimal"), FROM_CLIENT)
def test_a_frame_of_a_client_is_this_text_and_these_bytes(frame: wire.ClientFrame, text: str, hexadecimal: str) -> None:
    assert encode(frame, Format.JSON).decode() == text
    assert encode(frame, Format.MSGPACK).hex() == hexadecimal
    assert decode_from_client(text.encode(), Format.JSON) == [frame]
    assert decode_from_client(bytes.fromhex(hexadecimal), Format.MSGPACK) == [frame]


@pytest.mark.parametrize(("frame", "text", "hexadecimal"), FROM_SERVER)
def test_a_frame_of_a_server_is_this_text_and_these_bytes(frame: wire.ServerFrame, text: str, hexadecimal: str) -> None:
    assert encode(frame, Format.JSON).decode() == text
    assert encode(frame, Format.MSGPACK).hex() == hexadecimal
    assert decode_from_server(text.encode(), Format.JSON) == [frame]
    assert decode_from_server(bytes.fromhex(hexadecimal), Format.MSGPACK) == [frame]


def test_every_frame_has_a_sample() -> None:
    assert {type(frame) for frame, *_ in FROM_CLIENT} == set(get_args(wire.ClientFrame))
    assert {type(frame) for frame, *_ in FROM_SERVER} == set(get_args(wire.ServerFrame))


@pytest.mark.parametrize("format_", list(Format))
def test_several_frames_travel_as_an_array(format_: Format) -> None:
    frames = [frame for frame, *_ in FROM_CLIENT]
    assert decode_from_client(encode(frames, format_), format_) == frames
    answers = [frame for frame, *_ in FROM_SERVER]
    assert decode_from_server(encode(answers, format_), format_) == answers
    assert decode_from_client(encode([], format_), format_) == []


def test_fields_with_a_default_may_be_left_out_and_unknown_ones_are_ignored() -> None:
    short = b'{"type":"hello","token":"t","device":"d","new":[1,{}]}'
    assert decode_from_client(short, Format.JSON) == [wire.Hello("t", "d")]
    assert decode_from_client(b'{"with":"bob","number":1,"type":"history"}', Format.JSON) == [wire.GetHistory(1, "bob")]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "1",
        '"ping"',
        "{}",
        '{"type":"pong","position":null}',
        '{"type":1}',
        '{"type":"send","number":1,"to":"bob"}',
        '{"type":"send","number":-1,"to":"bob","text":"x"}',
        '{"type":"send","number":9007199254740992,"to":"bob","text":"x"}',
        '{"type":"send","number":1.5,"to":"bob","text":"x"}',
        '{"type":"send","number":"1","to":"bob","text":"x"}',
        '{"type":"send","number":1,"to":"","text":"x"}',
        '{"type":"send","number":1,"to":"\\u0000","text":"x"}',
        '{"type":"send","number":1,"to":"bob\\u0000\\n","text":"x"}',
        '{"type":"send","number":1,"to":"\\ud800","text":"x"}',
        '{"type":"send","number":1,"to":"bob","text":"\\udc00"}',
        '{"type":"send","number":1,"to":"' + "x" * 129 + '","text":"x"}',
        '{"type":"hello","token":"t","device":""}',
        '{"type":"hello","token":"t","device":"' + "x" * 65 + '"}',
        '{"type":"hello","token":"' + "x" * 4097 + '","device":"d"}',
        '{"type":"hello","token":"t","device":"d","position":{"partition":0,"epoch":0}}',
        '{"type":"hello","token":"t","device":"d","last":"x"}',
        '{"type":"hello","token":"t","device":"d","last":"12345678901234567890"}',
        '{"type":"mark","number":1,"to":"bob","kind":"read","upto":"1"}',
        '{"type":"mark","number":1,"to":"bob","kind":"seen","upto":"-1"}',
        '{"type":"mark","number":1,"to":"bob","kind":"seen","upto":"1\\n"}',
        '{"type":"mark","number":1,"to":"bob","kind":"seen","upto":"\u0661"}',
        '{"type":"watch","users":[' + ",".join(['"x"'] * 201) + "]}",
        '{"type":"history","number":1,"with":"bob","limit":0}',
        '{"type":"history","number":1,"with":"bob","limit":201}',
        '{"type":"post","number":1,"channel":"","text":"x"}',
        '{"type":"post","number":1,"channel":"a\\u0000","text":"x"}',
        '{"type":"join","number":1,"channel":"' + "x" * 129 + '"}',
        '{"type":"leave","number":1}',
        '{"type":"typing-in"}',
        '{"type":"posts","number":1,"channel":"a","limit":201}',
        '{"type":"posts","number":1,"channel":"a","before":"x"}',
        '{"type":"channels","number":1,"after":""}',
        '[{"type":"ping"},5]',
        '[[{"type":"ping"}]]',
        "[" * 100_000,
        '{"type":' * 10_000,
        '{"type":"ping"}x',
    ],
)
def test_what_is_no_frame_of_a_client_is_malformed(text: str) -> None:
    with pytest.raises(Malformed):
        decode_from_client(text.encode(), Format.JSON)


# Entries of the inbox


@pytest.mark.parametrize(
    ("entry", "hexadecimal"),
    [
        (
            InboxEntry(2484, "alice", "bob", "phone", 7, 1794911298800, "hi"),
            "99 cd 09 b4 a5 61 6c 69 63 65 a3 62 6f 62 a5 70 68 6f 6e 65 07 cf 00 00 01 a1 e9 0c e4 f0 a2 68 69 c2 c2",
        ),
        (
            InboxEntry(2485, "bob", "alice", "desk", 1, 5, Mark("seen", 2484), copy=True),
            "99 cd 09 b5 a3 62 6f 62 a5 61 6c 69 63 65 a4 64 65 73 6b 01 05 92 a4 73 65 65 6e cd 09 b4 c3 c2",
        ),
        (
            InboxEntry(2486, "bob", "bob", "", 0, 5, "", away=True),
            "99 cd 09 b6 a3 62 6f 62 a3 62 6f 62 a0 00 05 a0 c2 c3",
        ),
    ],
)
def test_an_entry_of_the_inbox_is_these_bytes(entry: InboxEntry, hexadecimal: str) -> None:
    assert encode_entry(entry).hex(" ") == hexadecimal
    assert decode_entry(bytes.fromhex(hexadecimal)) == entry


def test_an_entry_from_before_there_were_channels_is_one_of_a_user_who_is_there() -> None:
    before = "98 cd 09 b4 a5 61 6c 69 63 65 a3 62 6f 62 a5 70 68 6f 6e 65 07 05 a2 68 69 c2"
    assert decode_entry(bytes.fromhex(before)) == InboxEntry(2484, "alice", "bob", "phone", 7, 5, "hi")


@pytest.mark.parametrize("value", [b"", b"\xc1", b"\x90", b"hello", b"\x98" + b"\xc0" * 8, b"\x91" * 100_000])
def test_what_is_no_entry_of_the_inbox_is_malformed(value: bytes) -> None:
    with pytest.raises(Malformed):
        decode_entry(value)


# Documentation


def section(title: str) -> str:
    """The text below a heading of the documentation."""
    found = re.search(rf"^(#+) {title}\n(.*?)(?=^#{{1,3}} |\Z)", DOCUMENTATION, re.MULTILINE | re.DOTALL)
    assert found is not None, title
    return found[2]


@pytest.mark.parametrize(
    ("title", "union"), [("From the client", wire.ClientFrame), ("From the server", wire.ServerFrame)]
)
def test_the_documentation_has_every_frame_with_its_fields_defaults_and_an_example(title: str, union: object) -> None:
    text = section(title)
    rows = dict(re.findall(r"^\| ([\w-]+) \| ([^|]*?) ?\|", text, re.MULTILINE))
    rows.pop("type")
    examples = re.findall(r"^```json\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    decode = decode_from_client if union is wire.ClientFrame else decode_from_server
    shown = [type(frame) for example in examples for frame in decode(example.encode(), Format.JSON)]
    kinds = get_args(union)
    assert shown == list(kinds)
    assert list(rows) == [kind.__struct_config__.tag for kind in kinds]
    for kind in kinds:
        fields = []
        for field in msgspec.structs.fields(kind):
            default = "" if field.required else f" ({msgspec.json.encode(field.default).decode()})"
            fields.append(field.encode_name + default)
        assert rows[kind.__struct_config__.tag] == ", ".join(fields)
        assert f"\n**{kind.__struct_config__.tag}**" in text


def test_the_documentation_has_the_answer_to_a_request_for_a_session() -> None:
    (example,) = re.findall(r"^```json\n(.*?)^```", section("Finding the server"), re.MULTILINE | re.DOTALL)
    granted = msgspec.json.decode(example, type=wire.SessionGranted)
    assert msgspec.to_builtins(granted) == msgspec.json.decode(example)
    assert all(format_.value in section("Finding the server") for format_ in Format)


def test_the_documentation_has_every_close_code_with_what_a_client_does() -> None:
    rows = re.findall(r"^\| (?:\*\*)?([\d, to]+)(?:\*\*)? \|[^|]*\| ([^|]*)\|", section("Close codes"), re.MULTILINE)
    documented: dict[int, str] = {}
    group = ""
    for codes, text in rows:
        if "to" in codes:
            group = text
            continue
        for code in re.findall(r"\d+", codes):
            documented[int(code)] = text.strip() or group
    assert set(CloseCode) - OF_BROKERS <= documented.keys()
    says = {Advice.RECONNECT: "reconnects", Advice.GO_ELSEWHERE: "goes elsewhere", Advice.GIVE_UP: "gives up"}
    for code, text in documented.items():
        if code != 1000:  # the client itself has closed it
            assert says[advice(code)] in text, code
