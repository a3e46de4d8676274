"""The words of Shardyard, one for each thing: code, commands, documentation and console use the same ones.

Those that are made for every record or call are structs of msgspec: a frozen dataclass takes ten times as long to make.
"""

import secrets
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import force_setattr

from shardyard.model.checks import check_int64, check_text, settle_whole_number, whole_number
from shardyard.model.errors import InvalidValue
from shardyard.model.given import GivenHeaders, GivenValue, Headers, encoded_headers, encoded_text, encoded_value

if TYPE_CHECKING:
    from collections.abc import Iterator

TAG = "tag"
TRACE = "trace"
SEQUENCE_WINDOW = 64
"""How many sequences a retry may lie behind the producer's last one."""


class TopicKind(StrEnum):
    """What a topic is for. Partitions of different kinds are balanced separately."""

    NORMAL = "normal"
    RETRY = "retry"


@dataclass(frozen=True, slots=True)
class Retention:
    """What maintenance may trim: records older than an age, or beyond a size per partition. None keeps everything."""

    age_ms: int | None = None
    bytes_per_partition: int | None = None

    def __post_init__(self) -> None:
        for name in ("age_ms", "bytes_per_partition"):
            if getattr(self, name) is not None:
                settle_whole_number(self, name, at_least=1)


@dataclass(frozen=True, slots=True)
class Topic:
    """A named log that is split into `partitions`."""

    name: str
    partitions: int
    kind: TopicKind = TopicKind.NORMAL
    retention: Retention = Retention()
    epoch: int = 0
    """Assigned when the topic is created. A later topic of the same name has a higher one."""
    partitioner: str = "modulus"
    """How keys are placed, together with `hash`. Every producer places by it."""
    hash: str | None = "fnv1a32"
    """None for a partitioner that ignores keys."""
    sealed: bool = False
    """The topic takes no records: for a while if it has no successor, for good if it has one."""
    successor: str | None = None
    """The topic that continues this one."""
    open_partitions: int | None = None
    """Partitions from this index on are draining: they take no records, and can be read until they are dropped. None if
    all are open."""
    generation: int = 0
    """Raised by every change of the fields that decide where records go. No two states of a topic share one, nor do two
    topics of the same name. An append names the generation it was placed under."""

    def __post_init__(self) -> None:
        settle_whole_number(self, "partitions", at_least=1)
        if self.open_partitions is not None:
            settle_whole_number(self, "open_partitions", at_least=1)
            if self.open_partitions >= self.partitions:
                raise InvalidValue("open_partitions", self.open_partitions, f"fewer than {self.partitions}, or None")
        if self.kind not in tuple(TopicKind):
            raise InvalidValue("kind", self.kind, "one of " + ", ".join(TopicKind))

    @property
    def receiving(self) -> int:
        """How many partitions take records. Keys are placed over these."""
        return self.open_partitions or self.partitions

    def __iter__(self) -> "Iterator[Partition]":
        """All partitions, including those that are draining."""
        return (Partition(self.name, i) for i in range(self.partitions))


class Partition(Struct, frozen=True, order=True, gc=False):
    """An ordered, durable sequence of records, and the unit of ownership."""

    topic: str
    index: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.index}"


class Record(Struct, frozen=True, gc=False):
    """What a producer sends. A record without a key may go to any partition."""

    id: str
    key: bytes | None
    value: bytes
    headers: Headers = ()
    """Names and values. `TAG` and `TRACE` are the two names that have a meaning to Shardyard."""
    timestamp: int = 0
    """Milliseconds since 1970, UTC. If it is 0, the log sets it when the record is appended."""

    @classmethod
    def new(
        cls, value: GivenValue, key: bytes | str | None = None, headers: GivenHeaders = (), timestamp: int = 0
    ) -> "Record":
        """A record with a new, random id. Strings are stored as UTF-8; a dict or a list as a value is stored as JSON.
        `InvalidValue` for anything else that is not bytes."""
        if type(value) is not bytes:
            value = encoded_value(value)
        if key is not None and type(key) is not bytes:
            key = encoded_text("key", key)
        if headers != ():
            headers = encoded_headers(headers)
        return cls(secrets.token_hex(16), key, value, headers, timestamp)

    def header(self, name: str) -> bytes | None:
        """The value of the last header of that name, if there is one."""
        return next((value for known, value in reversed(self.headers) if known == name), None)


class Position(Struct, frozen=True, order=True, gc=False):
    """A place in a partition. The epoch tells a lost and recreated partition from the old one."""

    epoch: int
    offset: int


@dataclass(frozen=True, slots=True, order=True)
class Member:
    """A running process that may own partitions. Its share of them is proportional to its weight."""

    name: str
    weight: int = 1

    def __post_init__(self) -> None:
        if not self.name:
            raise InvalidValue("member name", self.name, "a string that is not empty")
        weight = whole_number(f"weight of member {self.name!r}", self.weight, at_least=1)
        object.__setattr__(self, "weight", weight)


@dataclass(frozen=True, slots=True, order=True)
class Move:
    """One partition changing its owner."""

    partition: Partition
    source: str
    target: str


class Stamp(Struct, frozen=True, gc=False):
    """Makes an append idempotent: a batch that is retried with the same stamp is stored once.

    A producer numbers its batches for each partition in ascending order, and may have up to `SEQUENCE_WINDOW` of them
    in flight. After a restart it continues its numbers, or takes a new name, because a stamp that was used before means
    "the same batch again". A batch with another number of records under the same stamp is refused.
    """

    producer: str
    sequence: int

    def __post_init__(self) -> None:
        check_text("producer", self.producer)
        force_setattr(self, "sequence", check_int64("sequence", self.sequence, at_least=0))


class Fence(Struct, frozen=True, gc=False):
    """Names the ownership that a call relies on. The log keeps the highest epoch of each fence that an append carried
    or `set_fence` set, and refuses a call with a lower one with `Fenced`."""

    name: str
    epoch: int

    def __post_init__(self) -> None:
        check_text("fence", self.name)
        force_setattr(self, "epoch", check_int64("epoch", self.epoch, at_least=0))


class Appended(Struct, frozen=True, gc=False):
    """Where a batch was stored: `count` records, the first of them at `first`."""

    partition: Partition
    first: Position
    count: int
    duplicate: bool = False
    """The batch had been stored before under the same stamp; `first` says where."""


class Span(Struct, frozen=True, gc=False):
    """What a partition holds: records with offsets from `first` up to, but not including, `end`."""

    epoch: int
    first: int
    end: int
