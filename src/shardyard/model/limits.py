"""What may go into a log: limits, and the validation of names, records and Arrow batches."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

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
    """The largest records, batches, names and topics that a log takes. It refuses larger ones with `TooLarge`."""

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
"""For callers that leave it to the log to enforce its limits."""


@dataclass(frozen=True, slots=True)
class Validated:
    """Records that `validate` has checked. What gets them checks no more than that they fit its limits.

    Only `validate` and `part` make these. The records can't be changed afterwards: a tuple or an Arrow batch.
    """

    rows: tuple[Record, ...] | pa.RecordBatch
    size: int
    """Bytes; estimated for a part of records."""
    largest: int
    """No record has more bytes of key, value and headers than this."""
    most: int
    """All records together have no more bytes than this."""

    def __len__(self) -> int:
        return len(self.rows)

    def part(self, rows: tuple[Record, ...] | pa.RecordBatch) -> "Validated":
        """Some of the same rows."""
        if isinstance(rows, pa.RecordBatch):
            return Validated(rows, rows.nbytes, self.largest, rows.nbytes)
        return Validated(rows, self.size * len(rows) // len(self.rows), self.largest, self.most)

    def fits(self, limits: Limits) -> bool:
        """Whether these records are known to be within `limits`; if not, they may still be."""
        return (
            0 < len(self.rows) <= limits.batch_records
            and self.largest <= limits.record_bytes
            and self.most <= limits.batch_bytes
        )


Records: TypeAlias = Sequence[Record] | pa.RecordBatch | Validated
"""The forms in which a batch of records is appended."""


def validate(records: Records, limits: Limits, now: int) -> Validated:
    """Refuse what may not go into a log. `now`, in milliseconds, replaces timestamps of 0 in an Arrow batch."""
    if isinstance(records, Validated):
        if records.fits(limits):
            return records
        records = records.rows
    if isinstance(records, pa.RecordBatch):
        data, largest = _check_batch(records, limits, now)
        size = data.nbytes
        return Validated(data, size, largest, size)
    return _check_records(records, limits)


def check_records(records: object, limits: Limits) -> tuple[tuple[Record, ...], int]:
    """Refuse what may not go into a log. Returns the records as a tuple, and their bytes."""
    validated = _check_records(records, limits)
    return cast("tuple[Record, ...]", validated.rows), validated.size


def check_batch(data: pa.RecordBatch, limits: Limits, now: int) -> pa.RecordBatch:
    """Refuse an Arrow batch that may not go into a log; set the timestamps that are 0."""
    return _check_batch(data, limits, now)[0]


def _check_records(records: object, limits: Limits) -> Validated:
    if not isinstance(records, Sequence):
        raise InvalidValue("batch", type(records).__name__, "a sequence of records or an Arrow record batch")
    records = tuple(records)
    _check_count(len(records), limits)
    total = largest = 0
    for record in records:
        size = _record_size(record)
        if size > largest:
            if size > limits.record_bytes:
                raise TooLarge(f"record {record.id!r} in bytes", size, limits.record_bytes)
            largest = size
        total += size + len(record.id)
    if total > limits.batch_bytes:
        raise TooLarge("batch in bytes", total, limits.batch_bytes)
    return Validated(records, total, largest, total)


def _check_batch(data: pa.RecordBatch, limits: Limits, now: int) -> tuple[pa.RecordBatch, int]:
    """The batch, and the bytes of its largest record."""
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
        raise InvalidValue("column 'id'", "", "no empty string")
    earliest = int(data.column(4).to_numpy().min())
    if earliest < 0:
        raise InvalidValue("column 'timestamp'", earliest, "milliseconds since 1970, at least 0")
    if earliest == 0:
        timestamps = data["timestamp"]
        data = data.set_column(4, SCHEMA.field(4), pc.if_else(pc.equal(timestamps, 0), now, timestamps))
    return data, largest


def _conform(data: pa.RecordBatch) -> pa.RecordBatch:
    """The batch with exactly the types of `SCHEMA`; it is not copied if it has them already.

    Its data may come from anybody, so nothing touches it before it is validated.
    """
    same = check_schema(data.schema)
    try:
        data.validate(full=True)  # a string that is not UTF-8 would be stored, and fail its readers
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
    """Refuse other columns than those of `SCHEMA`. Returns whether they have exactly its types."""
    if schema.equals(SCHEMA):
        return True
    if schema.names != SCHEMA.names:
        raise InvalidValue("columns of the batch", schema.names, f"{SCHEMA.names}")
    if not all(map(_is_near, schema.types, SCHEMA.types)):
        raise InvalidValue("columns of the batch", str(schema), "the types of SCHEMA")
    return False


def _is_near(kind: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether a column may be cast to the wanted type: strings or bytes, with small or large offsets; integers and
    timestamps; maps of these; nulls."""
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
    """The bytes of each value of a validated column; 0 for null."""
    ends = np.frombuffer(column.buffers()[1], np.int32, len(column) + 1, 4 * column.offset)
    lengths = np.diff(ends).astype(np.int64)
    if column.null_count:
        lengths[column.is_null().to_numpy(zero_copy_only=False)] = 0
    return lengths


def _header_sizes(headers: pa.MapArray) -> Any:
    """The bytes of the headers of each record."""
    offsets = headers.offsets.to_numpy()  # even those of a slice point into the keys and items of the whole array
    if headers.items[offsets[0] : offsets[-1]].null_count:
        raise InvalidValue("column 'headers'", None, "no null as value of a header")
    lengths = pc.add(pc.binary_length(headers.keys), pc.fill_null(pc.binary_length(headers.items), 0))
    ends = np.concatenate([[0], np.cumsum(lengths.to_numpy(zero_copy_only=False))])
    return ends[offsets[1:]] - ends[offsets[:-1]]


def _record_size(record: Record) -> int:
    """The bytes of key, value and headers. `InvalidValue` if a field has a wrong type: users make these objects."""
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
            raise InvalidValue("header", header, "a string as name and bytes as value")
        name, value = header
        size += encoded_size("name of a header", name) + len(value)
    return size


_KINDS = "a string as id, bytes or None as key, bytes as value, a tuple of headers, an int as timestamp"
_KEYED = (str, bytes, bytes, tuple, int)
_KEYLESS = (str, type(None), bytes, tuple, int)
_INT64 = 2**63


def _check_count(count: int, limits: Limits) -> None:
    if count == 0:
        raise InvalidValue("batch", "empty", "at least one record")
    if count > limits.batch_records:
        raise TooLarge("batch in records", count, limits.batch_records)
