"""What may go into a log: limits, and the validation of names, records and Arrow batches."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from shardyard.model.batch import SCHEMA
from shardyard.model.checks import encoded_size, whole_number
from shardyard.model.errors import InvalidValue, TooLarge
from shardyard.model.words import Record

_TOPIC_NAME = re.compile(r"[A-Za-z0-9._-]+")
_RESERVED = "__"


@dataclass(frozen=True, slots=True)
class Limits:
    """What a log takes. Beyond it: `TooLarge`, or `InvalidValue` for a name."""

    record_bytes: int = 1024 * 1024
    """Key, value and headers of one record together."""
    batch_bytes: int = 16 * 1024 * 1024
    batch_records: int = 100_000
    topic_name: int = 200
    """Characters."""
    partitions: int = 100_000
    """Of one topic."""


def check_topic_name(name: object, limits: Limits) -> str:
    if not isinstance(name, str) or not _TOPIC_NAME.fullmatch(name):
        raise InvalidValue("topic name", name, "letters, digits, '.', '_' and '-', at least one")
    if name.startswith(_RESERVED):
        raise InvalidValue("topic name", name, f"a name that does not begin with {_RESERVED!r}: those are reserved")
    if len(name) > limits.topic_name:
        raise TooLarge("topic name in characters", len(name), limits.topic_name)
    return name


def check_partitions(partitions: int, limits: Limits) -> int:
    count = whole_number("partitions", partitions, at_least=1)
    if count > limits.partitions:
        raise TooLarge("partitions of a topic", count, limits.partitions)
    return count


ANY_SIZE = Limits(record_bytes=2**62, batch_bytes=2**62, batch_records=2**62)
"""For who leaves it to the log to say how much is too much."""


def check_records(records: object, limits: Limits) -> tuple[tuple[Record, ...], int]:
    """Refuse what may not go into a log. Returns the records, safe from what becomes of the list, and their bytes."""
    if not isinstance(records, Sequence):
        raise InvalidValue("batch", type(records).__name__, "a sequence of records or an Arrow record batch")
    records = tuple(records)
    _check_count(len(records), limits)
    total = 0
    for record in records:
        size = _record_size(record)
        if size > limits.record_bytes:
            raise TooLarge(f"record {record.id!r} in bytes", size, limits.record_bytes)
        total += size + len(record.id)
    if total > limits.batch_bytes:
        raise TooLarge("batch in bytes", total, limits.batch_bytes)
    return records, total


def check_batch(data: pa.RecordBatch, limits: Limits, now: int) -> pa.RecordBatch:
    """Refuse an Arrow batch that may not go into a log; set the timestamps that are 0."""
    _check_count(len(data), limits)
    data = _conform(data)
    sizes = _lengths(data.column(2))  # NumPy's functions take a tenth of the time of Arrow's for a few records
    if data.column(1).null_count < len(data):
        sizes = sizes + _lengths(data.column(1))
    if data.column(3).null_count < len(data):
        sizes = sizes + _header_sizes(data.column(3))
    if (largest := int(sizes.max())) > limits.record_bytes:
        raise TooLarge(f"record {data['id'][int(sizes.argmax())].as_py()!r} in bytes", largest, limits.record_bytes)
    if data.nbytes > limits.batch_bytes:
        raise TooLarge("batch in bytes", data.nbytes, limits.batch_bytes)
    if not _lengths(data.column(0)).all():
        raise InvalidValue("column 'id'", "", "no empty text")
    earliest = int(data.column(4).to_numpy().min())
    if earliest < 0:
        raise InvalidValue("column 'timestamp'", earliest, "milliseconds since 1970, at least 0")
    if earliest == 0:
        timestamps = data["timestamp"]
        data = data.set_column(4, SCHEMA.field(4), pc.if_else(pc.equal(timestamps, 0), now, timestamps))
    return data


def _conform(data: pa.RecordBatch) -> pa.RecordBatch:
    """The batch with exactly the types of `SCHEMA`, free of charge where it has them already.

    Nothing is done with its data before it is validated: it may come from anybody.
    """
    same = check_schema(data.schema)
    try:
        data.validate(full=True)  # text that is not UTF-8 would be stored, and fail its readers
        for name in ("id", "value", "timestamp"):
            if data.column(name).null_count:
                raise InvalidValue(f"column {name!r}", None, "no null")
        if not same:
            data = data.cast(SCHEMA)
            data.validate(full=True)
    except pa.ArrowException as error:
        raise InvalidValue("columns of the batch", str(data.schema), f"the types of SCHEMA ({error})") from None
    return data


def check_schema(schema: pa.Schema) -> bool:
    """Refuse other columns than those of `SCHEMA`; returns whether they have just its types."""
    if schema.equals(SCHEMA):
        return True
    if schema.names != SCHEMA.names:
        raise InvalidValue("columns of the batch", schema.names, f"{SCHEMA.names}")
    if not all(map(_is_near, schema.types, SCHEMA.types)):
        raise InvalidValue("columns of the batch", str(schema), "the types of SCHEMA")
    return False


def _is_near(kind: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether a column may be made one of the type wanted: text or bytes, with small or large offsets; whole numbers
    and times; maps of these; nothing at all."""
    if pa.types.is_null(kind):
        return True
    if pa.types.is_map(wanted):
        near = pa.types.is_map(kind) and _is_near(kind.key_type, wanted.key_type)
        return bool(near and _is_near(kind.item_type, wanted.item_type))
    if pa.types.is_integer(wanted):
        return bool(pa.types.is_integer(kind) or pa.types.is_timestamp(kind))
    plain = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    return any(is_one(kind) for is_one in plain)


