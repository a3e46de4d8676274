"""Loads, the input of `balance`: made from a topic or from any other table."""

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 as everybody calls it
from pyspark.sql.types import (
    BinaryType,
    DataType,
    DateType,
    IntegerType,
    IntegralType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from shardyard.model import InvalidValue

LOADS = StructType(
    [
        StructField("topic", StringType()),
        StructField("partition", IntegerType()),
        StructField("key", BinaryType()),
        StructField("bytes", LongType()),
        StructField("timestamp", TimestampType()),
    ]
)
"""One row for each record. Partition, bytes and timestamp are null if unknown; the key is null if there is none."""

TABLE = "table"
"""The topic name for a table without a column of topics."""


def loads_of_topic(df: DataFrame) -> DataFrame:
    """The loads of records that the data source read. The bytes of a record are those of its key, value and headers."""
    for name in ("topic", "partition", "key", "value"):
        _type_of(df, "column", name)
    size = _octets("key") + _octets("value")
    if "headers" in df.columns:
        each = F.aggregate(
            "headers",
            F.lit(0).cast("long"),
            lambda so_far, header: so_far + _octets(header["name"]) + _octets(header["value"]),
        )
        size += F.coalesce(each, F.lit(0))
    at = F.col("timestamp") if "timestamp" in df.columns else F.lit(None)
    return _loads(df, F.col("topic"), F.col("partition"), F.col("key"), size, at)


def loads_of_table(
    df: DataFrame,
    *,
    key: str,
    bytes: str | None = None,  # noqa: A002 the word of the product
    timestamp: str | None = None,
    partition: str | None = None,
    topic: str | None = None,
) -> DataFrame:
    """The loads of a table with one row per record; the arguments name its columns.

    The key is binary, a string (hashed as UTF-8) or an integer (hashed as 8 little-endian bytes, as `placement` does).
    `bytes` is a column of integers, or a string or binary column whose length is the size; without it, only records are
    counted.
    """
    return _loads(
        df,
        F.lit(TABLE) if topic is None else _topic(df, topic),
        F.lit(None) if partition is None else _number(df, "partition", partition),
        _key(df, key),
        F.lit(None) if bytes is None else _size(df, bytes),
        F.lit(None) if timestamp is None else _time(df, timestamp),
    )


def _loads(df: DataFrame, topic: Column, partition: Column, key: Column, size: Column, at: Column) -> DataFrame:
    columns = {
        "topic": F.coalesce(topic, F.lit("")),
        "partition": partition,
        "key": key,
        "bytes": size,
        "timestamp": at,
    }
    return df.select(*(columns[field.name].cast(field.dataType).alias(field.name) for field in LOADS))


def _column(name: str) -> Column:
    return F.col("`" + name.replace("`", "``") + "`")


def _type_of(df: DataFrame, role: str, name: str) -> DataType:
    for field in df.schema:
        if field.name == name:
            return field.dataType
    raise InvalidValue(role, name, "one of the columns " + ", ".join(df.columns))


def _wrong_type(role: str, name: str, kind: DataType, expected: str) -> InvalidValue:
    return InvalidValue(f"type of {role} column {name!r}", kind.simpleString(), expected)


def _octets(of: Column | str) -> Column:
    return F.coalesce(F.octet_length(of), F.lit(0)).cast("long")


def _key(df: DataFrame, name: str) -> Column:
    match _type_of(df, "key", name):
        case BinaryType() | StringType():
            return _column(name)
        case IntegralType():
            return _little_endian(_column(name))
        case other:
            raise _wrong_type("key", name, other, "binary, string or an integer of at most 8 bytes")


def _little_endian(number: Column) -> Column:
    """The 8 bytes of an integer. Uses Spark's own functions: a Python function would see every key in each pass."""
    digits = F.lpad(F.hex(number.cast("long")), 16, "0")
    return F.unhex(F.concat(*(F.substring(digits, at, 2) for at in range(15, 0, -2))))


def _topic(df: DataFrame, name: str) -> Column:
    _type_of(df, "topic", name)
    return _column(name)


def _number(df: DataFrame, role: str, name: str) -> Column:
    kind = _type_of(df, role, name)
    if not isinstance(kind, IntegralType):
        raise _wrong_type(role, name, kind, "an integer")
    return _column(name)


def _size(df: DataFrame, name: str) -> Column:
    kind = _type_of(df, "bytes", name)
    if isinstance(kind, BinaryType | StringType):
        return _octets(_column(name))
    if not isinstance(kind, IntegralType):
        raise _wrong_type("bytes", name, kind, "an integer, or string or binary, whose length is the size")
    return _column(name)


def _time(df: DataFrame, name: str) -> Column:
    kind = _type_of(df, "timestamp", name)
    if not isinstance(kind, TimestampType | TimestampNTZType | DateType):
        raise _wrong_type("timestamp", name, kind, "timestamp or date")
    return _column(name)
