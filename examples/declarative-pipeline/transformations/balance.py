"""balance: how the load is spread over partitions, how it would be spread otherwise, and the keys with most of it."""

from pyspark import pipelines as dp
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 as everybody calls it

from shardyard.pipeline.partitioning import placement_column

SCHEMES = (("fnv1a32", "modulus"), ("xxh64", "modulus"), ("xxh64", "jump"))
HOT_KEYS = 20
LOAD = (F.count("*").alias("records"), F.sum("bytes").alias("bytes"))

spark = SparkSession.active()
PARTITIONS = [int(number) for number in spark.conf.get("shardyard.partitions", "").split(",")]


def sizes() -> DataFrame:
    size = F.octet_length("value") + F.coalesce(F.octet_length("key"), F.lit(0))
    return spark.table("records").select("topic", "partition", "key", size.alias("bytes"))


def place(hash_name: str, partitioner: str, partitions: int) -> Column:
    return F.struct(
        F.lit(hash_name).alias("hash"),
        F.lit(partitioner).alias("partitioner"),
        F.lit(partitions).alias("partitions"),
        placement_column("key", hash_name, partitioner, partitions).alias("partition"),
    )


@dp.materialized_view(comment="Records and bytes of each partition.")
def partition_loads() -> DataFrame:
    return sizes().groupBy("topic", "partition").agg(*LOAD)


@dp.materialized_view(comment="Records and bytes of each key.")
def key_loads() -> DataFrame:
    return sizes().where(F.col("key").isNotNull()).groupBy("topic", "key").agg(*LOAD)


@dp.materialized_view(comment="Records and bytes of each partition, under other hashes, partitioners and numbers.")
def placements() -> DataFrame:
    places = F.explode(F.array(*(place(*scheme, partitions) for scheme in SCHEMES for partitions in PARTITIONS)))
    rows = spark.table("key_loads").select("topic", places.alias("place"), "records", "bytes")
    groups = rows.select("topic", "place.*", "records", "bytes")
    groups = groups.groupBy("topic", "hash", "partitioner", "partitions", "partition")
    return groups.agg(F.sum("records").alias("records"), F.sum("bytes").alias("bytes"))


@dp.materialized_view(comment="The keys with the most records.")
def hot_keys() -> DataFrame:
    return spark.table("key_loads").orderBy(F.desc("records"), "topic", "key").limit(HOT_KEYS)
