"""The bodies and queries of requests."""

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Amount = Annotated[int, Meta(ge=1, le=2**62)]
"""Of bytes or milliseconds."""
Whole = Annotated[int, Meta(ge=0, le=2**62)]
CommitPosition = tuple[Whole, Whole, Whole]
"""The epoch of the ownership, the epoch of the partition, and the offset to continue from."""


class NewTopic(Struct, forbid_unknown_fields=True):
    """A topic to create."""

    name: str
    partitions: int
    partitioner: str = "modulus"
    hash: str | None = None
    retention_ms: int | None = None
    retention_bytes: int | None = None
    """Per partition."""


class TopicChanges(Struct, forbid_unknown_fields=True):
    """Changes of a topic's settings. Settings that are not named stay as they are; null removes one."""

    token: str | UnsetType | None = UNSET
    """The token that publishers must send."""
    records_per_second: Count | UnsetType | None = UNSET
    """The quota of all publishers together, per broker."""
    retention_ms: Amount | UnsetType | None = UNSET
    retention_bytes: Amount | UnsetType | None = UNSET
    """Per partition."""


class Resize(Struct, forbid_unknown_fields=True):
    """The number of partitions that a topic is to have."""

    partitions: int


class Publish(Struct, omit_defaults=True):
    """The options of a publish: over HTTP the query, beside a body with the records."""

    partition: Whole | None = None
    """Store all of them on this partition, instead of by key."""
    producer: str | None = None
    """With `sequence`: makes a retry of the same batch harmless."""
    sequence: Whole | None = None
    round_robin_start: Whole | None = None
    """With `producer`: the partition, counted round-robin, where the distribution of records without a key starts."""
    together: Whole = 0
    """1 stores all records without a key on that partition."""
    fence: str | None = None
    """With `owner`: refuse the records if this ownership has ended."""
    owner: Whole | None = None
    """The epoch of the ownership."""


class Join(Struct, forbid_unknown_fields=True):
    """A request to join a group."""

    topics: Annotated[list[str], Meta(min_length=1)]
    name: str | None = None
    """By default a new one is generated."""
    weight: Count = 1
    static: bool = False
    partitions: list[str] | None = None
    """Own exactly these partitions, instead of a share of all."""
    session_timeout: float = 10.0
    address: str | None = None
    """Where other processes can reach the member."""
    metadata: Any = None
    prepare_seconds: Annotated[float, Meta(gt=0)] | None = None
    """How long the owner of a partition keeps it while this member prepares to take it over; by default not at all."""
    since: int | None = None
    """The epoch of this process's previous membership under the same name."""
    instance: Annotated[str, Meta(min_length=1, max_length=64)] | None = None
    """A random name of this process, the same in all its joins: with it, a join whose response was lost may be
    repeated."""


class Ready(Struct, forbid_unknown_fields=True):
    """The incoming partitions that a member has prepared."""

    epoch: int
    partitions: list[str]


class Heartbeat(Struct, forbid_unknown_fields=True):
    """A heartbeat. `progress`: the partitions that made progress since the last one, or have nothing to do."""

    epoch: int
    progress: list[str] = []


class Commit(Struct, forbid_unknown_fields=True):
    """The positions that a member has reached, by partition."""

    epoch: int
    positions: dict[str, CommitPosition]


class Release(Struct, forbid_unknown_fields=True):
    """The partitions that a member releases, with the epochs of their ownerships."""

    epoch: int
    partitions: dict[str, int]


class Failed(Struct, forbid_unknown_fields=True):
    """A record whose handler failed."""

    partition: str
    epoch: Whole
    """Of the ownership."""
    offset: Whole
    reason: str
    traceback: str = ""
    """Of the handler's error; the end of it is kept with the dead letter."""


class Failures(Struct, forbid_unknown_fields=True):
    """Records whose handlers failed."""

    failures: list[Failed]


class Fence(Struct, forbid_unknown_fields=True):
    """The epoch of an owner: owners with a lower one can no longer read."""

    epoch: Whole


class Changes(Struct):
    """The query of a long poll for changes in a group. `seen`: the version that the caller knows."""

    seen: str = ""
    member: str | None = None
    """Wait for changes of what this member owns and will own; by default for all changes of the group."""
    wait_seconds: Annotated[float, Meta(ge=0)] = 0.0


class Read(Struct, omit_defaults=True):
    """The query of a read by a partition's owner."""

    offset: int
    owner: int
    """The epoch of the ownership."""
    epoch: int | None = None
    """Of the partition."""
    wait_seconds: Annotated[float, Meta(ge=0)] = 0.0
    max_records: Count = 500
    max_bytes: Count = 4 * 1024 * 1024


class Pause(Struct):
    """The changes of a group's settings that pause or resume it; see `GroupSettings`. What is not named stays as it
    is."""

    paused: bool | UnsetType = UNSET
    paused_partitions: list[str] | UnsetType = UNSET


class Reset(Struct, forbid_unknown_fields=True):
    """Where a group is to continue reading."""

    topic: str
    to: Literal["earliest", "latest", "offset", "time"]
    value: int | None = None
    """The offset, or milliseconds since 1970."""
    partitions: list[int] | None = None
    """By default all of them."""


class Redrive(Struct, forbid_unknown_fields=True):
    """Which dead letters to redrive: those with these ids, or all."""

    topic: str
    ids: list[str] | None = None
