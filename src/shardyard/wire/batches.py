"""The batches that consumers read: Arrow for the client, JSON for people and other programs."""

import numpy as np
import pyarrow as pa
from msgspec import Struct

from shardyard.model import Partition
from shardyard.model.batch import Batch
from shardyard.wire.arrow import encode_arrow
from shardyard.wire.codec import encode
from shardyard.wire.media import ARROW
from shardyard.wire.records import JsonRecord, json_record


class JsonBatch(Struct):
    """A batch in JSON. `end` is the offset to continue reading from."""

    partition: str
    epoch: int
    first: int
    end: int
    records: list[JsonRecord]


def encode_batch(batch: Batch, media: str) -> bytes:
    """The body of a response to a read, in Arrow or JSON."""
    if media == ARROW:
        return _encode_arrow_batch(batch)
    pairs = zip(batch.records(), batch.offsets(), strict=True)
    records = [json_record(record, batch.partition, offset) for record, offset in pairs]
    return encode(JsonBatch(str(batch.partition), batch.epoch, batch.first, batch.end, records))


def _encode_arrow_batch(batch: Batch) -> bytes:
    """Epoch, first and end are metadata of the schema. Offsets with gaps are a column of their own."""
    table = batch.data
    metadata = {"epoch": str(batch.epoch), "first": str(batch.first), "end": str(batch.end)}
    if batch.places is not None:
        table = table.append_column("offset", pa.array(batch.places, pa.int64()))
    return encode_arrow(table.to_batches(), table.schema.with_metadata(metadata))


def decode_batch(partition: Partition, body: bytes) -> Batch:
    """A batch that a broker encoded with Arrow."""
    table = pa.ipc.open_stream(body).read_all()
    metadata = {name.decode(): int(value) for name, value in (table.schema.metadata or {}).items()}
    places = None
    if "offset" in table.column_names:
        places = table["offset"].to_numpy().astype(np.int64)
        table = table.drop_columns(["offset"])
    bare = table.replace_schema_metadata(None)
    return Batch(partition, metadata["epoch"], metadata["first"], bare, places, metadata["end"])
