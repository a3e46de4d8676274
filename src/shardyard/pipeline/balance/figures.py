"""What `balance` found, as plain figures."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from datetime import datetime
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from shardyard.placement import Balance, balance

ACTUAL_NAME = "actual"
"""The scheme that is no scheme: where the records are."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A load over partitions, or over members, and how even it is.

    Chi-square per degree of freedom compares with 1 only where different keys were counted: records come in heaps, one
    for each key, and bytes in heaps of whole records.
    """

    total: int
    counts: tuple[int, ...]
    fullest: int
    """The partition (or the member) with the most, by its number."""
    fullest_share: float
    balance: Balance

    @classmethod
    def of(cls, counts: Sequence[int] | npt.NDArray[Any]) -> Self:
        load = np.asarray(counts, np.int64)
        total, fullest = int(load.sum()), int(load.argmax())
        share = int(load[fullest]) / total if total else 0.0
        return cls(total, tuple(load.tolist()), fullest, share, balance(load))

    @property
    def over_mean(self) -> float:
        return self.balance.max_over_mean


@dataclass(frozen=True, slots=True)
class SchemeLoad:
    """Records and bytes per partition under one scheme. Bytes are None where they are not known."""

    scheme: str
    partitions: int
    records: Spread
    bytes: Spread | None


@dataclass(frozen=True, slots=True)
class WindowLoad:
    """The same, of the records of one window of time; None is the start of those without a timestamp."""

    start: datetime | None
    schemes: tuple[SchemeLoad, ...]


@dataclass(frozen=True, slots=True)
class KeyPlace:
    """Where a key is under a scheme, and how much of that partition it is. None if it is on several partitions."""

    scheme: str
    partition: int | None
    share_of_records: float | None
    share_of_bytes: float | None


@dataclass(frozen=True, slots=True)
class HotKey:
    """A key, what it has, and how much of its topic that is."""

    key: bytes
    records: int
    bytes: int | None
    share_of_records: float
    share_of_bytes: float | None
    places: tuple[KeyPlace, ...]

    def place(self, scheme: str) -> int | None:
        return next((place.partition for place in self.places if place.scheme == scheme), None)


@dataclass(frozen=True, slots=True)
class HotKeys:
    """The keys with the most records and those with the most bytes, by records. Their counts are exact."""

    keys: tuple[HotKey, ...]
    others_records: int
    """No other key has more records than this ..."""
    others_bytes: int | None
    """... or more bytes than this."""


@dataclass(frozen=True, slots=True)
class KeySpread:
    """Different keys per partition under one scheme."""

    scheme: str
    partitions: int
    keys: Spread


@dataclass(frozen=True, slots=True)
class KeyCheck:
    """The CecoChat check over real keys: how evenly the different keys are spread, whatever each of them carries."""

    counted: int
    one_in: int
    """Of so many keys one was counted, chosen by a hash of its own; 1 when all were."""
    distinct: int
    """Different keys: exact when all were counted, else an estimate from the sample."""
    schemes: tuple[KeySpread, ...]

    @property
    def exact(self) -> bool:
        return self.one_in == 1


@dataclass(frozen=True, slots=True)
class MemberLoad:
    """Records and bytes per member, when the partitions of the topic are shared out."""

    assignor: str
    members: int
    scheme: str
    idle: int
    """Members without a partition."""
    records: Spread
    bytes: Spread | None


@dataclass(frozen=True, slots=True)
class TopicBalance:
    """All figures of one topic."""

    topic: str
    records: int
    bytes: int | None
    keyless: int
    """Records without a key; schemes deal them in turn."""
    schemes: tuple[SchemeLoad, ...]
    """Where the records are first, if that is known."""
    windows: tuple[WindowLoad, ...]
    hot_keys: HotKeys
    key_check: KeyCheck
    members: tuple[MemberLoad, ...]
    sentence: str = ""


@dataclass(frozen=True, slots=True)
class BalanceReport:
    """What `balance` found, topic by topic."""

    topics: tuple[TopicBalance, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain dicts, lists, texts and numbers, named as the fields are."""
        plain: dict[str, Any] = _plain(self)
        return plain


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    match value:
        case tuple():
            return [_plain(each) for each in value]
        case bytes():
            return shown(value)
        case datetime():
            return value.isoformat()
        case _:
            return value


def shown(key: bytes) -> str:
    """A key as a person reads it: text if it is printable, else its bytes as hex."""
    try:
        text = key.decode()
    except UnicodeDecodeError:
        return f"0x{key.hex()}"
    return text if text.isprintable() else f"0x{key.hex()}"
