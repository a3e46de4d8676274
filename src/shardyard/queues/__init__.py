"""Queues: topics with producers and consumer groups, behind a broker that keeps no state of its own."""

from shardyard.queues.broker.app import running, serving

__all__ = ["running", "serving"]
