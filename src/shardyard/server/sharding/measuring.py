"""Gauges of the queues that a node serves, taken when metrics are exported."""

from shardyard.model import ShardyardError
from shardyard.runtime.metrics import SHARDING_CONSUMERS, SHARDING_READY, SHARDING_UNACKNOWLEDGED
from shardyard.sharding.node import ShardingNode

MAX_MEASURED = 500
"""Queues with series of their own."""


async def measure_queues(sharding: ShardingNode | None) -> None:
    """Set the gauges of the queues that this node serves now, and drop those of others."""
    found = []
    for served in sorted(sharding.queues, key=lambda each: each.name)[:MAX_MEASURED] if sharding is not None else ():
        try:
            found.append((served.name, await served.status()))
        except ShardyardError:  # it has just moved to another node
            continue
    for metric in (SHARDING_READY, SHARDING_UNACKNOWLEDGED, SHARDING_CONSUMERS):
        metric.clear()
    for name, status in found:
        SHARDING_READY.series(name).set(status.ready)
        SHARDING_UNACKNOWLEDGED.series(name).set(status.unacked)
        SHARDING_CONSUMERS.series(name).set(status.consumers)
