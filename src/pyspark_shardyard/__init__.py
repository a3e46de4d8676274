"""Where Spark finds the data source `shardyard` by itself: it imports every package named `pyspark_*`."""

from shardyard.pipeline.source.source import Shardyard as DefaultSource

__all__ = ["DefaultSource"]
