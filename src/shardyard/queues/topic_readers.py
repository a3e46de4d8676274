"""Which groups read which topics, and what they have committed, according to the registry."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shardyard.groups.broadcast import is_departed, parent_group
from shardyard.model import Partition, Topic
from shardyard.registry import OwnershipRow, Snapshot


@dataclass(frozen=True, slots=True)
class TopicReaders:
    """The groups of a registry with their subscriptions and positions, at one moment."""

    subscribers: Mapping[str, frozenset[str]]
    """By topic: the groups with members that subscribe to it."""
    ownerships: Mapping[tuple[str, Partition], OwnershipRow]
    """By group and partition."""
    departed: frozenset[str]
    """The own groups of members that have left their broadcast group."""

    def subscribed_groups(self, topics: Iterable[str]) -> list[str]:
        """The groups that subscribe to at least one of these topics, by name."""
        return sorted({group for topic in topics for group in self.subscribers.get(topic, ())})

    def reading_groups(self, topic: str, names: Iterable[str]) -> list[str]:
        """The groups that read a topic, by name: those that subscribe to it under one of `names`, and those that were
        ever assigned one of its partitions."""
        assigned = {group for group, partition in self.ownerships if partition.topic == topic}
        return sorted(assigned.union(self.subscribed_groups(names)))

    def has_read(self, group: str, topic: str) -> bool:
        """Whether the group was ever assigned a partition of the topic."""
        return any(parent_group(name) == group and partition.topic == topic for name, partition in self.ownerships)

    def committed_offset(self, group: str, partition: Partition, epoch: int) -> int:
        """The offset from which a group continues in this epoch of a partition; 0 if it has not committed there."""
        row = self.ownerships.get((group, partition))
        committed = None if row is None else row.committed
        return committed.offset if committed is not None and committed.epoch == epoch else 0


def topic_readers(tx: Snapshot) -> TopicReaders:
    """The readers of all topics, as of now."""
    subscribers: dict[str, frozenset[str]] = {}
    ownerships: dict[tuple[str, Partition], OwnershipRow] = {}
    names = [group.name for group in tx.groups()]
    for name in names:
        for topic in {topic for member in tx.members(name) for topic in member.topics}:
            subscribers[topic] = subscribers.get(topic, frozenset()) | {name}
        ownerships |= {(row.group, row.partition): row for row in tx.ownerships(name)}
    return TopicReaders(subscribers, ownerships, frozenset(name for name in names if is_departed(tx, name)))


def with_predecessors(name: str, topics: Iterable[Topic]) -> set[str]:
    """The topic and all topics that have moved to it: a group that subscribes to one of these reads it."""
    found: set[str] = set()
    more = {name}
    while more:
        found |= more
        more = {topic.name for topic in topics if topic.successor in more} - found
    return found
