"""Whether two frames have the same records, with the records of each key in the same order."""

from dataclasses import dataclass

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812 as everybody calls it


@dataclass(frozen=True, slots=True)
class Checksum:
    """How many records there are, and a sum over each one's content and its number among those of its key."""

    count: int
    total: int


def numbered_by_key(records: DataFrame) -> DataFrame:
    """A hash of each record's content, with its number among the records of its key, by partition and offset.

    A record without a key has no order: its number is 0.
    """
    keyless = F.col("key").isNull()
    apart = F.when(keyless, F.col("offset"))  # else all records without a key would be sorted in one task
    of_key = Window.partitionBy("key", apart).orderBy("partition", "offset")
    number = F.when(keyless, F.lit(0)).otherwise(F.row_number().over(of_key))
    return records.transform(contents).select("content", number.alias("number"))


def contents(records: DataFrame) -> DataFrame:
    """What is needed of each record, which is little: a hash of its content, its key and where it is."""
    content = F.xxhash64("id", "key", "value", "headers", "timestamp")
    return records.select(content.alias("content"), "key", "partition", "offset")


def checksum(records: DataFrame, *, ordered: bool = True) -> Checksum:
    """The checksum of a frame with the columns of the data source; if not `ordered`, of the contents alone."""
    rows = records.transform(numbered_by_key if ordered else contents)
    total = F.sum((F.xxhash64("content", "number") if ordered else F.col("content")).cast("decimal(38,0)"))
    row = rows.agg(F.count("*").alias("count"), total.alias("total")).first()
    if row is None:
        return Checksum(0, 0)
    return Checksum(int(row["count"]), int(row["total"] or 0))
