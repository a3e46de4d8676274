"""Checksums that tell whether two frames hold the same records, with those of each key in the same order."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812 as everybody calls it


@dataclass(frozen=True, slots=True)
class Checksum:
    """The number of records, and a sum over the hashes of each record's content and its rank within its key."""

    count: int
    total: int
    by_partition: Mapping[int, int] = field(default_factory=dict, compare=False, repr=False)
    """The number of records in each partition that has any. It does not count for equality."""


def ranked_by_key(records: DataFrame) -> DataFrame:
    """A hash of each record's content, and its rank among the records of its key, by partition and offset.

    A record without a key has no order, so its rank is 0.
    """
    keyless = F.col("key").isNull()
    spread = F.when(keyless, F.col("offset"))  # otherwise one task would sort all records without a key
    of_key = Window.partitionBy("key", spread).orderBy("partition", "offset")
    rank = F.when(keyless, F.lit(0)).otherwise(F.row_number().over(of_key))
    return records.transform(content_hashes).select("content", "partition", rank.alias("rank"))


def content_hashes(records: DataFrame) -> DataFrame:
    """The hash of each record's content, with its key, partition and offset: all that a checksum needs."""
    content = F.xxhash64("id", "key", "value", "headers", "timestamp")
    return records.select(content.alias("content"), "key", "partition", "offset")


def checksum(records: DataFrame, *, ordered: bool = True) -> Checksum:
    """The checksum of a frame with the columns of the data source. If not `ordered`, the order in a key is ignored."""
    rows = records.transform(ranked_by_key if ordered else content_hashes)
    total = F.sum((F.xxhash64("content", "rank") if ordered else F.col("content")).cast("decimal(38,0)"))
    sums = rows.groupBy("partition").agg(F.count("*").alias("count"), total.alias("total")).collect()
    by_partition = {row["partition"]: row["count"] for row in sums}
    return Checksum(sum(by_partition.values()), sum(int(row["total"]) for row in sums), by_partition)
