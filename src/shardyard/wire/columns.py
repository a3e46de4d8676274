"""Records by column: how the client and brokers exchange batches in MessagePack.

A list for each field takes a fraction of the time of an object for each record, and becomes an Arrow batch, or comes
from one, without touching single records.
"""

from collections.abc import Iterable, Sequence
from itertools import repeat, starmap
from typing import Annotated, Self

from msgspec import Meta, Struct

from shardyard.model import Headers, Record

Milliseconds = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class RecordColumns(Struct, omit_defaults=True, forbid_unknown_fields=True):
    """The fields of a batch of records; each list has one item per record."""

    ids: list[str]
    values: list[bytes]
    timestamps: list[Milliseconds]
    """Milliseconds since 1970."""
    keys: list[bytes | None] | None = None
    """None: no record has a key."""
    headers: list[tuple[tuple[str, bytes], ...]] | None = None
    """None: no record has a header."""

    def __post_init__(self) -> None:
        """Called by the decoder, too."""
        columns = (self.values, self.timestamps, self.keys, self.headers)
        if any(column is not None and len(column) != len(self.ids) for column in columns):
            raise ValueError("all columns must have the same length")

    @classmethod
    def of(cls, records: Sequence[Record], now: int) -> Self:
        """The columns of records. Those with the timestamp 0 get `now`, in milliseconds."""
        return cls(
            [r.id for r in records],
            [r.value for r in records],
            [r.timestamp or now for r in records],
            [r.key for r in records] if any(r.key is not None for r in records) else None,
            [r.headers for r in records] if any(r.headers for r in records) else None,
        )

    def __len__(self) -> int:
        return len(self.ids)

    def records(self) -> list[Record]:
        keys: Iterable[bytes | None] = repeat(None, len(self)) if self.keys is None else self.keys
        headers: Iterable[Headers] = repeat((), len(self)) if self.headers is None else self.headers
        rows = zip(self.ids, keys, self.values, headers, self.timestamps, strict=True)
        return list(starmap(Record, rows))
