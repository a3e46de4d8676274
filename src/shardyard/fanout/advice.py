"""Which mode suits the size of the routing table, by the thresholds of ADR-009."""

from collections.abc import Sequence

from msgspec import Struct

from shardyard.fanout.modes import Mode
from shardyard.model import InvalidValue, whole_number
from shardyard.wire.fanout import TableFigures

MAX_ONLINE = 500_000
MAX_TABLE_BYTES = 10 * 1000**3
"""Above either of these, a table is too large for every worker to hold all of it."""
GIGABYTE = 1000**3


class Thresholds(Struct, frozen=True):
    """Up to where the mode `replicated` suits."""

    online: int = MAX_ONLINE
    """Users online."""
    table_bytes: int = MAX_TABLE_BYTES
    """Of the whole routing table."""

    def __post_init__(self) -> None:
        whole_number("online users", self.online, at_least=1)
        whole_number("bytes of the table", self.table_bytes, at_least=1)


class Advice(Struct, frozen=True):
    """What was measured, and which mode suits it."""

    mode: str
    advised: str
    reason: str
    workers: int
    online: int
    channels: int
    memberships: int
    table_bytes: int
    """Of the whole table: in the mode `partitioned` at most so many, since each worker holds the users besides its
    share of the channels."""
    replicated_bytes: int
    """Per worker, if each held all."""
    partitioned_bytes: int
    """Per worker, if each held a share; at least so many, for the same reason."""

    @property
    def changes(self) -> bool:
        """Whether another mode is advised than the one that is set."""
        return self.mode != self.advised


def advise(mode: Mode, tables: Sequence[TableFigures], thresholds: Thresholds | None = None) -> Advice:
    """The mode for tables of this size. `tables`: of all workers that run in `mode`."""
    limits = thresholds or Thresholds()
    if not tables:
        raise InvalidValue("workers", 0, "at least one fan-out worker whose routing table was measured")
    whole = max if mode == "replicated" else sum
    size = whole(table.bytes for table in tables)
    online = max(table.online for table in tables)
    advised, reason = (
        "replicated",
        (
            f"{online} {'user' if online == 1 else 'users'} online and a table of {_gigabytes(size)}: "
            f"every worker can hold all of it (up to {limits.online} users and {_gigabytes(limits.table_bytes)})"
        ),
    )
    if online > limits.online:
        advised, reason = "partitioned", f"{online} users are online, more than {limits.online}"
    elif size > limits.table_bytes:
        advised = "partitioned"
        reason = f"the table takes {_gigabytes(size)}, more than {_gigabytes(limits.table_bytes)}"
    return Advice(
        mode,
        advised,
        reason,
        len(tables),
        online,
        whole(table.channels for table in tables),
        whole(table.memberships for table in tables),
        size,
        size,
        -(-size // len(tables)),
    )


def _gigabytes(size: int) -> str:
    return f"{size / GIGABYTE:.3g} GB" if size >= GIGABYTE // 1_000 else "less than 0.001 GB"
