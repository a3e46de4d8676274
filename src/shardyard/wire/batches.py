"""The batches that consumers read: MessagePack for the client, Arrow for bulk, JSON for people and other programs."""

from typing import TYPE_CHECKING

from msgspec import Struct

from shardyard.model import Partition
from shardyard.model.plain_batch import PlainBatch
from shardyard.wire.codec import decode, encode
from shardyard.wire.columns import RecordColumns
from shardyard.wire.media import ARROW, MSGPACK
from shardyard.wire.records import JsonRecord, json_record

if TYPE_CHECKING:
    from shardyard.model.batch import Batch


class JsonBatch(Struct):
    """A batch in JSON. `end` is the offset to continue reading from."""

    partition: str
    epoch: int
    first: int
    end: int
    records: list[JsonRecord]


class PackedBatch(Struct, omit_defaults=True):
    """A batch in MessagePack."""

    epoch: int
    first: int
    end: int
    columns: RecordColumns
    offsets: list[int] | None = None
    """Of each record; None if they are consecutive from `first` on."""


def encode_batch(batch: "Batch", media: str) -> bytes:
    """The body of a response to a read, in Arrow, MessagePack or JSON."""
    from shardyard.wire.arrow import columns_of, encode_arrow_batch  # noqa: PLC0415 only brokers encode batches

    if media == ARROW:
        return encode_arrow_batch(batch)
    if media == MSGPACK:
        offsets = None if batch.places is None else batch.places.tolist()
        return encode(PackedBatch(batch.epoch, batch.first, batch.end, columns_of(batch), offsets), MSGPACK)
    pairs = zip(batch.records(), batch.offsets(), strict=True)
    records = [json_record(record, batch.partition, offset) for record, offset in pairs]
    return encode(JsonBatch(str(batch.partition), batch.epoch, batch.first, batch.end, records))


def decode_batch(partition: Partition, body: bytes) -> PlainBatch:
    """A batch that a broker encoded in MessagePack."""
    packed = decode(body, PackedBatch, MSGPACK)
    return PlainBatch(partition, packed.epoch, packed.first, packed.end, packed.columns.records(), packed.offsets)
