"""Records as Arrow batches, and back; what may go into a log."""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from shardyard.model import InvalidValue, Partition, Record, TooLarge, whole_number

SCHEMA = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary(), nullable=False),
        pa.field("headers", pa.map_(pa.string(), pa.binary())),
        pa.field("timestamp", pa.int64(), nullable=False),
    ]
)
"""A record as Arrow has it. The timestamp is in milliseconds since 1970, UTC; no headers is null."""

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


def check_topic_name(name: str, limits: Limits) -> str:
    if not _TOPIC_NAME.fullmatch(name):
        raise InvalidValue("topic name", name, "letters, digits, '.', '_' and '-', at least one")
    if name.startswith(_RESERVED):
        raise InvalidValue("topic name", name, f"a name that does not begin with {_RESERVED!r}: those are reserved")
    if len(name) > limits.topic_name:
        raise TooLarge("topic name in characters", len(name), limits.topic_name)
    return name


@dataclass(frozen=True, slots=True)
class Batch:
    """Records read from a partition, at consecutive offsets from `first` on."""

    partition: Partition
    epoch: int
    first: int
    data: pa.Table
    """Columns as in `SCHEMA`, in as many chunks as were stored."""

    def __len__(self) -> int:
        return int(self.data.num_rows)

    @property
    def end(self) -> int:
        """The offset to read from next."""
        return self.first + len(self)

    def records(self) -> list[Record]:
        """The records as Python objects."""
        return [record for chunk in self.data.to_batches() for record in to_records(chunk)]


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def to_records(data: pa.RecordBatch) -> list[Record]:
    """The rows of an Arrow batch as records.

    A million records a second are made here, so each is filled through its slots: a frozen dataclass's own
    constructor takes twice as long.
    """
    ids, keys, values, headers, timestamps = (data.column(i) for i in range(5))
    new, make = object.__new__, Record
    fill_id, fill_key, fill_value, fill_headers, fill_timestamp = _FILL
    all_headers: list[Any] = [None] * len(data) if headers.null_count == len(data) else headers.to_pylist()
    records = []
    for id_, key, value, header, timestamp in zip(
        ids.to_pylist(), keys.to_pylist(), values.to_pylist(), all_headers, timestamps.to_pylist(), strict=True
    ):
        record = new(make)
        fill_id(record, id_)
        fill_key(record, key)
        fill_value(record, value)
        fill_headers(record, () if header is None else tuple(header))
        fill_timestamp(record, timestamp)
        records.append(record)
    return records


_FILL = tuple(vars(Record)[name].__set__ for name in ("id", "key", "value", "headers", "timestamp"))


def from_records(records: Sequence[Record], now: int) -> pa.RecordBatch:
    """Records, checked before by `check_records`, as an Arrow batch."""
    headers = (
        pa.array([r.headers or None for r in records], SCHEMA.field("headers").type)
        if any(r.headers for r in records)
        else pa.nulls(len(records), SCHEMA.field("headers").type)
    )
    return pa.RecordBatch.from_arrays(
        [
            pa.array([r.id for r in records], pa.string()),
            pa.array([r.key for r in records], pa.binary()),
            pa.array([r.value for r in records], pa.binary()),
            headers,
            pa.array([r.timestamp or now for r in records], pa.int64()),
        ],
        schema=SCHEMA,
    )


def check_records(records: Sequence[Record], limits: Limits) -> int:
    """Refuse what may not go into a log. Returns how many bytes the records have."""
    _check_count(len(records), limits)
    total = 0
    for record in records:
        if not (_is(record.value, bytes) and _is(record.key, bytes | None) and _is(record.id, str)):
            raise InvalidValue("record", record, "a text as id, bytes or None as key, and bytes as value")
        if not record.id:
            raise InvalidValue("record id", record.id, "a text that is not empty")
        size = len(record.value) + (len(record.key) if record.key is not None else 0)
        for name, value in record.headers:
            if not (_is(name, str) and _is(value, bytes)):
                raise InvalidValue("header", (name, value), "a text as name and bytes as value")
            size += len(name) + len(value)
        if size > limits.record_bytes:
            raise TooLarge(f"record {record.id!r} in bytes", size, limits.record_bytes)
        whole_number("timestamp", record.timestamp, at_least=0)
        total += size + len(record.id)
    if total > limits.batch_bytes:
        raise TooLarge("batch in bytes", total, limits.batch_bytes)
    return total


def check_batch(data: pa.RecordBatch, limits: Limits, now: int) -> pa.RecordBatch:
    """Refuse an Arrow batch that may not go into a log; set the timestamps that are 0."""
    data = _conform(data)
    _check_count(len(data), limits)
    sizes = pc.binary_length(data["value"]).to_numpy().astype(np.int64)
    sizes += pc.fill_null(pc.binary_length(data["key"]), 0).to_numpy()
    if data["headers"].null_count < len(data):
        sizes += _header_sizes(data["headers"])
    if (largest := int(sizes.max())) > limits.record_bytes:
        raise TooLarge(f"record {data['id'][int(sizes.argmax())].as_py()!r} in bytes", largest, limits.record_bytes)
    if data.nbytes > limits.batch_bytes:
        raise TooLarge("batch in bytes", data.nbytes, limits.batch_bytes)
    if pc.min(pc.binary_length(data["id"])).as_py() == 0:
        raise InvalidValue("column 'id'", "", "no empty text")
    earliest = pc.min(data["timestamp"]).as_py()
    if earliest < 0:
        raise InvalidValue("column 'timestamp'", earliest, "milliseconds since 1970, at least 0")
    if earliest == 0:
        timestamps = data["timestamp"]
        data = data.set_column(4, SCHEMA.field(4), pc.if_else(pc.equal(timestamps, 0), now, timestamps))
    return data


def _conform(data: pa.RecordBatch) -> pa.RecordBatch:
    """The batch with exactly the types of `SCHEMA`, free of charge where it has them already."""
    if data.schema.names != SCHEMA.names:
        raise InvalidValue("columns of the batch", data.schema.names, f"{SCHEMA.names}")
    for name in ("id", "value", "timestamp"):
        if data.column(name).null_count:
            raise InvalidValue(f"column {name!r}", None, "no null")
    try:
        return data.cast(SCHEMA)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, ValueError) as error:
        raise InvalidValue("columns of the batch", str(data.schema), f"the types of SCHEMA ({error})") from None


def _header_sizes(headers: pa.MapArray) -> Any:
    """Bytes of headers per record."""
    lengths = pc.add(pc.binary_length(headers.keys), pc.fill_null(pc.binary_length(headers.items), 0))
    ends = np.concatenate([[0], np.cumsum(lengths.to_numpy(zero_copy_only=False))])
    offsets = headers.offsets.to_numpy() - headers.offsets[0].as_py()
    return ends[offsets[1:]] - ends[offsets[:-1]]


def _is(value: object, kind: Any) -> bool:
    """Whether a value has the type its annotation promises: records come from users."""
    return isinstance(value, kind)


def _check_count(count: int, limits: Limits) -> None:
    if count == 0:
        raise InvalidValue("batch", "empty", "at least one record")
    if count > limits.batch_records:
        raise TooLarge("batch in records", count, limits.batch_records)
