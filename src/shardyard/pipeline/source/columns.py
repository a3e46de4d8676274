"""Records as Spark sees them, and the way there from the log's Arrow batches."""

import numpy as np
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
"""What a read gives. No key is null, no headers an empty list."""


def chosen(schema: StructType) -> StructType:
    """`schema`, if it is a choice of `COLUMNS`: those that are left out are not even fetched."""
    known = {field.name: field.dataType for field in COLUMNS}
    for field in schema:
        if known.get(field.name) != field.dataType:
            expected = ", ".join(f"{f.name} {f.dataType.simpleString()}" for f in COLUMNS)
            raise InvalidValue("schema", f"{field.name} {field.dataType.simpleString()}", f"some of: {expected}")
    return schema


def to_spark(batch: Batch, schema: StructType) -> list[pa.RecordBatch]:
    """What was read from the log, with the columns of `schema`."""
    target = to_arrow_schema(schema, timezone="UTC")
    first = batch.first
    parts = []
    for chunk in batch.data.to_batches():
        arrays = [_column(field, chunk, batch, first) for field in target]
        parts.append(pa.RecordBatch.from_arrays(arrays, schema=target))
        first += len(chunk)
    return parts


def _column(field: pa.Field, chunk: pa.RecordBatch, batch: Batch, first: int) -> pa.Array:  # noqa: PLR0911 a table
    match field.name:
        case "topic":
            return pa.repeat(batch.partition.topic, len(chunk))
        case "partition":
            return pa.repeat(pa.scalar(batch.partition.index, pa.int32()), len(chunk))
        case "epoch":
            return pa.repeat(batch.epoch, len(chunk))
        case "offset":
            return pa.array(np.arange(first, first + len(chunk), dtype=np.int64))
        case "timestamp":
            return pc.multiply(chunk["timestamp"], 1000).cast(field.type)
        case "headers":
            return _headers_to_spark(chunk["headers"], field.type)
        case name:
            return chunk[name]


def _headers_to_spark(headers: pa.MapArray, target: pa.DataType) -> pa.Array:
    """A list of pairs instead of a map, since names may come twice; an empty one where there are none.

    Null would do, but Spark hands null lists to Python in a time that grows with the square of their number.
    """
    pairs = pa.StructArray.from_arrays([headers.keys, headers.items], fields=list(target.value_type))
    return pa.ListArray.from_arrays(_offsets(headers), pairs, type=target)


def _offsets(lists: pa.Array) -> pa.Array:
    """Copied, since Arrow refuses a mask beside the offsets of a slice."""
    return pa.array(lists.offsets.to_numpy())


def check_writable(schema: StructType) -> None:
    """Refuse a frame that can't be written to a topic."""
    types = {field.name: field.dataType for field in schema}
    if "value" not in types:
        raise InvalidValue("columns", ", ".join(types), f"a column 'value'; {_WRITABLE}")
    for name, kind in types.items():
        if name not in COLUMNS.names:
            raise InvalidValue("column", name, _WRITABLE)
        if name not in _IGNORED and kind.simpleString() not in _TAKEN[name]:
            raise InvalidValue(f"type of column {name!r}", kind.simpleString(), " or ".join(_TAKEN[name]))


_TAKEN = {
    "partition": ("int",),
    "timestamp": ("timestamp",),
    "id": ("string",),
    "key": ("binary", "string"),
    "value": ("binary", "string"),
    "headers": (HEADERS.simpleString(),),
}
_IGNORED = ("topic", "offset", "epoch")
_WRITABLE = f"{', '.join(_TAKEN)}; {', '.join(_IGNORED)} are ignored"


def from_spark(data: pa.RecordBatch, ids: pa.Array) -> pa.RecordBatch:
    """What a task was given to write, as the log takes it: `ids` where there is no id, and a timestamp of 0, for the
    log to set, where there is none."""
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
    return pa.MapArray.from_arrays(_offsets(headers), names, values, kind, mask=none)
