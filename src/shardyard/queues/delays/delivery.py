"""Where and when a delayed record is to be delivered, as its reserved headers say while it waits."""

from dataclasses import dataclass

from msgspec import structs

from shardyard.model import Headers, InvalidValue, Record
from shardyard.wire.headers import DUE, PARTITION, RESERVED, TARGET


@dataclass(frozen=True, slots=True)
class Delivery:
    """The delivery of a delayed record."""

    due: int
    """In ms since 1970."""
    target: str
    """A topic."""
    partition: int | None
    """None: the partition of the record's key."""

    @classmethod
    def of(cls, record: Record) -> "Delivery":
        """Read it from the headers of a waiting record; `ValueError` if they are missing or malformed."""
        due, target, partition = (record.header(name) for name in (DUE, TARGET, PARTITION))
        if due is None or target is None:
            raise InvalidValue("delayed record", record.id, f"the headers {DUE!r} and {TARGET!r}")
        return cls(int(due), target.decode(), None if partition is None else int(partition))

    def add_to(self, record: Record, now: int) -> Record:
        """The record with these headers, as it starts to wait at `now`."""
        headers: Headers = ((DUE, b"%d" % self.due), (TARGET, self.target.encode()))
        if self.partition is not None:
            headers += ((PARTITION, b"%d" % self.partition),)
        return structs.replace(record, headers=own_headers(record) + headers, timestamp=now)


def own_headers(record: Record) -> Headers:
    """The headers that the publisher set."""
    return tuple(header for header in record.headers if header[0] not in RESERVED)


def due_time(record: Record) -> int:
    """When a waiting record is due; 0, which is always past, if its headers are malformed, so that it does not block
    the records behind it."""
    try:
        return int(record.header(DUE) or 0)
    except ValueError:
        return 0
