"""The part of the system that looks at all of the data, on Spark.

`spark.read.format("shardyard")` works in any session of an environment that has Shardyard installed: Spark finds the
data source by itself (it looks for packages named `pyspark_*`, and `pyspark_shardyard` is ours).
"""
