"""What goes over the wire comes out as it went in."""

import struct
import subprocess
import sys
from typing import cast

import msgspec
import pyarrow as pa
import pytest
from msgspec import structs

from shardyard import model
from shardyard.model import InvalidValue, Malformed, Partition, PartitionOutOfRange, Record, ShardyardError, TopicInUse
from shardyard.model.arrow_limits import check_batch
from shardyard.model.batch import SCHEMA, Batch, from_records, to_records
from shardyard.model.limits import Limits, is_arrow
from shardyard.model.plain_batch import ReadBatch
from shardyard.queues.filtering import only_tagged
from shardyard.wire import errors
from shardyard.wire.arrow import encode_arrow
from shardyard.wire.batches import decode_batch, encode_batch
from shardyard.wire.codec import decode, encode, parse_partition
from shardyard.wire.columns import RecordColumns
from shardyard.wire.media import ARROW, JSON, MSGPACK
from shardyard.wire.records import (
    ARROW_FROM_RECORDS,
    PackedRecord,
    PackedRecords,
    Posted,
    decode_records,
    json_record,
)

P = Partition("orders", 3)
RECORDS = [
    Record("a", b"k", b"v", (("tag", b"red"), ("x", b"\xff")), 5),
    Record("b", None, b"", (), 6),
    Record("ä", b"", b"\x00" * 10, (("tag", b"blue"),), 7),
]


def batch(records: list[Record], first: int = 10) -> Batch:
    return Batch(P, 77, first, pa.Table.from_batches([from_records(records, 0)]))


def decode_arrow_batch(body: bytes) -> Batch:
    """As a program that reads Arrow does it."""
    table = pa.ipc.open_stream(body).read_all()
    metadata = {name.decode(): int(value) for name, value in table.schema.metadata.items()}
    places = table["offset"].to_numpy() if "offset" in table.column_names else None
    rows = table.select(SCHEMA.names).replace_schema_metadata(None)
    return Batch(P, metadata["epoch"], metadata["first"], rows, places, metadata["end"])


def same(left: ReadBatch, right: ReadBatch) -> bool:
    return (left.partition, left.epoch, left.first, left.end, list(left.offsets()), left.records()) == (
        right.partition,
        right.epoch,
        right.first,
        right.end,
        list(right.offsets()),
        right.records(),
    )


def test_a_batch_is_the_same_after_encoding_and_decoding_also_filtered_and_empty() -> None:
    whole = batch(RECORDS)
    for one in (whole, only_tagged(whole, ["blue"]), only_tagged(whole, ["none"]), whole.emptied()):
        plain = decode_batch(P, encode_batch(one, MSGPACK))
        assert same(plain, one)
        assert same(decode_arrow_batch(encode_batch(one, ARROW)), one)
        assert plain.data.combine_chunks().equals(one.data.combine_chunks())
    filtered = only_tagged(whole, ["red", "blue"])
    assert [r.id for r in filtered.records()] == ["a", "ä"]
    assert list(filtered.offsets()) == [10, 12]
    assert filtered.end == 13
    assert only_tagged(whole, ["none"]).end == 13, "one gets past what is left out"
    assert only_tagged(batch(RECORDS[:1]), ["red"]).places is None


def test_tags_are_found_in_slices_of_several_chunks() -> None:
    rows = from_records([Record(f"{i}", None, b"", (("a", b"red"), ("tag", b"%d" % (i % 3)))) for i in range(30)], 0)
    table = pa.Table.from_batches([rows.slice(4, 5), rows.slice(9, 1), rows.slice(10, 7)])
    found = only_tagged(Batch(P, 1, 4, table), ["0", "red"])
    assert [r.id for r in found.records()] == [f"{i}" for i in range(4, 17) if i % 3 == 0]
    assert list(found.offsets()) == [i for i in range(4, 17) if i % 3 == 0]


