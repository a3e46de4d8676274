"""From records of the topic `inbox` to messages and marks: pure functions from frame to frame."""

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 as everybody calls it
from pyspark.sql.functions import arrow_udf  # type: ignore[attr-defined]  # its stubs are behind
from pyspark.sql.types import LongType, StringType, StructField, StructType

from shardyard.messaging.history.checks import check_storable
from shardyard.messaging.history.manifest import BUCKET_HASH, SEPARATOR
from shardyard.model import InvalidValue, Malformed
from shardyard.model.checks import check_int64
from shardyard.pipeline.partitioning import placement_column
from shardyard.wire.channels import decode_event
from shardyard.wire.inbox import Mark, decode_entry

PLACE = ("epoch", "partition", "offset")
RECORDS = (*PLACE, "value")
"""The columns of records that are read."""
ENTRIES = (
    "epoch long, partition int, offset long, kind string, user_a string, user_b string, id long, sender string, "
    "recipient string, text string, at long, upto long, problem string"
)
"""An entry of the inbox, or a record that is none. `kind`: message, delivered, seen, copy, away (the user
went offline), post (to a channel: the history has it from elsewhere) or malformed."""
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
    """The entries in records with the columns `RECORDS`, as `ENTRIES`. A record that is no entry is `malformed`.

    It needs no look at the schema of `records`, so that a declarative pipeline can define it.
    """
    entry = arrow_udf(decode, _ENTRY)("value").alias("entry")
    return records.select(*PLACE, entry).select(*PLACE, "entry.*").select(*_names(ENTRIES))


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


def decode(values: pa.Array) -> pa.Array:
    """The values of records as structs with the fields `_ENTRY`."""
    rows = [_row(value) for value in values.to_pylist()]
    columns = list(zip(*rows, strict=True)) or [()] * len(_DECODED)
    decoded = dict(zip(_DECODED, map(pa.array, columns, _DECODED.values()), strict=True))
    in_order = pc.less_equal(decoded["sender"], decoded["recipient"])
    decoded["user_a"] = pc.if_else(in_order, decoded["sender"], decoded["recipient"])
    decoded["user_b"] = pc.if_else(in_order, decoded["recipient"], decoded["sender"])
    return pa.StructArray.from_arrays(list(decoded.values()), list(decoded))


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
_ENTRY = StructType(
    [StructField(name, LongType() if kind == pa.int64() else StringType()) for name, kind in _DECODED.items()]
    + [StructField(name, StringType()) for name in ("user_a", "user_b")]
)
_Row = tuple[str, int | None, str | None, str | None, str | None, int | None, int | None, str | None]


def _row(value: bytes | None) -> _Row:
    """The columns `_DECODED` of a record."""
    try:
        entry = decode_entry(value or b"")
        check_storable(entry)
        check_int64("at", entry.at)
    except (Malformed, InvalidValue) as error:
        if _is_post(value or b""):
            return "post", None, None, None, None, None, None, None
        return "malformed", None, None, None, None, None, None, str(error)[:PROBLEM_LENGTH]
    if entry.away:
        return "away", entry.id, None, None, None, entry.at, None, None
    if entry.copy:
        return "copy", entry.id, entry.sender, entry.recipient, None, entry.at, None, None
    if isinstance(entry.content, Mark):
        mark = entry.content
        return mark.kind, entry.id, entry.sender, entry.recipient, None, entry.at, mark.upto, None
    return "message", entry.id, entry.sender, entry.recipient, entry.content, entry.at, None, None


def _is_post(value: bytes) -> bool:
    try:
        decode_event(value)
    except Malformed:
        return False
    return True
