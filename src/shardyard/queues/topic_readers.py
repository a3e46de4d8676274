"""Who reads which topics, and how far they got, as the registry knows it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shardyard.groups.broadcast import is_departed, parent_group
from shardyard.model import Partition, Topic
from shardyard.registry import OwnershipRow, Snapshot


@dataclass(frozen=True, slots=True)
class Known:
    """What the registry knows of those who read."""

    subscribers: Mapping[str, frozenset[str]]
    """Of a topic: the groups with members that named it."""
    rows: Mapping[tuple[str, Partition], OwnershipRow]
    departed: frozenset[str]
    """The own groups of members of broadcast groups, who are gone."""

    def subscribing(self, topics: Iterable[str]) -> list[str]:
        """The groups that subscribe to one of these, by name."""
        return sorted({group for topic in topics for group in self.subscribers.get(topic, ())})

    def reading(self, topic: str, names: Iterable[str]) -> list[str]:
        """The groups that read a topic, by name: they subscribe to it under one of these names, or have been given any
        of its partitions."""
        given = {group for group, partition in self.rows if partition.topic == topic}
        return sorted(given.union(self.subscribing(names)))

    def has_read(self, group: str, topic: str) -> bool:
        return any(parent_group(of) == group and partition.topic == topic for of, partition in self.rows)

    def offset(self, group: str, partition: Partition, epoch: int) -> int:
        """Where a group goes on in this life of a partition; 0 if it never committed there."""
        row = self.rows.get((group, partition))
        at = None if row is None else row.committed
        return at.offset if at is not None and at.epoch == epoch else 0


def known(tx: Snapshot) -> Known:
    """As things are now."""
    subscribers: dict[str, frozenset[str]] = {}
    rows: dict[tuple[str, Partition], OwnershipRow] = {}
    names = [group.name for group in tx.groups()]
    for name in names:
        for topic in {topic for member in tx.members(name) for topic in member.topics}:
            subscribers[topic] = subscribers.get(topic, frozenset()) | {name}
        rows |= {(row.group, row.partition): row for row in tx.ownerships(name)}
    return Known(subscribers, rows, frozenset(name for name in names if is_departed(tx, name)))


def leading_to(name: str, topics: Iterable[Topic]) -> set[str]:
    """The topic, and those that moved there: who named one of them shares in it."""
    found: set[str] = set()
    more = {name}
    while more:
        found |= more
        more = {topic.name for topic in topics if topic.successor in more} - found
    return found
