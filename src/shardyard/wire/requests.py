"""What callers ask for, as JSON."""

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Amount = Annotated[int, Meta(ge=1, le=2**62)]
"""Of bytes or milliseconds."""
Whole = Annotated[int, Meta(ge=0, le=2**62)]
Position = tuple[Whole, Whole, Whole]
"""The epoch of the ownership, the epoch of the partition, the offset to go on from."""


class NewTopic(Struct, forbid_unknown_fields=True):
    """A topic to make."""

    name: str
    partitions: int
    partitioner: str = "modulus"
    hash: str | None = None
    retention_ms: int | None = None
    retention_bytes: int | None = None
    """Per partition."""


class TopicChanges(Struct, forbid_unknown_fields=True):
    """What is to be set about a topic; what is not named stays, and null takes it away."""

    token: str | UnsetType | None = UNSET
    """That publishers must show."""
    records_per_second: Count | UnsetType | None = UNSET
    """What publishers together may send through each broker."""
    retention_ms: Amount | UnsetType | None = UNSET
    retention_bytes: Amount | UnsetType | None = UNSET
    """Per partition."""


class Resize(Struct, forbid_unknown_fields=True):
    """How many partitions a topic is to have."""

    partitions: int


class Join(Struct, forbid_unknown_fields=True):
    """A member to be."""

    topics: Annotated[list[str], Meta(min_length=1)]
    name: str | None = None
    """One is given if there is none."""
    weight: Count = 1
    static: bool = False
    partitions: list[str] | None = None
    """Own these and no others."""
    session_timeout: float = 10.0
    address: str | None = None
    """Where others reach it."""
    metadata: Any = None
    prepare_seconds: Annotated[float, Meta(gt=0)] | None = None
    """How long the owner of a partition keeps it while this member prepares to take it over."""
    since: int | None = None
    """The epoch of this process's earlier life under the same name."""


class Ready(Struct, forbid_unknown_fields=True):
    """Incoming partitions that a member has prepared."""

    epoch: int
    partitions: list[str]


class Heartbeat(Struct, forbid_unknown_fields=True):
    """A sign of life. `progress`: partitions that got ahead, or have nothing to do."""

    epoch: int
    progress: list[str] = []


class Commit(Struct, forbid_unknown_fields=True):
    """How far a member got."""

    epoch: int
    positions: dict[str, Position]


class Release(Struct, forbid_unknown_fields=True):
    """Partitions to let go of, with the epochs of their ownerships."""

    epoch: int
    partitions: dict[str, int]


class Failed(Struct, forbid_unknown_fields=True):
    """A record whose handling failed."""

    partition: str
    epoch: Whole
    """Of the ownership."""
    offset: Whole
    reason: str


class Failures(Struct, forbid_unknown_fields=True):
    """Several of them."""

    failures: list[Failed]


class Fence(Struct, forbid_unknown_fields=True):
    """From now on no owner with a lower epoch reads."""

    epoch: Whole


class Changes(Struct):
    """What was seen of a group, in a query."""

    seen: str = ""
    wait_seconds: Annotated[float, Meta(ge=0)] = 0.0


class Read(Struct):
    """Where to read on, in a query."""

    offset: int
    owner: int
    epoch: int | None = None
    wait_seconds: Annotated[float, Meta(ge=0)] = 0.0
    max_records: Count = 500
    max_bytes: Count = 4 * 1024 * 1024


class Reset(Struct, forbid_unknown_fields=True):
    """Where a group is to go on."""

    topic: str
    to: Literal["earliest", "latest", "offset", "time"]
    value: int | None = None
    """The offset, or milliseconds since 1970."""
    partitions: list[int] | None = None
    """All, if none is named."""


class Redrive(Struct, forbid_unknown_fields=True):
    """Which dead letters to try again: those with these ids, or all."""

    topic: str
    ids: list[str] | None = None
