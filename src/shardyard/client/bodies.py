"""The bodies of requests that carry records."""

from typing import TYPE_CHECKING

from shardyard.model.limits import is_arrow
from shardyard.runtime.clock import now_ms
from shardyard.wire.codec import encode
from shardyard.wire.columns import RecordColumns
from shardyard.wire.media import ARROW, MSGPACK
from shardyard.wire.records import PackedRecords

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa

    from shardyard.model import Record


def encode_records(records: "Sequence[Record] | pa.RecordBatch") -> tuple[bytes, str]:
    """The body of a publish, and its media type: columns of MessagePack for records, Arrow for an Arrow batch."""
    if is_arrow(records):
        from shardyard.wire.arrow import encode_arrow  # noqa: PLC0415 loads Arrow, which is loaded already

        return encode_arrow(records), ARROW
    return encode(PackedRecords(columns=RecordColumns.of(records, now_ms())), MSGPACK), MSGPACK
