"""The words: one for each thing, in code, commands, documents and console."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

from shardyard.model.errors import InvalidValue

NO_HEADERS: Mapping[str, bytes] = MappingProxyType({})


class TopicKind(StrEnum):
    """What a topic is for. Partitions of different kinds are balanced apart."""

    NORMAL = "normal"
    RETRY = "retry"


def whole_number(name: str, value: object, *, at_least: int) -> int:
    """`value`, if it is a whole number of at least `at_least`; `InvalidValue` otherwise."""
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise InvalidValue(name, value, f"a whole number of at least {at_least}")
    return value


@dataclass(frozen=True, slots=True)
class Topic:
    """A named log, split into `partitions`."""

    name: str
    partitions: int
    kind: TopicKind = TopicKind.NORMAL

    def __post_init__(self) -> None:
        whole_number("partitions", self.partitions, at_least=1)


@dataclass(frozen=True, slots=True, order=True)
class Partition:
    """An ordered, durable sequence of records, and the unit of ownership."""

    topic: str
    index: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.index}"


@dataclass(frozen=True, slots=True)
class Record:
    """What is sent. A record without a key has no home partition: any will do."""

    id: str
    key: bytes | None
    value: bytes
    headers: Mapping[str, bytes] = field(default_factory=lambda: NO_HEADERS)
    timestamp: int = 0
    """Milliseconds since 1970, UTC."""


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """A place in a partition. The epoch tells a lost and recreated partition from the old one."""

    epoch: int
    offset: int


@dataclass(frozen=True, slots=True, order=True)
class Member:
    """A running process that may own partitions: its share of them, by weight."""

    name: str
    weight: int = 1

    def __post_init__(self) -> None:
        if not self.name:
            raise InvalidValue("member name", self.name, "a text that is not empty")
        whole_number(f"weight of member {self.name!r}", self.weight, at_least=1)


@dataclass(frozen=True, slots=True)
class Group:
    """Members that share the partitions of some topics."""

    name: str
    topics: frozenset[str]


@dataclass(frozen=True, slots=True)
class Assignment:
    """Who owns what, as of an epoch. A partition that is not in `owners` has no owner."""

    epoch: int
    owners: Mapping[Partition, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, order=True)
class Move:
    """One partition changing its owner."""

    partition: Partition
    source: str
    target: str
