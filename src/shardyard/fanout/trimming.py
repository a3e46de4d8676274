"""Dropping what was processed from `fanout`, and nothing else."""

from shardyard.fanout.config import WORKERS_GROUP
from shardyard.fanout.migration import committed_positions
from shardyard.groups import Node
from shardyard.model import Partition
from shardyard.wire.channels import FANOUT

TRIM_SECONDS = 60.0
"""How often coordinators do it."""


async def trim_processed(node: Node, keep_seconds: float) -> None:
    """Drop the records of `fanout` that the workers have committed and that are older than `keep_seconds`. The topic's
    own retention would drop what waits for workers, too, if they are down for long."""
    committed = await node.transactions.read(lambda tx: committed_positions(tx, WORKERS_GROUP, FANOUT))
    since = max(int((node.clock.now() - keep_seconds) * 1000), 0)
    for index, span in (await node.log.ends(FANOUT)).items():
        position, partition = committed.get(index), Partition(FANOUT, index)
        if position is None or position.epoch != span.epoch or position.offset <= span.first:
            continue
        before = min(position.offset, await node.log.offset_at(partition, since))
        if before > span.first:
            await node.log.trim(partition, before)
