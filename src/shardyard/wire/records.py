"""What goes over the wire between brokers and clients: records and errors, in JSON, MessagePack and Arrow."""

import base64
import binascii
import re
import struct
from collections.abc import Sequence
from typing import TypeVar

import msgspec
import numpy as np
import pyarrow as pa
from msgspec import Struct

from shardyard.model import TAG, TRACE, Headers, InvalidValue, Malformed, Partition, Record
from shardyard.model.batch import SCHEMA, Batch
from shardyard.model.limits import check_schema

JSON = "application/json"
MSGPACK = "application/msgpack"
ARROW = "application/vnd.apache.arrow.stream"
MEDIA = (JSON, MSGPACK, ARROW)

T = TypeVar("T")

_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


class Posted(Struct, frozen=True):
    """A record to publish, and when it is to be delivered: at a time (ms since 1970), or at once."""

    record: Record
    due: int | None = None


class JsonRecord(Struct, omit_defaults=True, forbid_unknown_fields=True):
    """A record as JSON has it. What is no text is in the fields with `_base64`, also single headers."""

    value: str | None = None
    value_base64: str | None = None
    key: str | None = None
    key_base64: str | None = None
    id: str | None = None
    """One is given if there is none."""
    tag: str | None = None
    trace: str | None = None
    headers: dict[str, str] = {}
    headers_base64: dict[str, str] = {}
    timestamp: int = 0
    deliver_at: int | None = None
    """Milliseconds since 1970."""
    delay: float | None = None
    """Seconds from now; instead of `deliver_at`."""
    partition: str | None = None
    """Where it is, in an answer."""
    offset: int | None = None


class JsonRecords(Struct, forbid_unknown_fields=True):
    """Several of them."""

    records: list[JsonRecord]


class PackedRecord(Struct, omit_defaults=True, forbid_unknown_fields=True):
    """A record as MessagePack has it."""

    value: bytes
    key: bytes | None = None
    id: str | None = None
    headers: list[tuple[str, bytes]] = []
    timestamp: int = 0
    deliver_at: int | None = None


class PackedRecords(Struct, forbid_unknown_fields=True):
    """Several of them."""

    records: list[PackedRecord]


def decoded(body: bytes, kind: type[T], media: str = JSON) -> T:
    """A body in JSON or MessagePack; `Malformed` says what is wrong with it and where."""
    try:
        if media == MSGPACK:
            return msgspec.msgpack.decode(body, type=kind)
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Malformed("body", str(error).replace("`$.", "`")) from None


def packed(content: Struct) -> bytes:
    """A body in MessagePack."""
    return msgspec.msgpack.encode(content)


def posted_records(body: bytes, media: str, now: int) -> pa.RecordBatch | list[Posted]:
    """The records of a publish: Arrow as it is, others one by one."""
    if media == ARROW:
        return _arrow(body)
    if media == MSGPACK:
        return [_unpacked(packed) for packed in decoded(body, PackedRecords, MSGPACK).records]
    one = re.match(rb'\s*\{\s*"records"', body) is None
    told = [decoded(body, JsonRecord)] if one else decoded(body, JsonRecords).records
    return [_from_json(record, now) for record in told]


def _arrow(body: bytes) -> pa.RecordBatch:
    try:
        first, *messages = pa.ipc.MessageReader.open_stream(body)
        if first.type != "schema":
            raise ValueError("it does not begin with a schema")
        schema = pa.ipc.read_schema(first)
        check_schema(schema)
        batches = [_arrow_batch_of(message, schema) for message in messages]
        if len(batches) == 1:
            return batches[0]
        return pa.concat_batches(batches) if batches else pa.RecordBatch.from_pylist([], SCHEMA)
    except InvalidValue:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        raise Malformed("body", f"it is no Arrow stream ({error})") from None


def _arrow_batch_of(message: pa.Message, schema: pa.Schema) -> pa.RecordBatch:
    """Refuse what may be far larger than its body (compressed, or with dictionaries), and what is not sound."""
    if message.type != "record batch" or _is_compressed(message):
        raise Malformed("body", "compression and dictionaries are not taken: write the Arrow stream without them")
    batch = pa.ipc.read_record_batch(message, schema)
    batch.validate(full=True)
    return batch


def _is_compressed(message: pa.Message) -> bool:
    """Whether the header of a record batch names a codec: field 3 of a table that is field 2 of the message. PyArrow
    has checked that all of it lies within the metadata, but does not tell. Before version 5 it could be elsewhere."""
    if message.metadata_version != pa.ipc.MetadataVersion.V5:
        return True
    data = message.metadata.to_pybytes()

    def field(table: int, number: int) -> int | None:
        slots = table - struct.unpack_from("<i", data, table)[0]
        size = struct.unpack_from("<H", data, slots)[0]
        place = 4 + 2 * number
        at = struct.unpack_from("<H", data, slots + place)[0] if place < size else 0
        return table + at if at else None

    header = field(struct.unpack_from("<I", data)[0], 2)
    return header is not None and field(header + struct.unpack_from("<I", data, header)[0], 3) is not None


