"""Slots: each queue has one partition of the topic for messages, and the one of the same number for its state."""

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import replace

from shardyard.log import Log
from shardyard.model import InvalidValue, ShardyardError, TopicExists
from shardyard.model.sharding import SHARDS_TOPIC, STATES_TOPIC, Queue
from shardyard.sharding.topology import Topology


class SlotsNeeded(ShardyardError):
    """Raised in a transaction that needs more slots than the topics have: expand them, and run it again."""

    def __init__(self, count: int) -> None:
        super().__init__(f"{count} slots are needed")
        self.count = count


class Slots:
    """The two topics. They grow as queues need slots; slots of removed queues are used again, so they do not shrink."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self.count = 0
        """At least so many slots exist."""

    async def provide(self, count: int) -> None:
        """Make sure that there are at least so many slots. The topics are created if they do not exist."""
        if count > self.count:
            await self._provide(STATES_TOPIC, count)  # first: where there is a slot, there is a place for its state
            self.count = await self._provide(SHARDS_TOPIC, count)

    async def _provide(self, name: str, count: int) -> int:
        with contextlib.suppress(TopicExists):
            await self._log.create_topic(name, count)
        topic = await self._log.topic(name)
        if topic.receiving < count:
            with contextlib.suppress(InvalidValue):  # another process has expanded it further
                await self._log.expand_topic(name, count)
            topic = await self._log.topic(name)
        return topic.receiving


def slots_used(topology: Topology) -> int:
    """How many slots there have to be for this topology."""
    used = [queue.slot for queue in topology.queues.values()]
    used += [target.slot for rebalance in topology.rebalances.values() for target in rebalance.targets]
    return 1 + max((*used, *topology.free_slots), default=-1)


def with_queues(topology: Topology, queues: Iterable[Queue]) -> Topology:
    """The topology with more queues, each in the lowest slot that is free."""
    placed, left = in_free_slots(topology, queues)
    added = {queue.name: queue for queue in placed}
    return replace(topology, queues={**topology.queues, **added}, free_slots=left) if added else topology


def in_free_slots(topology: Topology, queues: Iterable[Queue]) -> tuple[list[Queue], dict[int, int]]:
    """These queues, each in the lowest slot that is free; and the slots that are free then."""
    free, unused = sorted(topology.free_slots, reverse=True), slots_used(topology)
    placed, left = [], dict(topology.free_slots)
    for queue in queues:
        slot, unused = (free.pop(), unused) if free else (unused, unused + 1)
        placed.append(replace(queue, slot=slot, first=left.pop(slot, 0), incarnation=topology.version))
    return placed, left


def without_queues(topology: Topology, ends: Mapping[str, int]) -> Topology:
    """The topology without these queues. `ends`: for each the offset before which its messages were."""
    freed = {topology.queues[name].slot: end for name, end in ends.items()}
    return replace(
        topology,
        queues={name: queue for name, queue in topology.queues.items() if name not in ends},
        declared_bindings=frozenset(b for b in topology.declared_bindings if b.queue not in ends),
        free_slots={**topology.free_slots, **freed},
    )