def _lengths(column: pa.StringArray | pa.BinaryArray) -> npt.NDArray[np.int64]:
    """Bytes of each value of a column that was validated; 0 where there is none."""
    ends = np.frombuffer(column.buffers()[1], np.int32, len(column) + 1, 4 * column.offset)
    lengths = np.diff(ends).astype(np.int64)
    if column.null_count:
        lengths[column.is_null().to_numpy(zero_copy_only=False)] = 0
    return lengths


def _header_sizes(headers: pa.MapArray) -> Any:
    """Bytes of headers per record."""
    offsets = headers.offsets.to_numpy()  # into keys and items, which are those of the whole array also for a slice
    if headers.items[offsets[0] : offsets[-1]].null_count:
        raise InvalidValue("column 'headers'", None, "no null as value of a header")
    lengths = pc.add(pc.binary_length(headers.keys), pc.fill_null(pc.binary_length(headers.items), 0))
    ends = np.concatenate([[0], np.cumsum(lengths.to_numpy(zero_copy_only=False))])
    return ends[offsets[1:]] - ends[offsets[:-1]]


def _record_size(record: Record) -> int:
    """Bytes of key, value and headers; `InvalidValue` if anything has another type than it should: users make these."""
    if not isinstance(cast(object, record), Record):
        raise InvalidValue("record", record, "a Record")
    kinds = (type(record.id), type(record.key), type(record.value), type(record.headers), type(record.timestamp))
    if kinds != _KEYED and kinds != _KEYLESS:  # noqa: PLR1714 `in` builds a tuple for each record
        raise InvalidValue("record", record, _KINDS)
    if not record.id or not 0 <= record.timestamp < _INT64:
        raise InvalidValue("record", record, "an id that is not empty and a timestamp of 0 to 2**63 - 1")
    if not record.id.isascii():
        encoded_size("id", record.id)
    size = len(record.value) + (len(record.key) if record.key is not None else 0)
    for header in record.headers:
        if type(header) is not tuple or tuple(map(type, header)) != (str, bytes):
            raise InvalidValue("header", header, "a text as name and bytes as value")
        name, value = header
        size += encoded_size("name of a header", name) + len(value)
    return size


_KINDS = "a text as id, bytes or None as key, bytes as value, a tuple of headers, an int as timestamp"
_KEYED = (str, bytes, bytes, tuple, int)
_KEYLESS = (str, type(None), bytes, tuple, int)
_INT64 = 2**63


def _check_count(count: int, limits: Limits) -> None:
    if count == 0:
        raise InvalidValue("batch", "empty", "at least one record")
    if count > limits.batch_records:
        raise TooLarge("batch in records", count, limits.batch_records)