def _unpacked(packed: PackedRecord) -> Posted:
    headers = tuple(packed.headers)
    record = Record.new(packed.value, packed.key, headers, packed.timestamp)
    if packed.id is not None:
        record = Record(packed.id, packed.key, packed.value, headers, packed.timestamp)
    return Posted(record, packed.deliver_at)


def _from_json(told: JsonRecord, now: int) -> Posted:
    value, key = _bytes("value", told.value, told.value_base64), _bytes("key", told.key, told.key_base64)
    if value is None:
        raise InvalidValue("value", None, "a text, or value_base64")
    if told.delay is not None and told.deliver_at is not None:
        raise InvalidValue("delay", told.delay, "either delay or deliver_at")
    if told.delay is not None and not 0 <= told.delay < 2**40:
        raise InvalidValue("delay", told.delay, "seconds, at least 0")
    named = [(TAG, told.tag), (TRACE, told.trace), *told.headers.items()]
    raw = [(name, _bytes("headers", None, encoded) or b"") for name, encoded in told.headers_base64.items()]
    headers: Headers = (*((name, text.encode()) for name, text in named if text is not None), *raw)
    record = Record.new(value, key, headers, told.timestamp)
    if told.id is not None:
        record = Record(told.id, key, value, headers, told.timestamp)
    return Posted(record, told.deliver_at if told.delay is None else now + round(told.delay * 1000))


def _bytes(name: str, text: str | None, encoded: str | None) -> bytes | None:
    if text is not None and encoded is not None:
        raise InvalidValue(name, text, f"either {name} or {name}_base64")
    if encoded is None:
        return None if text is None else text.encode()
    try:
        return base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidValue(f"{name}_base64", f"{encoded[:50]}...", "base64") from None


def json_record(record: Record, partition: Partition, offset: int) -> JsonRecord:
    """A record for people: text where it is text."""
    value, key = _text(record.value), None if record.key is None else _text(record.key)
    texts = [(name, data, _text(data)) for name, data in record.headers]
    told = {name: text for name, _, text in texts if text is not None}
    return JsonRecord(
        value=value,
        value_base64=None if value is not None else base64.b64encode(record.value).decode(),
        key=key,
        key_base64=None if key is not None or record.key is None else base64.b64encode(record.key).decode(),
        id=record.id,
        tag=told.pop(TAG, None),
        trace=told.pop(TRACE, None),
        headers=told,
        headers_base64={name: base64.b64encode(data).decode() for name, data, text in texts if text is None},
        timestamp=record.timestamp,
        partition=str(partition),
        offset=offset,
    )


def _text(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


# Batches for consumers


class JsonBatch(Struct):
    """A batch for those who read JSON."""

    partition: str
    epoch: int
    first: int
    end: int
    records: list[JsonRecord]


def encoded_batch(batch: Batch, media: str) -> bytes:
    if media == ARROW:
        return _arrow_batch(batch)
    pairs = zip(batch.records(), batch.offsets(), strict=True)
    records = [json_record(record, batch.partition, offset) for record, offset in pairs]
    return msgspec.json.encode(JsonBatch(str(batch.partition), batch.epoch, batch.first, batch.end, records))


def _arrow_batch(batch: Batch) -> bytes:
    table = batch.data
    told = {"epoch": str(batch.epoch), "first": str(batch.first), "end": str(batch.end)}
    if batch.places is not None:
        table = table.append_column("offset", pa.array(batch.places, pa.int64()))
    return _stream(table.schema.with_metadata(told), table.to_batches())


def decoded_batch(partition: Partition, body: bytes) -> Batch:
    """A batch as a broker encoded it with Arrow."""
    table = pa.ipc.open_stream(body).read_all()
    told = {name.decode(): int(value) for name, value in (table.schema.metadata or {}).items()}
    places = None
    if "offset" in table.column_names:
        places = table["offset"].to_numpy().astype(np.int64)
        table = table.drop_columns(["offset"])
    return Batch(partition, told["epoch"], told["first"], table.replace_schema_metadata(None), places, told["end"])


def arrow_body(records: pa.RecordBatch | Sequence[pa.RecordBatch]) -> bytes:
    """An Arrow stream of batches that share a schema."""
    batches = [records] if isinstance(records, pa.RecordBatch) else list(records)
    return _stream(batches[0].schema, batches)


def _stream(schema: pa.Schema, batches: Sequence[pa.RecordBatch]) -> bytes:
    """As Arrow's own writer has it, which takes longer for small batches."""
    return b"".join([schema.serialize(), *(batch.serialize() for batch in batches), _END_OF_STREAM])


# Names of partitions

_INDEX = re.compile(r"[0-9]{1,9}")


def partition_named(text: str) -> Partition:
    """`orders/3`."""
    topic, slash, index = text.rpartition("/")
    if not slash or not topic or not _INDEX.fullmatch(index):
        raise InvalidValue("partition", text, "a topic and an index, such as orders/3")
    return Partition(topic, int(index))
