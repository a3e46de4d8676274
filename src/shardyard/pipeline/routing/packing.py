"""Records of a topic by partition, many to a row: pure functions from frame to frame.

Spark moves rows one by one, which for 100 M small records takes longer than all the rest of a job. So tasks pack the
records of a partition into Arrow streams, Spark moves and groups these, and other tasks unpack them.
"""

from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame

RECORDS = ("partition", "offset", "key", "value")
"""The columns of records that are read."""
PACKED = "partition int, records binary"
"""Some of the records of a partition, as an Arrow stream with `offset`, `key` and `value`."""

PACK_BYTES = 64 * 1024 * 1024
"""A task packs what it has when it is so much."""
_CODEC = "lz4"


def pack(records: DataFrame) -> DataFrame:
    """Records with the columns `RECORDS`, as `PACKED`."""
    return records.select(*RECORDS).mapInArrow(_pack_all, PACKED)


def unpack(streams: pa.Array | pa.ChunkedArray) -> pa.Table:
    """The records in streams of one partition, in the order of their offsets."""
    parts = [pa.ipc.open_stream(stream.as_buffer()).read_all() for stream in streams]
    parts.sort(key=lambda part: part["offset"][0].as_py())
    table = pa.concat_tables(parts)
    offsets = table["offset"].to_numpy()
    if (offsets[1:] > offsets[:-1]).all():  # as they are unless tasks had offsets in between those of others
        return table
    return table.take(pa.array(np.argsort(offsets)))


def _pack_all(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    held: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        held.append(batch)
        size += batch.nbytes
        if size >= PACK_BYTES:
            yield _pack(pa.Table.from_batches(held))
            held, size = [], 0
    if held:
        yield _pack(pa.Table.from_batches(held))


def _pack(records: pa.Table) -> pa.RecordBatch:
    partitions, offsets = records["partition"].to_numpy(), records["offset"].to_numpy()
    order = np.lexsort((offsets, partitions))
    ordered = records.select(["offset", "key", "value"]).take(pa.array(order))
    indexes, starts = np.unique(partitions[order], return_index=True)
    streams = [
        _stream(ordered.slice(start, end - start)) for start, end in zip(starts, [*starts[1:], len(order)], strict=True)
    ]
    return pa.RecordBatch.from_arrays(
        [pa.array(indexes, pa.int32()), pa.array(streams, pa.binary())], ["partition", "records"]
    )


def _stream(records: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, records.schema, options=pa.ipc.IpcWriteOptions(compression=_CODEC)) as writer:
        writer.write_table(records)
    return bytes(sink.getvalue())
