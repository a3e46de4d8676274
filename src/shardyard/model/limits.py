"""What may go into a log: limits, and the validation of names and records. Arrow batches are validated in
`arrow_limits`, so that nothing here loads Arrow."""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, TypeGuard, cast

from msgspec import Struct

from shardyard.model.checks import encoded_size, whole_number
from shardyard.model.errors import InvalidValue, TooLarge
from shardyard.model.words import Record

if TYPE_CHECKING:
    import pyarrow as pa

_TOPIC_NAME = re.compile(r"[A-Za-z0-9._-]+")
_RESERVED = "__"
INTERNAL_PREFIX = "shardyard."
"""Of the names of Shardyard's own topics and groups."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest records, batches, names and topics that a log takes. It refuses larger ones with `TooLarge`."""

    record_bytes: int = 1024 * 1024
    """Key, value and headers of one record together."""
    batch_bytes: int = 16 * 1024 * 1024
    batch_records: int = 100_000
    topic_name: int = 200
    """Characters."""
    partitions: int = 100_000
    """Of one topic."""


def check_topic_name(name: object, limits: Limits) -> str:
    if not isinstance(name, str) or not _TOPIC_NAME.fullmatch(name):
        raise InvalidValue("topic name", name, "letters, digits, '.', '_' and '-', at least one")
    if not name.strip("."):
        raise InvalidValue("topic name", name, "not only dots, which have a meaning in paths")
    if name.startswith(_RESERVED):
        raise InvalidValue("topic name", name, f"a name that does not begin with {_RESERVED!r}: those are reserved")
    if len(name) > limits.topic_name:
        raise TooLarge("topic name in characters", len(name), limits.topic_name)
    return name


def check_partitions(partitions: int, limits: Limits) -> int:
    count = whole_number("partitions", partitions, at_least=1)
    if count > limits.partitions:
        raise TooLarge("partitions of a topic", count, limits.partitions)
    return count


ANY_SIZE = Limits(record_bytes=2**62, batch_bytes=2**62, batch_records=2**62)
"""For callers that leave it to the log to enforce its limits."""


class Validated(Struct, frozen=True):
    """Records that `validate` has checked. What gets them checks no more than that they fit its limits.

    Only `validate` and `part` make these. The records can't be changed afterwards: a tuple or an Arrow batch.
    """

    rows: "tuple[Record, ...] | pa.RecordBatch"
    size: int
    """Bytes; estimated for a part of records."""
    largest: int
    """No record has more bytes of key, value and headers than this."""
    most: int
    """All records together have no more bytes than this."""

    def __len__(self) -> int:
        return len(self.rows)

    def part(self, rows: "tuple[Record, ...] | pa.RecordBatch") -> "Validated":
        """Some of the same rows."""
        if is_arrow(rows):
            return Validated(rows, rows.nbytes, self.largest, rows.nbytes)
        return Validated(rows, self.size * len(rows) // len(self.rows), self.largest, self.most)

    def fits(self, limits: Limits) -> bool:
        """Whether these records are known to be within `limits`; if not, they may still be."""
        return (
            0 < len(self.rows) <= limits.batch_records
            and self.largest <= limits.record_bytes
            and self.most <= limits.batch_bytes
        )


Records: TypeAlias = "Sequence[Record] | pa.RecordBatch | Validated"
"""The forms in which a batch of records is appended."""


def is_arrow(records: object) -> "TypeGuard[pa.RecordBatch]":
    """Whether it is an Arrow batch. It can only be one if Arrow is loaded, so this does not load it."""
    arrow = sys.modules.get("pyarrow")
    return arrow is not None and isinstance(records, arrow.RecordBatch)


def validate(records: Records, limits: Limits, now: int) -> Validated:
    """Refuse what may not go into a log. `now`, in milliseconds, replaces timestamps of 0 in an Arrow batch."""
    if isinstance(records, Validated):
        if records.fits(limits):
            return records
        records = records.rows
    if is_arrow(records):
        from shardyard.model.arrow_limits import check_batch  # noqa: PLC0415 loads Arrow, which is loaded already

        data, largest = check_batch(records, limits, now)
        size = data.nbytes
        return Validated(data, size, largest, size)
    return _check_records(records, limits)


def check_records(records: object, limits: Limits) -> tuple[tuple[Record, ...], int]:
    """Refuse what may not go into a log. Returns the records as a tuple, and their bytes."""
    validated = _check_records(records, limits)
    return cast("tuple[Record, ...]", validated.rows), validated.size


def check_new_record(record: Record, limits: Limits) -> None:
    """The same for a single record that got its id from us."""
    size = _record_size(record)
    if size > limits.record_bytes:
        raise TooLarge(f"record {record.id!r} in bytes", size, limits.record_bytes)


def _check_records(records: object, limits: Limits) -> Validated:
    if not isinstance(records, Sequence):
        raise InvalidValue("batch", type(records).__name__, "a sequence of records or an Arrow record batch")
    records = tuple(records)
    check_count(len(records), limits)
    total = largest = 0
    for record in records:
        size = _record_size(record)
        if size > largest:
            if size > limits.record_bytes:
                raise TooLarge(f"record {record.id!r} in bytes", size, limits.record_bytes)
            largest = size
        total += size + len(record.id)
    if total > limits.batch_bytes:
        raise TooLarge("batch in bytes", total, limits.batch_bytes)
    return Validated(records, total, largest, total)


def _record_size(record: Record) -> int:
    """The bytes of key, value and headers. `InvalidValue` if a field has a wrong type: users make these objects."""
    if not isinstance(cast(object, record), Record):
        raise InvalidValue("record", record, "a Record")
    kinds = (type(record.id), type(record.key), type(record.value), type(record.headers), type(record.timestamp))
    if kinds != _KEYED and kinds != _KEYLESS:  # noqa: PLR1714 `in` builds a tuple for each record
        raise InvalidValue("record", record, _KINDS)
    if not record.id or not 0 <= record.timestamp < _INT64:
        raise InvalidValue("record", record, "an id that is not empty and a timestamp of 0 to 2**63 - 1")
    if not record.id.isascii():
        encoded_size("id", record.id)
    size = len(record.value) + (len(record.key) if record.key is not None else 0)
    for header in record.headers:
        if type(header) is not tuple or len(header) != 2 or type(header[0]) is not str or type(header[1]) is not bytes:
            raise InvalidValue("header", header, "a string as name and bytes as value")
        name, value = header
        size += (len(name) if name.isascii() else encoded_size("name of a header", name)) + len(value)
    return size


_KINDS = "a string as id, bytes or None as key, bytes as value, a tuple of headers, an int as timestamp"
_KEYED = (str, bytes, bytes, tuple, int)
_KEYLESS = (str, type(None), bytes, tuple, int)
_INT64 = 2**63


def check_count(count: int, limits: Limits) -> None:
    if count == 0:
        raise InvalidValue("batch", "empty", "at least one record")
    if count > limits.batch_records:
        raise TooLarge("batch in records", count, limits.batch_records)
