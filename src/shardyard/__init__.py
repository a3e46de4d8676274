"""Shardyard: partitioned messaging, from key to partition to owner."""

__version__ = "0.1.0"
