"""From records of the topic `inbox` to messages and marks: pure functions from frame to frame."""

from collections.abc import Iterable, Iterator

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 as everybody calls it

from shardyard.messaging.history.checks import check_storable
from shardyard.messaging.history.manifest import BUCKET_HASH, SEPARATOR
from shardyard.model import InvalidValue, Malformed
from shardyard.model.checks import check_int64
from shardyard.pipeline.partitioning import placement_column
from shardyard.wire.inbox import Mark, decode_entry

RECORDS = ("epoch", "partition", "offset", "value")
"""The columns of records that are read."""
ENTRIES = (
    "epoch long, partition int, offset long, kind string, user_a string, user_b string, id long, sender string, "
    "recipient string, text string, at long, upto long, problem string"
)
"""An entry of the inbox, or a record that is none. `kind`: message, delivered, seen, copy or malformed."""
MESSAGES = (
    "user_a string, user_b string, id long, sender string, recipient string, text string, at long, "
    "epoch long, partition int, offset long"
)
"""A message. `user_a` and `user_b` are sender and recipient in order; `at` is in milliseconds since 1970."""
MARKS = "reader string, peer string, kind string, upto long"
"""The reader has got (`delivered`) or read (`seen`) the peer's messages up to an id."""

PROBLEM_LENGTH = 200
"""Characters of what is wrong with a record: it may quote a name of any length."""


def entries(records: DataFrame) -> DataFrame:
    """The entries in records with the columns `RECORDS`, as `ENTRIES`. A record that is no entry is `malformed`."""
    return records.select(*RECORDS).mapInArrow(_decode, ENTRIES)


def messages(found: DataFrame) -> DataFrame:
    """The messages among `ENTRIES`, as `MESSAGES`. Copies are none. One that was stored twice is there twice."""
    return found.where(F.col("kind") == "message").select(*_names(MESSAGES))


def marks(found: DataFrame) -> DataFrame:
    """The marks among `ENTRIES`, as `MARKS`."""
    rows = found.where(F.col("kind").isin("delivered", "seen"))
    return rows.select(F.col("sender").alias("reader"), F.col("recipient").alias("peer"), "kind", "upto")


def highest_marks(rows: DataFrame) -> DataFrame:
    """The highest of the marks of each reader, peer and kind: earlier ones say nothing more."""
    return rows.groupBy("reader", "peer", "kind").agg(F.max("upto").alias("upto")).select(*_names(MARKS))


def with_bucket(rows: DataFrame, buckets: int) -> DataFrame:
    """Rows with `user_a` and `user_b`, and the column `bucket`: the same as `manifest.bucket_of`."""
    key = F.concat_ws(SEPARATOR, "user_a", "user_b")
    return rows.withColumn("bucket", placement_column(key, BUCKET_HASH, "modulus", buckets))


def _names(schema: str) -> list[str]:
    return [column.split()[0] for column in schema.split(",")]


def _decode(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        yield decode(batch)


def decode(records: pa.RecordBatch) -> pa.RecordBatch:
    """A batch of records as `ENTRIES`."""
    rows = [_row(value) for value in records["value"].to_pylist()]
    columns = list(zip(*rows, strict=True)) or [()] * len(_DECODED)
    decoded = dict(zip(_DECODED, map(pa.array, columns, _DECODED.values()), strict=True))
    in_order = pc.less_equal(decoded["sender"], decoded["recipient"])
    decoded["user_a"] = pc.if_else(in_order, decoded["sender"], decoded["recipient"])
    decoded["user_b"] = pc.if_else(in_order, decoded["recipient"], decoded["sender"])
    decoded |= {name: records[name] for name in RECORDS if name != "value"}
    return pa.RecordBatch.from_pydict({name: decoded[name] for name in _names(ENTRIES)})


_DECODED = {
    "kind": pa.string(),
    "id": pa.int64(),
    "sender": pa.string(),
    "recipient": pa.string(),
    "text": pa.string(),
    "at": pa.int64(),
    "upto": pa.int64(),
    "problem": pa.string(),
}
"""The columns that come from the value."""
_Row = tuple[str, int | None, str | None, str | None, str | None, int | None, int | None, str | None]


def _row(value: bytes | None) -> _Row:
    """The columns `_DECODED` of a record."""
    try:
        entry = decode_entry(value or b"")
        check_storable(entry)
        check_int64("at", entry.at)
    except (Malformed, InvalidValue) as error:
        return "malformed", None, None, None, None, None, None, str(error)[:PROBLEM_LENGTH]
    if entry.copy:
        return "copy", entry.id, entry.sender, entry.recipient, None, entry.at, None, None
    if isinstance(entry.content, Mark):
        mark = entry.content
        return mark.kind, entry.id, entry.sender, entry.recipient, None, entry.at, mark.upto, None
    return "message", entry.id, entry.sender, entry.recipient, entry.content, entry.at, None, None
