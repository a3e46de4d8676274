"""Copies a backlog to the slots where the routing leads now."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace

from shardyard.groups import Node
from shardyard.log.router import append_with_retry
from shardyard.model import Record, Stamp
from shardyard.model.sharding import Queue
from shardyard.sharding.ack_state import AckState
from shardyard.sharding.backlog import Unsettled
from shardyard.sharding.messages import routed_by, to_message, version_header
from shardyard.sharding.routing import router_of
from shardyard.sharding.topology import Rebalance, Topology

STORE_SECONDS = 30.0
"""How long an append is retried while the log is busy."""


class BacklogCopy:
    """The copies of messages in the fresh slots of a rebalance. Nobody else writes to these slots."""

    def __init__(self, node: Node, topology: Topology, rebalance: Rebalance) -> None:
        self._log = node.log
        self._clock = node.clock
        self._targets = {target.name: target for target in rebalance.targets}
        afterwards = replace(topology, queues={**topology.queues, **self._targets})
        self._router = router_of(afterwards, rebalance.exchange)
        self._version = version_header(topology.version)
        self._producer = f"rebalance/{topology.version}"
        self._appends: Counter[str] = Counter()
        self._failures: defaultdict[str, dict[str, int]] = defaultdict(dict)
        """By queue and id of the record, how many deliveries have failed."""
        self.counts: Counter[str] = Counter()
        """How many messages were copied to each queue."""

    async def add(self, run: Sequence[Unsettled]) -> None:
        """Copy these messages, after those of earlier calls. Id, content and time stay as they are. Their version is
        that of the rebalance, by which a node knows that the slot was given to another queue."""
        found = self._router.distribute([to_message(unsettled.record) for unsettled in run])
        for name, part in found.by_queue.items():
            self.counts[name] += len(part)
            failed = [run[index] for index in part if run[index].failures]
            self._failures[name].update((unsettled.record.id, unsettled.failures) for unsettled in failed)
        await asyncio.gather(
            *(
                self._append(name, [routed_by(run[index].record, self._version) for index in part])
                for name, part in found.by_queue.items()
            )
        )

    async def store_failures(self) -> None:
        """Store how often deliveries have failed, as the states with which the queues begin."""
        for name, failures in self._failures.items():
            if failures:
                await self._store_state(self._targets[name], failures)

    async def _append(self, name: str, records: Sequence[Record]) -> None:
        self._appends[name] += 1
        target = self._targets[name]
        await append_with_retry(
            *(self._log, target.partition, records),
            clock=self._clock,
            deadline=self._clock.monotonic() + STORE_SECONDS,
            stamp=Stamp(self._producer, self._appends[name]),
            fence=target.routing_fence,
        )

    async def _store_state(self, target: Queue, failures: dict[str, int]) -> None:
        span = await self._log.span(target.partition)
        offset = max(target.first, span.first)
        state = AckState(offset, offset)
        while offset < span.end:
            batch = await self._log.read(target.partition, offset)
            for place, record in zip(batch.offsets(), batch.records(), strict=True):
                if record.id in failures:
                    state.counts[place] = failures[record.id]
            offset = batch.end
        record = Record(f"{target.slot}-{state.floor}", None, state.encode())
        await self._log.append(target.state_partition, [record])
