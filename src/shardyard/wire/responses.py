"""The bodies of responses. Servers encode them and clients decode them.

A client ignores fields that it does not know, so that a newer broker can add some.
"""

from typing import Any, Self

from msgspec import Struct, structs

from shardyard.model import Appended, Partition, Position, Retention, Span, Topic, TopicKind
from shardyard.wire.records import JsonRecord
from shardyard.wire.settings import GroupSettings

# Topics


class TopicInfo(Struct):
    """A topic."""

    name: str
    partitions: int
    receiving: int
    """The partitions that take records. Those from this index on are draining."""
    kind: str
    partitioner: str
    hash: str | None
    retention_ms: int | None
    retention_bytes: int | None
    """Per partition."""
    epoch: int
    sealed: bool
    successor: str | None
    generation: int
    """It rises with every change of where records of the topic go."""

    @classmethod
    def of(cls, topic: Topic, **more: Any) -> Self:
        """`more`: the fields that a subclass adds."""
        return cls(
            name=topic.name,
            partitions=topic.partitions,
            receiving=topic.receiving,
            kind=str(topic.kind),
            partitioner=topic.partitioner,
            hash=topic.hash,
            retention_ms=topic.retention.age_ms,
            retention_bytes=topic.retention.bytes_per_partition,
            epoch=topic.epoch,
            sealed=topic.sealed,
            successor=topic.successor,
            generation=topic.generation,
            **more,
        )

    def topic(self) -> Topic:
        return Topic(
            self.name,
            self.partitions,
            TopicKind(self.kind),
            Retention(self.retention_ms, self.retention_bytes),
            epoch=self.epoch,
            partitioner=self.partitioner,
            hash=self.hash,
            sealed=self.sealed,
            successor=self.successor,
            generation=self.generation,
            open_partitions=self.receiving if self.receiving < self.partitions else None,
        )


class DrainingPartition(Struct):
    """A partition that takes no more records and is dropped once all groups have read it."""

    partition: int
    records: int
    """Those that are stored on it."""
    waiting_for: dict[str, int]
    """The groups that have not read all of it, and how many records each has left."""
    drained: bool
    """Whether it can be dropped. If not, and no group is waited for, then no group has ever read it."""


class ResizedTopic(TopicInfo):
    """A topic after its number of partitions was changed."""

    draining: list[DrainingPartition]


class OffsetRange(Struct):
    """The offsets of the records on a partition, from `first` up to but not including `end`."""

    first: int
    end: int


class TopicDescription(ResizedTopic):
    """A topic with its settings and what its partitions hold."""

    token: bool
    """Whether publishers must send a token."""
    records_per_second: int | None
    spans: list[OffsetRange]


class PartitionSpan(Struct):
    """The offsets of the records on a partition, and the epoch of the topic they belong to."""

    epoch: int
    first: int
    end: int

    @classmethod
    def of(cls, span: Span) -> Self:
        return cls(span.epoch, span.first, span.end)

    def span(self) -> Span:
        return Span(self.epoch, self.first, self.end)


class KeptTopic(Struct):
    """A companion topic that was not deleted, and why."""

    topic: str
    records: int
    """Those that would have been lost."""
    because: str


class TopicDeleted(Struct):
    """What was deleted with a topic, and what was kept."""

    topic: str
    also_deleted: list[str]
    kept: list[KeptTopic]


# Records


class Stored(Struct):
    """Where records of a publish were stored: `count` of them on one partition, from `offset` on."""

    topic: str
    partition: int
    epoch: int
    offset: int
    count: int
    duplicate: bool
    """They had been stored before, by an earlier attempt."""

    @classmethod
    def of(cls, part: Appended) -> Self:
        where, first = part.partition, part.first
        return cls(where.topic, where.index, first.epoch, first.offset, part.count, part.duplicate)

    def appended(self) -> Appended:
        where = Partition(self.topic, self.partition)
        return Appended(where, Position(self.epoch, self.offset), self.count, self.duplicate)


class Published(Struct):
    """The result of a publish."""

    stored: list[Stored]
    delayed: int
    """Records that wait until they are due, and have no partition yet."""


# Members


