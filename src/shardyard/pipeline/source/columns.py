"""Conversion of records between the log's Arrow batches and Spark's columns."""

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from shardyard.model import InvalidValue
from shardyard.model.batch import SCHEMA, Batch

HEADERS = ArrayType(StructType([StructField("name", StringType()), StructField("value", BinaryType())]))
COLUMNS = StructType(
    [
        StructField("topic", StringType()),
        StructField("partition", IntegerType()),
        StructField("offset", LongType()),
        StructField("epoch", LongType()),
        StructField("timestamp", TimestampType()),
        StructField("id", StringType()),
        StructField("key", BinaryType()),
        StructField("value", BinaryType()),
        StructField("headers", HEADERS),
    ]
)
"""The columns of a read. A record without a key has a null key; one without headers has an empty list of them."""


def check_readable(schema: StructType) -> StructType:
    """`schema`, if all of its columns are in `COLUMNS`. Columns that it leaves out are not converted."""
    known = {field.name: field.dataType for field in COLUMNS}
    for field in schema:
        if known.get(field.name) != field.dataType:
            expected = ", ".join(f"{f.name} {f.dataType.simpleString()}" for f in COLUMNS)
            raise InvalidValue("schema", f"{field.name} {field.dataType.simpleString()}", f"some of: {expected}")
    return schema


Int64s = npt.NDArray[np.int64]


def offsets_of(batch: Batch) -> Int64s:
    """The offset of each record of a batch, ascending but not always consecutive."""
    offsets = batch.offsets()
    if isinstance(offsets, range):  # by far the fastest way to turn a range into an array
        return np.arange(offsets.start, offsets.stop, dtype=np.int64)
    return np.asarray(offsets, np.int64)


def to_spark(batch: Batch, schema: StructType, end: int) -> list[pa.RecordBatch]:
    """The records of a batch below the offset `end`, with the columns of `schema`."""
    target = to_arrow_schema(schema, timezone="UTC")
    offsets = offsets_of(batch)
    offsets = offsets[: np.searchsorted(offsets, end)]
    parts = []
    at = 0
    for chunk in batch.data.slice(0, len(offsets)).to_batches():
        arrays = [_column(field, chunk, batch, offsets[at : at + len(chunk)]) for field in target]
        parts.append(pa.RecordBatch.from_arrays(arrays, schema=target))
        at += len(chunk)
    return parts


def _column(field: pa.Field, chunk: pa.RecordBatch, batch: Batch, offsets: Int64s) -> pa.Array:  # noqa: PLR0911 a table
    match field.name:
        case "topic":
            return pa.repeat(batch.partition.topic, len(chunk))
        case "partition":
            return pa.repeat(pa.scalar(batch.partition.index, pa.int32()), len(chunk))
        case "epoch":
            return pa.repeat(batch.epoch, len(chunk))
        case "offset":
            return pa.array(offsets)
        case "timestamp":
            return pc.multiply(chunk["timestamp"], 1000).cast(field.type)
        case "headers":
            return _headers_to_spark(chunk["headers"], field.type)
        case name:
            return chunk[name]


def _headers_to_spark(headers: pa.MapArray, target: pa.DataType) -> pa.Array:
    """A list of pairs instead of a map, because a name may occur twice; an empty list for a record without headers.

    Null would also do, but the time in which Spark hands null lists to Python grows with the square of their number.
    """
    pairs = pa.StructArray.from_arrays([headers.keys, headers.items], fields=list(target.value_type))
    return pa.ListArray.from_arrays(_list_offsets(headers), pairs, type=target)


def _list_offsets(lists: pa.Array) -> pa.Array:
    """Where each list starts. It is a copy, because Arrow does not take a mask together with the offsets of a slice."""
    return pa.array(lists.offsets.to_numpy())


def check_writable(schema: StructType) -> None:
    """Raise `InvalidValue` for a frame that can't be written to a topic."""
    types = {field.name: field.dataType for field in schema}
    if "value" not in types:
        raise InvalidValue("columns", ", ".join(types), f"a column 'value'; {_WRITABLE}")
    for name, kind in types.items():
        if name not in COLUMNS.names:
            raise InvalidValue("column", name, _WRITABLE)
        if name not in _IGNORED and kind.simpleString() not in _WRITABLE_TYPES[name]:
            raise InvalidValue(f"type of column {name!r}", kind.simpleString(), " or ".join(_WRITABLE_TYPES[name]))


_WRITABLE_TYPES = {
    "partition": ("int",),
    "timestamp": ("timestamp",),
    "id": ("string",),
    "key": ("binary", "string"),
    "value": ("binary", "string"),
    "headers": (HEADERS.simpleString(),),
}
_IGNORED = ("topic", "offset", "epoch")
_WRITABLE = f"{', '.join(_WRITABLE_TYPES)}; {', '.join(_IGNORED)} are ignored"


def from_spark(data: pa.RecordBatch, ids: pa.Array) -> pa.RecordBatch:
    """The rows of a task as records of the log.

    A row without an id gets the one from `ids`; one without a timestamp gets 0, which the log replaces by its own time.
    """
    count = len(data)
    names = set(data.schema.names)
    id_ = pc.coalesce(data["id"], ids) if "id" in names else ids
    key = data["key"].cast(pa.binary()) if "key" in names else pa.nulls(count, pa.binary())
    headers = _headers_to_log(data["headers"]) if "headers" in names else pa.nulls(count, SCHEMA.field("headers").type)
    timestamp = pa.repeat(0, count)
    if "timestamp" in names:
        micros = data["timestamp"].cast(pa.timestamp("us", "UTC")).cast(pa.int64())
        timestamp = pc.fill_null(pc.divide(micros, 1000), 0)
    return pa.RecordBatch.from_arrays([id_, key, data["value"].cast(pa.binary()), headers, timestamp], schema=SCHEMA)


def _headers_to_log(headers: pa.ListArray) -> pa.Array:
    kind = SCHEMA.field("headers").type
    none = pc.equal(pc.fill_null(pc.list_value_length(headers), 0), 0)
    if pc.all(none).as_py():
        return pa.nulls(len(headers), kind)
    names, values = headers.values.field(0), headers.values.field(1)
    return pa.MapArray.from_arrays(_list_offsets(headers), names, values, kind, mask=none)
