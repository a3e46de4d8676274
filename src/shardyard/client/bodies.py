"""Records as a client sends them."""

from typing import TYPE_CHECKING

from shardyard.model.limits import is_arrow
from shardyard.runtime.clock import now_ms
from shardyard.wire.columns import RecordColumns

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa

    from shardyard.model import Record


def packed(records: "Sequence[Record] | pa.RecordBatch") -> RecordColumns | bytes:
    """The records of a publish: columns, or the stream of an Arrow batch."""
    if is_arrow(records):
        from shardyard.wire.arrow import encode_arrow  # noqa: PLC0415 loads Arrow, which is loaded already

        return encode_arrow(records)
    return RecordColumns.of(records, now_ms())