class ReportedSettings(GroupSettings, frozen=True, forbid_unknown_fields=False):
    """The settings of a group in a response. Unlike in a request, unknown ones are ignored."""

    @classmethod
    def of(cls, settings: GroupSettings) -> Self:
        return cls(**structs.asdict(settings))

    @classmethod
    def for_members(cls, settings: GroupSettings) -> Self:
        """Without the webhook, whose address may contain a secret."""
        return cls(**{**structs.asdict(settings), "webhook": None})


class GrantedPartition(Struct):
    """The ownership of a partition."""

    epoch: int
    committed: tuple[int, int] | None
    """The epoch of the partition and the offset to continue from; None if the group never committed there."""
    revoked: bool
    """The member is to finish and release it."""


class Assignment(Struct):
    """The partitions of a member, by name."""

    partitions: dict[str, GrantedPartition]
    """Those that it owns."""
    incoming: list[str]
    """Those that it will own, and is to prepare."""


class HeartbeatResponse(Assignment):
    """What a member owns, and the settings of its group."""

    settings: ReportedSettings


class VersionedSettings(Struct):
    """The settings of a group, and their version, which the heartbeats of a member carry on a connection."""

    version: str
    settings: ReportedSettings


class Joined(Struct):
    """The identity of a new member, which all its further requests carry, and the settings of its group."""

    group: str
    """For a member of a broadcast group, a group of its own."""
    member: str
    epoch: int
    settings: ReportedSettings


class GroupVersion(Struct):
    """Changes whenever the members or the assignment of a group change."""

    version: str


class FailedRecord(Struct):
    """A record whose handler failed."""

    partition: Partition
    epoch: int
    """Of the ownership."""
    offset: int
    reason: str


class FailureOutcome(Struct):
    """What became of a record whose handler failed."""

    failure: FailedRecord
    fate: str
    """`retry`, `dead`, or `gone` if retention deleted it first."""
    attempts: int
    due: int | None
    """When it is retried, in ms since 1970."""


class FailureOutcomes(Struct):
    """One for each failure, in the order of the request."""

    outcomes: list[FailureOutcome]


# Groups


class GroupSummary(Struct):
    """A group in a list."""

    group: str
    members: int
    lag: int


class PartitionInfo(Struct):
    """A partition as a group sees it."""

    group: str
    topic: str
    partition: int
    owner: str | None
    next_owner: str | None
    epoch: int
    committed: int | None
    end: int
    lag: int
    stuck_for: float
    """Seconds without progress, although there are records; 0 if there are none."""
    dropped_unread: int
    """Records that retention dropped before the group had read them; at most that many, where offsets have gaps."""


class MemberInfo(Struct):
    """A member of a group."""

    group: str
    member: str
    topics: list[str]
    weight: int
    static: bool
    session_timeout: float
    standby: bool
    """It owns no partition."""


class GroupDescription(Struct):
    """A group with its partitions, members and settings."""

    group: str
    joined: bool
    """Whether it ever had a member; settings can be made before."""
    partitions: list[PartitionInfo]
    members: list[MemberInfo]
    settings: ReportedSettings


class GroupDeleted(Struct):
    """What was deleted with a group, and what was kept."""

    group: str
    also_deleted: list[str]
    kept: list[KeptTopic]


ResetOffsets = dict[str, int]
"""The offset from which a group continues, by partition."""


class DeadLetterInfo(Struct):
    """A dead letter."""

    id: str
    """Of the record."""
    record: JsonRecord
    reason: str
    """The last error of its handler."""
    traceback: str
    """The end of its traceback; empty if it is not known."""
    attempts: int
    origin: str | None
    """Where it was published, such as `orders/3/17`."""
    published: int | None
    """Milliseconds since 1970."""
    died_at: int
    """The same."""


class Redriven(Struct):
    """How many dead letters were redriven."""

    redriven: int


class AuditEntry(Struct):
    """An administrative change."""

    number: int
    at: float
    """Seconds since 1970."""
    who: str
    action: str
    subject: str
    detail: Any


# Health


class Liveness(Struct):
    """The process responds."""

    alive: bool = True


class Readiness(Struct):
    """The broker takes requests: log and registry respond too."""

    ready: bool
    leads: bool
    """Whether this broker runs the rebalancer."""
