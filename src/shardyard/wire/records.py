"""Records in JSON and MessagePack."""

import base64
import binascii
import re
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.json import encode as encode_json

from shardyard.model import TAG, TRACE, Headers, InvalidValue, Partition, Record
from shardyard.wire.codec import decode
from shardyard.wire.columns import RecordColumns
from shardyard.wire.media import ARROW, MSGPACK

if TYPE_CHECKING:
    import pyarrow as pa

ARROW_FROM_RECORDS = 100
"""From this size on, a broker turns a batch of columns into Arrow at once. Below, single records are quicker, and the
log stores them together with those of others."""
_SEVERAL = re.compile(rb'\s*\{\s*"records"')


class Posted(Struct, frozen=True):
    """A record to publish, and when it is due for delivery (ms since 1970); None delivers it at once."""

    record: Record
    due: int | None = None


class JsonRecord(Struct, omit_defaults=True, forbid_unknown_fields=True):
    """A record in JSON. Values, keys and headers that are not UTF-8 are in the fields with `_base64`."""

    value: str | dict[str, Any] | list[Any] | None = None
    """A string; an object or an array is stored as JSON. In responses always a string."""
    value_base64: str | None = None
    key: str | None = None
    key_base64: str | None = None
    id: str | None = None
    """By default a new one is generated."""
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
    """Where the record is stored; only in responses."""
    offset: int | None = None
    """The same."""


class JsonRecords(Struct, forbid_unknown_fields=True):
    """The body of a publish of several records."""

    records: list[JsonRecord]


class PackedRecord(Struct, omit_defaults=True, forbid_unknown_fields=True):
    """A record in MessagePack."""

    value: bytes
    key: bytes | None = None
    id: str | None = None
    headers: list[tuple[str, bytes]] = []
    timestamp: int = 0
    deliver_at: int | None = None


class PackedRecords(Struct, omit_defaults=True, forbid_unknown_fields=True):
    """The body of a publish in MessagePack: either records, or their columns, which take less time."""

    records: list[PackedRecord] | None = None
    columns: RecordColumns | None = None

    def __post_init__(self) -> None:
        """Called by the decoder, too."""
        if (self.records is None) == (self.columns is None):
            raise ValueError("expected either `records` or `columns`")


def decode_records(body: bytes, media: str, now: int) -> "pa.RecordBatch | list[Posted]":
    """The records of a publish: an Arrow batch as it is, large columns as one, others one by one. `now`: ms since 1970,
    for delays."""
    if media == ARROW:
        from shardyard.wire.arrow import decode_arrow  # noqa: PLC0415 loads Arrow

        return decode_arrow(body)
    if media == MSGPACK:
        return _decode_packed(body)
    several = _SEVERAL.match(body) is not None
    records = decode(body, JsonRecords).records if several else [decode(body, JsonRecord)]
    return [_from_json(record, now) for record in records]


def _decode_packed(body: bytes) -> "pa.RecordBatch | list[Posted]":
    packed = decode(body, PackedRecords, MSGPACK)
    columns = packed.columns
    if columns is None:
        return [_from_packed(record) for record in packed.records or ()]
    return records_of_columns(columns)


def records_of_columns(columns: RecordColumns) -> "pa.RecordBatch | list[Posted]":
    """The records of a publish: many as an Arrow batch, few one by one."""
    if len(columns) < ARROW_FROM_RECORDS:
        return [Posted(record) for record in columns.records()]
    from shardyard.wire.arrow import from_columns  # noqa: PLC0415 loads Arrow

    return from_columns(columns)


def _from_packed(packed: PackedRecord) -> Posted:
    record = _record(packed.id, packed.key, packed.value, tuple(packed.headers), packed.timestamp)
    return Posted(record, packed.deliver_at)


def _record(id_: str | None, key: bytes | None, value: bytes, headers: Headers, timestamp: int) -> Record:
    """A record with this id, or with a new one."""
    if id_ is None:
        return Record.new(value, key, headers, timestamp)
    return Record(id_, key, value, headers, timestamp)


def _from_json(body: JsonRecord, now: int) -> Posted:
    text = body.value if isinstance(body.value, str | None) else encode_json(body.value).decode()
    value, key = _bytes("value", text, body.value_base64), _bytes("key", body.key, body.key_base64)
    if value is None:
        raise InvalidValue("value", None, "a string, an object or an array, or value_base64")
    if body.delay is not None and body.deliver_at is not None:
        raise InvalidValue("delay", body.delay, "either delay or deliver_at")
    if body.delay is not None and not 0 <= body.delay < 2**40:
        raise InvalidValue("delay", body.delay, "seconds, at least 0")
    named = [(TAG, body.tag), (TRACE, body.trace), *body.headers.items()]
    raw = [(name, _bytes("headers", None, encoded) or b"") for name, encoded in body.headers_base64.items()]
    headers: Headers = (*((name, text.encode()) for name, text in named if text is not None), *raw)
    record = _record(body.id, key, value, headers, body.timestamp)
    return Posted(record, body.deliver_at if body.delay is None else now + round(body.delay * 1000))


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
    """A stored record in JSON: as text where it is UTF-8, in base64 where it is not."""
    value, key = _text(record.value), None if record.key is None else _text(record.key)
    headers = [(name, data, _text(data)) for name, data in record.headers]
    texts = {name: text for name, _, text in headers if text is not None}
    return JsonRecord(
        value=value,
        value_base64=None if value is not None else base64.b64encode(record.value).decode(),
        key=key,
        key_base64=None if key is not None or record.key is None else base64.b64encode(record.key).decode(),
        id=record.id,
        tag=texts.pop(TAG, None),
        trace=texts.pop(TRACE, None),
        headers=texts,
        headers_base64={name: base64.b64encode(data).decode() for name, data, text in headers if text is None},
        timestamp=record.timestamp,
        partition=str(partition),
        offset=offset,
    )


def _text(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None