@pytest.mark.parametrize("count", [1, ARROW_FROM_RECORDS - 1, ARROW_FROM_RECORDS, 1000])
@pytest.mark.parametrize("sample", [RECORDS, RECORDS[1:2], RECORDS[2:]], ids=["mixed", "bare", "with all"])
def test_a_batch_of_columns_of_any_size_has_the_records_that_were_sent(sample: list[Record], count: int) -> None:
    sent = [structs.replace(sample[i % len(sample)], id=f"r{i}", timestamp=i % 3) for i in range(count)]
    posted = decode_records(encode(PackedRecords(columns=RecordColumns.of(sent, 77)), MSGPACK), MSGPACK, 0)
    received = to_records(posted) if is_arrow(posted) else [p.record for p in posted]
    assert is_arrow(posted) == (count >= ARROW_FROM_RECORDS)
    assert received == [structs.replace(record, timestamp=record.timestamp or 77) for record in sent]
    assert [type(record) for record in received] == [Record] * count


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({}, "either `records` or `columns`"),
        ({"records": [], "columns": {"ids": [], "values": [], "timestamps": []}}, "either `records` or `columns`"),
        ({"columns": {"ids": ["a"], "values": [], "timestamps": []}}, "same length"),
        ({"columns": {"ids": ["a"], "values": [b""], "timestamps": [0], "keys": []}}, "same length"),
        ({"columns": {"ids": ["a"], "values": [b""], "timestamps": [0], "headers": [[], []]}}, "same length"),
        ({"columns": {"ids": ["a"], "values": [b""], "timestamps": [2**63]}}, "<= 2\\*\\*63|9223372036854775807"),
        ({"columns": {"ids": [None], "values": [b""], "timestamps": [0]}}, "Expected `str`"),
        ({"columns": {"ids": ["a"], "values": [b""], "timestamps": [0], "colour": []}}, "colour"),
    ],
)
def test_malformed_columns_are_refused(body: object, reason: str) -> None:
    with pytest.raises(Malformed, match=reason):
        decode_records(encode(body, MSGPACK), MSGPACK, 0)


def test_records_are_the_same_in_all_media() -> None:
    packed = [PackedRecord(r.value, r.key, r.id, list(r.headers), r.timestamp) for r in RECORDS]
    posted = decode_records(encode(PackedRecords(packed), MSGPACK), MSGPACK, 0)
    assert not isinstance(posted, pa.RecordBatch)
    assert [p.record for p in posted] == RECORDS
    columns = RecordColumns.of(RECORDS, 9)
    assert decode_records(encode(PackedRecords(columns=columns), MSGPACK), MSGPACK, 0) == posted
    rows = from_records(RECORDS, 0)
    assert decode_records(encode_arrow(rows), ARROW, 0) == rows
    several = decode_records(encode_arrow([rows.slice(0, 1), rows.slice(1)]), ARROW, 0)
    assert several == rows
    text = b'{"value": "v", "key_base64": "/w==", "id": "a", "tag": "red", "headers": {"x": "y"}, "delay": 1.5}'
    (one,) = decode_records(text, JSON, 1000)
    assert one == Posted(Record("a", b"\xff", b"v", (("tag", b"red"), ("x", b"y"))), 2500)
    many = decode_records(b' { "records": [{"value": ""}, {"value": "x"}]}', JSON, 0)
    assert [p.record.value for p in many] == [b"", b"x"]
    assert len({p.record.id for p in many}) == 2, "those without an id are given one"


def test_a_record_in_json_is_text_where_it_is_utf8() -> None:
    shown = json_record(Record("a", b"\xff", b"text", (("trace", b"t"), ("x", b"\xff")), 5), P, 9)
    assert (shown.value, shown.value_base64, shown.key, shown.key_base64) == ("text", None, None, "/w==")
    assert (shown.trace, shown.partition, shown.offset) == ("t", "orders/3", 9)
    assert (shown.headers, shown.headers_base64) == ({}, {"x": "/w=="})


def test_a_record_in_json_can_be_published_as_it_is_also_with_binary_headers() -> None:
    record = Record("a", None, b"v", (("tag", b"red"), ("y", b""), ("x", b"\xff"), ("trace", b"\xfe")), 5)
    shown = msgspec.to_builtins(json_record(record, P, 9))
    (posted,) = decode_records(msgspec.json.encode(shown), JSON, 0)
    assert posted == Posted(record)
    with pytest.raises(InvalidValue, match="headers_base64 is 'no"):
        decode_records(b'{"value": "v", "headers_base64": {"x": "no base64!"}}', JSON, 0)


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
def test_a_compressed_arrow_body_is_refused_before_it_is_unpacked(codec: str) -> None:
    rows = from_records([Record(f"{i}", None, b"\0" * 1_000_000) for i in range(20)], 1)
    for batches in ([rows], [rows.slice(0, 1), rows]):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, rows.schema, options=pa.ipc.IpcWriteOptions(compression=codec)) as stream:
            for one in batches:
                stream.write_batch(one)
        body = bytes(sink.getvalue())
        assert len(body) < 200_000
        with pytest.raises(Malformed, match="compression and dictionaries are not supported"):
            decode_records(body, ARROW, 0)


