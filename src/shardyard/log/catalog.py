"""What the calls of the catalog do, for engines that keep topics in the tables of a database."""

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import NamedTuple

from shardyard.log import rules
from shardyard.model import Damaged, InvalidValue, Retention, Topic, TopicExists, TopicKind, UnknownTopic

TOPIC_COLUMNS = (
    "name, partitions, kind, age_ms, bytes_per_partition, epoch, partitioner, hash, sealed, successor,"
    " open_partitions, generation, sealed_by, sealed_since, sealed_until"
)
"""As the table of topics has them, and `TopicRow`."""


class TopicRow(NamedTuple):
    """A row of the table of topics."""

    name: str
    partitions: int
    kind: str
    age_ms: int | None
    bytes_per_partition: int | None
    epoch: int
    partitioner: str
    hash: str | None
    sealed: bool
    """Also when the seal has ended, until an append or a change of the topic finds that out."""
    successor: str | None
    open_partitions: int | None
    generation: int
    sealed_by: str | None
    sealed_since: int
    sealed_until: int

    @property
    def seal(self) -> rules.Seal | None:
        """Also one that has ended."""
        if self.sealed_by is None:
            return None
        return rules.Seal(self.sealed_by, self.sealed_since, self.sealed_until)

    def topic(self, now: int) -> Topic:
        """`now`: in milliseconds, decides whether the seal holds."""
        try:
            return Topic(
                self.name,
                self.partitions,
                TopicKind(self.kind),
                Retention(self.age_ms, self.bytes_per_partition),
                self.epoch,
                *rules.check_placement(self.partitioner, self.partitions, self.hash),
                bool(
                    self.sealed
                    and (self.successor is not None or rules.is_in_force(self.sealed_since, self.sealed_until, now))
                ),
                self.successor,
                self.open_partitions,
                self.generation,
            )
        except ValueError as error:
            raise Damaged("the list of topics", str(error)) from error


def row_of(topic: Topic, seal: rules.Seal | None) -> TopicRow:
    return TopicRow(
        topic.name,
        topic.partitions,
        topic.kind,
        topic.retention.age_ms,
        topic.retention.bytes_per_partition,
        topic.epoch,
        topic.partitioner,
        topic.hash,
        topic.sealed,
        topic.successor,
        topic.open_partitions,
        topic.generation,
        *((seal.holder, seal.since, seal.until) if seal is not None else (None, 0, 0)),
    )


class StoredCatalog(ABC):
    """The catalog within one transaction. An engine supplies the statements.

    Nobody else changes the catalog before the transaction ends, nor appends to a topic that `lock` was called for.
    """

    def __init__(self, now: int) -> None:
        """`now`: in milliseconds."""
        self.now = now

    # The statements

    @abstractmethod
    def rows(self, name: str | None = None) -> list[TopicRow]:
        """All topics by their names, or the one of that name."""

    @abstractmethod
    def lock(self, name: str) -> None:
        """Let appends to the topic wait until the transaction ends."""

    @abstractmethod
    def insert(self, row: TopicRow) -> None: ...

    @abstractmethod
    def update(self, row: TopicRow) -> None: ...

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a topic. The batches of its partitions are deleted later, in small steps."""

    @abstractmethod
    def add_partitions(self, name: str, start: int, stop: int) -> None:
        """Add partitions of these numbers. One that was dropped still has its row, and continues from there."""

    @abstractmethod
    def empty_partitions(self, name: str, start: int) -> None:
        """Trim the partitions from this number on to their ends. Their batches are deleted later, in small steps."""

    @abstractmethod
    def last_number(self) -> int:
        """The last number that was given out."""

    @abstractmethod
    def set_last_number(self, number: int) -> None: ...

    # The calls

    def topics(self) -> list[Topic]:
        return [row.topic(self.now) for row in self.rows()]

    def topic(self, name: object) -> Topic:
        return self._row(name).topic(self.now)

    def create_topic(self, wanted: Topic) -> Topic:
        if there := self.rows(wanted.name):
            raise TopicExists(wanted.name, there[0].partitions)
        number = self._next_number()
        row = row_of(replace(wanted, epoch=number, generation=number), None)
        self.insert(row)
        self.add_partitions(row.name, 0, row.partitions)
        return row.topic(self.now)

    def expand_topic(self, name: str, partitions: int) -> Topic:
        before, _ = self._to_change(name)
        after = rules.expanded(before, partitions)
        self.add_partitions(name, before.partitions, after.partitions)
        return self._change(before, after)

    def contract_topic(self, name: str, partitions: int) -> Topic:
        before, _ = self._to_change(name)
        return self._change(before, rules.contracted(before, partitions))

    def drop_partitions(self, name: str, partitions: int) -> Topic:
        before, _ = self._to_change(name)
        after = rules.without_draining(before, partitions)
        self.empty_partitions(name, after.partitions)
        return self._change(before, after)

    def set_retention(self, name: str, retention: Retention) -> Topic:
        row = self._row_to_change(name)
        self._next_number()
        changed = row._replace(age_ms=retention.age_ms, bytes_per_partition=retention.bytes_per_partition)
        self.update(changed)
        return changed.topic(self.now)

    def seal_topic(self, name: str, holder: str, duration: int) -> Topic:
        """`duration`: milliseconds."""
        before, seal = self._to_change(name)
        rules.check_sealable(before, seal, holder, self.now)
        renewed = rules.Seal(holder, self.now, self.now + duration)
        return self._change(before, replace(before, sealed=True), renewed)

    def unseal_topic(self, name: str, holder: str) -> Topic:
        before, seal = self._to_change(name)
        rules.check_open(name, sealed=False, successor=before.successor)
        if seal is None or seal.holder != holder:
            return before
        return self._change(before, replace(before, sealed=False))

    def move_topic(self, name: str, successor: str, holder: str, generation: int) -> Topic:
        before, seal = self._to_change(name)
        if before.successor == successor:
            return before
        rules.check_open(name, sealed=False, successor=before.successor)
        rules.check_move(before, self.topic(successor), seal, holder, generation, self.now)
        return self._change(before, replace(before, sealed=True, successor=successor))

    def delete_topic(self, name: str) -> None:
        self._to_change(name)
        self.remove(name)
        self._next_number()

    def _row(self, name: object) -> TopicRow:
        if not isinstance(name, str):
            raise InvalidValue("topic", name, "a string")
        if not (found := self.rows(name)):
            raise UnknownTopic(name)
        return found[0]

    def _row_to_change(self, name: object) -> TopicRow:
        if isinstance(name, str):
            self.lock(name)
        return self._row(name)

    def _to_change(self, name: object) -> tuple[Topic, rules.Seal | None]:
        row = self._row_to_change(name)
        return row.topic(self.now), row.seal

    def _change(self, before: Topic, after: Topic, seal: rules.Seal | None = None) -> Topic:
        """Store what a change made of a topic. A seal that has ended is gone with it."""
        if rules.raises_generation(before, after):
            after = replace(after, generation=self._next_number())
        elif seal is None:
            return before
        self.update(row_of(after, seal))
        return after

    def _next_number(self) -> int:
        """For epochs, generations and versions of the catalog: the time, or one more than the last one. It is higher
        than any before, even than those of a log that was lost."""
        number = max(self.last_number() + 1, self.now)
        self.set_last_number(number)
        return number
