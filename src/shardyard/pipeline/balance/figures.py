"""The figures of a balance report."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from datetime import datetime
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from shardyard.placement import Balance, balance

MAX_KEY_CHARACTERS = 60
ACTUAL_NAME = "actual"
"""The name under which the partitions that the records are in are reported, next to the schemes."""


@dataclass(frozen=True, slots=True)
class Spread:
    """How a load is spread over partitions, or over members.

    Chi-square per degree of freedom is expected to be near 1 only if distinct keys were counted: all records of a key
    are on one partition, and so are all bytes of a record, which makes these counts uneven by nature.
    """

    total: int
    counts: tuple[int, ...]
    fullest: int
    """The number of the partition, or of the member, with the highest load."""
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
    """Records and bytes per partition under one scheme. Bytes are None if they are unknown."""

    scheme: str
    partitions: int
    records: Spread
    bytes: Spread | None


@dataclass(frozen=True, slots=True)
class WindowLoad:
    """The loads of one window of time. `start` is None for the records without a timestamp."""

    start: datetime | None
    schemes: tuple[SchemeLoad, ...]


@dataclass(frozen=True, slots=True)
class KeyPlace:
    """The partition of a key under a scheme, and the key's share of that partition. None if it is on several."""

    scheme: str
    partition: int | None
    share_of_records: float | None
    share_of_bytes: float | None


@dataclass(frozen=True, slots=True)
class HotKey:
    """A key with its records and bytes, and their share of the topic."""

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
    """The keys with the most records and those with the most bytes, sorted by records. Their counts are exact.

    The list is complete as far as it goes: a key that has more records, or more bytes, than `others_records` or
    `others_bytes` is in it. If very many keys have about equally many, none may be.
    """

    keys: tuple[HotKey, ...]
    others_records: int
    """No other key has more records than this."""
    others_bytes: int | None
    """No other key has more bytes than this."""


@dataclass(frozen=True, slots=True)
class KeySpread:
    """Distinct keys per partition under one scheme."""

    scheme: str
    partitions: int
    keys: Spread


@dataclass(frozen=True, slots=True)
class KeyCheck:
    """How evenly the distinct keys are spread, however many records each of them has."""

    counted: int
    one_in: int
    """One key in this many was counted, chosen by an independent hash; 1 if all were."""
    distinct: int
    """The number of distinct keys: exact if all were counted, otherwise an estimate from the sample."""
    schemes: tuple[KeySpread, ...]

    @property
    def exact(self) -> bool:
        return self.one_in == 1


@dataclass(frozen=True, slots=True)
class MemberLoad:
    """Records and bytes per member when the partitions of the topic are assigned to members."""

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
    """Records without a key; under a scheme these go round-robin."""
    schemes: tuple[SchemeLoad, ...]
    """The partitions that the records are in come first, if these are known."""
    windows: tuple[WindowLoad, ...]
    hot_keys: HotKeys
    key_check: KeyCheck
    members: tuple[MemberLoad, ...]
    sentence: str = ""


@dataclass(frozen=True, slots=True)
class BalanceReport:
    """The figures of all topics."""

    topics: tuple[TopicBalance, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers, named like the fields."""
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
    """A key for people to read: as a string if it is printable, otherwise as hex."""
    try:
        text = key.decode()
    except UnicodeDecodeError:
        return f"0x{key.hex()}"
    return text if text.isprintable() else f"0x{key.hex()}"


def shortened(key: bytes) -> str:
    """The same in a sentence."""
    text = shown(key)
    return text if len(text) <= MAX_KEY_CHARACTERS else text[: MAX_KEY_CHARACTERS - 1] + "…"