def test_an_arrow_body_of_an_old_version_which_may_hide_its_compression_is_refused() -> None:
    rows = from_records(RECORDS, 1)
    sink = pa.BufferOutputStream()
    old = pa.ipc.IpcWriteOptions(metadata_version=pa.ipc.MetadataVersion.V4)
    with pa.ipc.new_stream(sink, rows.schema, options=old) as stream:
        stream.write_batch(rows)
    with pytest.raises(Malformed, match="compression and dictionaries are not supported"):
        decode_records(bytes(sink.getvalue()), ARROW, 0)


def test_an_arrow_body_with_dictionaries_is_refused() -> None:
    rows = from_records([Record(f"{i}", None, b"v" * 1000) for i in range(20)], 1)
    packed = rows.set_column(2, "value", pa.array([b"v" * 1000] * 20).dictionary_encode())
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, packed.schema) as stream:
        stream.write_batch(packed)
    with pytest.raises(InvalidValue, match="the types of SCHEMA"):
        decode_records(bytes(sink.getvalue()), ARROW, 0)


@pytest.mark.processes
def test_a_damaged_arrow_body_is_refused_or_valid_and_never_crashes() -> None:
    """Bytes that anybody sends reach C++ here."""
    command = [sys.executable, "-m", "tests.wire.damage", "5", "4000"]
    result = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr[-2000:]


def odd_bodies() -> dict[str, bytes]:
    """Columns of types that point anywhere, or take no room."""
    rows = from_records(RECORDS, 1)
    views = rows.set_column(2, "value", pa.array([b"y" * 333] * 3, pa.binary_view()))
    there = struct.pack("<i", 333) + b"yyyy" + struct.pack("<ii", 0, 0)
    elsewhere = struct.pack("<i", 333) + b"yyyy" + struct.pack("<ii", 0, 10**8)
    assert there in encode_arrow(views)
    nothing = pa.Array.from_buffers(pa.binary(0), 10**7, [None, pa.py_buffer(b"")])
    empty = pa.RecordBatch.from_arrays(
        [nothing, pa.nulls(10**7), nothing, pa.nulls(10**7), pa.nulls(10**7)], names=SCHEMA.names
    )
    runs = pa.RunEndEncodedArray.from_arrays(pa.array([3], pa.int32()), pa.array([b"v"]))
    return {
        "views": encode_arrow(views),
        "views of elsewhere": encode_arrow(views).replace(there, elsewhere),
        "nothing": encode_arrow(empty),
        "runs": encode_arrow(rows.set_column(2, "value", runs)),
        "lists": encode_arrow(rows.set_column(3, "headers", pa.array([[("a", b"b")]] * 3))),
        "nulls": encode_arrow(rows.set_column(0, "id", pa.nulls(3))),
    }


@pytest.mark.parametrize("name", odd_bodies())
def test_columns_of_unexpected_types_are_refused_before_they_are_used(name: str) -> None:
    with pytest.raises(InvalidValue):
        check_batch(cast(pa.RecordBatch, decode_records(odd_bodies()[name], ARROW, 0)), Limits(), 1)


def test_errors_are_the_same_after_encoding_and_decoding() -> None:
    for error in (
        PartitionOutOfRange(P, 2),
        InvalidValue("delay", -1, "seconds"),
        TopicInUse("orders", ["billing", "shipping"]),
        model.OverQuota("orders", 5, 0.25),
        model.Fenced("gone"),
    ):
        again = errors.error_of(errors.error_body(error))
        assert type(again) is type(error)
        assert str(again) == str(error)
        assert vars(again) == vars(error)
    unknown = errors.error_of(errors.ErrorBody("of_a_later_version", "what it says"))
    assert type(unknown) is model.InvalidCall
    assert str(unknown) == "what it says"


def test_every_error_has_a_code_of_its_own() -> None:
    kinds = [k for k in vars(model).values() if isinstance(k, type) and issubclass(k, ShardyardError)]
    assert len({errors.code_of(kind) for kind in kinds}) == len(kinds)
    assert errors.code_of(PartitionOutOfRange) == "partition_out_of_range"


@pytest.mark.parametrize(
    "text", ["", "orders", "/3", "orders/", "orders/x", "orders/-1", "orders/²", "orders/" + "9" * 99]
)
def test_a_partitions_name_has_a_topic_and_an_index(text: str) -> None:
    with pytest.raises(InvalidValue, match="such as orders/3"):
        parse_partition(text)
    assert parse_partition("orders/3") == P


def test_the_error_of_a_malformed_body_says_where_it_is_wrong() -> None:
    with pytest.raises(Malformed, match=r"`records\[1\]\.value"):
        decode_records(b'{"records": [{"value": "x"}, {"value": 1}]}', JSON, 0)
    with pytest.raises(Malformed):
        decode(b'{"a":' + b"[" * 100_000, dict)
