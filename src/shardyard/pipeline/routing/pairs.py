"""From records of `members` and `presence` to what holds in the end: pure functions from frame to frame."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame

from shardyard.fanout.routing.changes import Changes, Names, parse_changes
from shardyard.pipeline.routing.packing import pack, unpack

PAIRS = "partition int, malformed long, pairs binary"
"""One row for each partition that has records: how many of them hold no change, and the pairs, as an Arrow stream."""
USERS = "user binary"


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """Of a partition of `members`: channel and user of each membership. Of `presence`: user and device of each client
    that is connected."""

    keys: pa.DictionaryArray
    names: pa.DictionaryArray

    def to_bytes(self) -> bytes:
        sink = pa.BufferOutputStream()
        batch = pa.record_batch({"keys": self.keys, "names": self.names})
        with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression="lz4")) as writer:
            writer.write_batch(batch)
        return bytes(sink.getvalue())

    @classmethod
    def from_bytes(cls, stored: pa.BinaryScalar) -> "Pairs":
        batch = pa.ipc.open_stream(stored.as_buffer()).read_next_batch()
        return cls(batch["keys"], batch["names"])


def memberships(records: DataFrame) -> DataFrame:
    """The members of channels by records of `members` (with the columns `packing.RECORDS`), as `PAIRS`. The last change
    of a channel and user counts."""
    return pack(records).groupBy("partition").applyInArrow(lambda table: _current(table, clears=False), PAIRS)


def devices(records: DataFrame) -> DataFrame:
    """The clients that are connected by records of `presence`, as `PAIRS`. The last change of a user and device counts,
    if it is after the last record of its partition that clears everything before it."""
    return pack(records).groupBy("partition").applyInArrow(lambda table: _current(table, clears=True), PAIRS)


def users(pairs: DataFrame) -> DataFrame:
    """The users of memberships, each once, as `USERS`."""
    return pairs.select("pairs").mapInArrow(_users, USERS).distinct()


def _users(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        for stored in batch["pairs"]:
            yield pa.RecordBatch.from_arrays([Pairs.from_bytes(stored).names.dictionary], ["user"])


def _current(packed: pa.Table, *, clears: bool) -> pa.Table:
    records = unpack(packed["records"])
    changes = parse_changes(records["key"], records["value"], clears=clears)
    row = {"partition": packed["partition"][:1], "malformed": [changes.malformed]}
    return pa.table(row | {"pairs": [current_pairs(changes).to_bytes()]})


def current_pairs(changes: Changes) -> Pairs:
    """The pairs of key and name whose last change added them."""
    keys, names = _encode(changes.keys), _encode(changes.names)
    codes = keys.indices.to_numpy().astype(np.int64) * len(names.dictionary) + names.indices.to_numpy()
    _, from_the_end = np.unique(codes[::-1], return_index=True)
    last = len(codes) - 1 - from_the_end
    rows = pa.array(last[np.asarray(changes.added, bool)[last]])
    return Pairs(_compact(keys, rows), _compact(names, rows))


def _encode(names: Names) -> pa.DictionaryArray:
    return (pa.array(names, pa.binary()) if isinstance(names, list) else names).dictionary_encode()


def _compact(encoded: pa.DictionaryArray, rows: pa.Array) -> pa.DictionaryArray:
    """Some rows, with a dictionary of only what they have."""
    kept = encoded.indices.take(rows)
    used = pc.unique(kept)
    if len(used) == len(encoded.dictionary):
        return pa.DictionaryArray.from_arrays(kept, encoded.dictionary)
    place = np.zeros(len(encoded.dictionary), np.int32)
    place[used.to_numpy()] = np.arange(len(used))
    return pa.DictionaryArray.from_arrays(pa.array(place[kept.to_numpy()]), encoded.dictionary.take(used))
