"""ingest: every record of the topics, once."""

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession

from shardyard.pipeline.lake.ingest import by_day
from shardyard.pipeline.source.options import absolute

spark = SparkSession.active()
LOG = absolute(spark.conf.get("shardyard.log", ""))
TOPICS = spark.conf.get("shardyard.topics", "")


@dp.table(comment="The records of all topics.")
def records() -> DataFrame:
    stream = spark.readStream.format("shardyard").options(log=LOG, topics=TOPICS, startingOffsets="earliest")
    return stream.load().transform(by_day)
