"""Records in Arrow: streams, of which what a caller sends is checked before anything of it is used, and columns of
MessagePack. Only brokers load this."""

import struct
from collections.abc import Sequence

import pyarrow as pa

from shardyard.model import InvalidValue, Malformed
from shardyard.model.arrow_limits import check_schema
from shardyard.model.batch import SCHEMA, Batch
from shardyard.wire.columns import RecordColumns

_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


def encode_arrow(batches: pa.RecordBatch | Sequence[pa.RecordBatch], schema: pa.Schema | None = None) -> bytes:
    """A stream of one or more batches that share a schema; by default that of the first batch.

    Same bytes as from Arrow's own stream writer, which is slower for small batches.
    """
    if isinstance(batches, pa.RecordBatch):
        batches = [batches]
    schema = batches[0].schema if schema is None else schema
    return b"".join([schema.serialize(), *(batch.serialize() for batch in batches), _END_OF_STREAM])


def encode_arrow_batch(batch: Batch) -> bytes:
    """A batch that was read. Epoch, first and end are metadata of the schema; offsets with gaps are a column of their
    own."""
    table = batch.data
    metadata = {"epoch": str(batch.epoch), "first": str(batch.first), "end": str(batch.end)}
    if batch.places is not None:
        table = table.append_column("offset", pa.array(batch.places, pa.int64()))
    return encode_arrow(table.to_batches(), table.schema.with_metadata(metadata))


def columns_of(batch: Batch) -> RecordColumns:
    """A batch that was read as columns of MessagePack."""
    data = batch.content
    if not isinstance(data, pa.Table):
        return RecordColumns.of(data, 0)
    ids, keys, values, headers, timestamps = data.columns
    return RecordColumns(
        ids.to_pylist(),
        values.to_pylist(),
        timestamps.to_pylist(),
        None if keys.null_count == len(data) else keys.to_pylist(),
        None if headers.null_count == len(data) else [tuple(pairs or ()) for pairs in headers.to_pylist()],
    )


def from_columns(columns: RecordColumns) -> pa.RecordBatch:
    """Columns of MessagePack as an Arrow batch."""
    count, (_, key, _, header, _) = len(columns), SCHEMA.types
    arrays = [
        pa.array(columns.ids, pa.string()),
        pa.nulls(count, key) if columns.keys is None else pa.array(columns.keys, key),
        pa.array(columns.values, pa.binary()),
        pa.nulls(count, header)
        if columns.headers is None
        else pa.array([pairs or None for pairs in columns.headers], header),
        pa.array(columns.timestamps, pa.int64()),
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def decode_arrow(body: bytes) -> pa.RecordBatch:
    """The records of a stream that a caller sent, with a schema that records can have."""
    try:
        first, *messages = pa.ipc.MessageReader.open_stream(body)
        if first.type != "schema":
            raise ValueError("it does not start with a schema")
        schema = pa.ipc.read_schema(first)
        check_schema(schema)
        batches = [_batch_of(message, schema) for message in messages]
        if len(batches) == 1:
            return batches[0]
        return pa.concat_batches(batches) if batches else pa.RecordBatch.from_pylist([], SCHEMA)
    except InvalidValue:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        raise Malformed("body", f"it is not an Arrow stream ({error})") from None


def _batch_of(message: pa.Message, schema: pa.Schema) -> pa.RecordBatch:
    """The batch of a message. Refuses what may unpack to far more than the body (compression, dictionaries) and what
    fails Arrow's full validation."""
    if message.type != "record batch" or _is_compressed(message):
        raise Malformed("body", "compression and dictionaries are not supported: write the Arrow stream without them")
    batch = pa.ipc.read_record_batch(message, schema)
    batch.validate(full=True)
    return batch


def _is_compressed(message: pa.Message) -> bool:
    """Whether the header of a record batch names a codec: field 3 of the table that is field 2 of the message.

    PyArrow has no API for it, but has checked that the flatbuffer lies within the metadata. Before metadata version 5
    the codec could be elsewhere, so older versions count as compressed.
    """
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
