"""Registers the data source `shardyard`: Spark imports every installed package whose name starts with `pyspark_`."""

from shardyard.pipeline.source.source import Shardyard as DefaultSource

__all__ = ["DefaultSource"]
