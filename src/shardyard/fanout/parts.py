"""The coordinator or worker that carries out a plan."""

from pathlib import Path

from shardyard.fanout.config import FanoutConfig
from shardyard.fanout.coordinator import Coordinator
from shardyard.fanout.modes import Plan
from shardyard.fanout.worker import Worker
from shardyard.groups import Node
from shardyard.wire.channels import EVENTS, FANOUT


def make_part(
    plan: Plan, node: Node, *, config: FanoutConfig, address: str | None = None, snapshot: Path | None = None
) -> Coordinator | Worker:
    """A member that has not joined yet, under the name of its process. `snapshot`: as for `Worker`."""
    part: Coordinator | Worker
    if plan.kind == "coordinator":
        part = Coordinator(node, config=config, name=node.name, address=address)
    else:
        source = FANOUT if plan.kind == "worker" else EVENTS
        part = Worker(node, source=source, snapshot=snapshot, config=config, name=node.name, address=address)
    part.rejoins = False  # the mode may have changed since it was evicted: the process looks first
    return part
