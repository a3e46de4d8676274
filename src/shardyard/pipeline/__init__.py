"""Spark jobs and a Spark data source that work on whole topics.

`spark.read.format("shardyard")` works in every session where Shardyard is installed: Spark imports the package
`pyspark_shardyard` on its own, and that registers the data source.
"""

from shardyard.model.extras import require

require("pipeline", "shardyard.pipeline", "pyspark")
