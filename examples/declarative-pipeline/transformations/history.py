"""history: the messages of conversations, and how far their readers are, from the topic `inbox`."""

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812 as everybody calls it

from shardyard.pipeline.history import entries as inbox
from shardyard.wire.inbox import TOPIC

spark = SparkSession.active()


@dp.table(
    comment="The entries of the inbox. A record that is none is there as `malformed`, with what is wrong with it."
)
def entries() -> DataFrame:
    return spark.readStream.table("records").where(F.col("topic") == TOPIC).transform(inbox.entries)


@dp.materialized_view(comment="The messages of conversations, each once.")
def messages() -> DataFrame:
    same = Window.partitionBy("kind", "user_a", "user_b", "id").orderBy("epoch", "partition", "offset")
    # With withColumn() a second run read the entries before they were brought up to date.
    ranked = spark.table("entries").select("*", F.row_number().over(same).alias("rank"))
    return ranked.where(F.col("rank") == 1).transform(inbox.messages)


@dp.materialized_view(comment="Up to which message each reader has got or read those of a peer.")
def marks() -> DataFrame:
    return spark.table("entries").transform(inbox.marks).transform(inbox.highest_marks)
