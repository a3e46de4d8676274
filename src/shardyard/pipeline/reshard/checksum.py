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
    of_key = Window.partitionBy("key").orderBy("partition", "offset")
    number = F.when(F.col("key").isNull(), F.lit(0)).otherwise(F.row_number().over(of_key))
    content = F.xxhash64("id", "key", "value", "headers", "timestamp")
    return records.select(content.alias("content"), number.alias("number"))


def checksum(records: DataFrame) -> Checksum:
    """The checksum of a frame with the columns of the data source."""
    total = F.sum(F.xxhash64("content", "number").cast("decimal(38,0)"))
    row = records.transform(numbered_by_key).agg(F.count("*").alias("count"), total.alias("total")).first()
    if row is None:
        return Checksum(0, 0)
    return Checksum(int(row["count"]), int(row["total"] or 0))
