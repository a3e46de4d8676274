"""Resetting the positions of a group, forward or back, while its members run."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

from shardyard.groups import protocol
from shardyard.log import Log
from shardyard.log.rules import check_offset
from shardyard.model import InvalidValue, Partition, PartitionOutOfRange, Position, UnknownGroup, whole_number
from shardyard.registry import OwnershipRow, Transaction

Kind = Literal["earliest", "latest", "offset", "time"]


@dataclass(frozen=True, slots=True)
class ResetTarget:
    """Where to continue from: the first record there is, the end, an offset, or the first record from a time on."""

    kind: Kind
    value: int | None = None
    """The offset, or the time in milliseconds since 1970; None for the other kinds."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise InvalidValue("kind", self.kind, "one of " + ", ".join(get_args(Kind)))
        if self.kind in ("offset", "time"):
            object.__setattr__(self, "value", whole_number(self.kind, self.value, at_least=0))
        elif self.value is not None:
            raise InvalidValue("value", self.value, f"none with {self.kind!r}")


async def resolve_positions(
    log: Log, topic: str, partitions: Iterable[int] | None, to: ResetTarget
) -> dict[Partition, Position]:
    """The positions that `to` means now on these partitions of a topic (None: on all of them).

    `OffsetTrimmed` or `OffsetBeyondEnd` if one of them does not have the offset. A time after the last record is the
    end.
    """
    if not isinstance(to, ResetTarget):
        raise InvalidValue("to", to, "a ResetTarget, such as ResetTarget('earliest') or ResetTarget('offset', 7)")
    count = (await log.topic(topic)).partitions
    positions = {}
    for index in range(count) if partitions is None else partitions:
        partition = Partition(topic, whole_number("partition", index, at_least=0))
        if partition.index >= count:
            raise PartitionOutOfRange(partition, count)
        try:
            positions[partition] = await _position(log, partition, to)
        except PartitionOutOfRange:  # contracted away meanwhile
            if partitions is not None:
                raise
    if not positions:
        raise InvalidValue("partitions", [], "at least one, or None for all")
    return positions


async def _position(log: Log, partition: Partition, to: ResetTarget) -> Position:
    span = await log.span(partition)
    if to.value is None:
        return Position(span.epoch, span.first if to.kind == "earliest" else span.end)
    if to.kind == "time":
        return Position(span.epoch, await log.offset_at(partition, to.value))
    check_offset(partition, span, to.value)
    return Position(span.epoch, to.value)


def reset(tx: Transaction, group: str, positions: Mapping[Partition, Position], who: str) -> None:
    """Let a group continue from these positions, all of them or none; other partitions do not pause.

    Owners stay, under new epochs: what they have in flight can't be committed any more, and they continue from the new
    position at once.
    """
    _check(positions)
    row = tx.group(group)
    if row is None:
        raise UnknownGroup(group)
    epoch, rows = row.epoch, []
    for partition, position in positions.items():
        before = tx.ownership(group, partition) or OwnershipRow(group, partition)
        after = replace(before, committed=position, progress_at=tx.now)
        if before.owner is not None:
            epoch += 1
            after = replace(after, epoch=epoch)
        rows.append(after)
    tx.put_ownerships(rows)
    tx.put_group(replace(row, epoch=epoch))
    tx.audit(who, "positions reset", group, {str(p): position.offset for p, position in positions.items()})
    protocol.touch(tx, group, *(after.owner for after in rows))


def _check(positions: Mapping[Partition, Position]) -> None:
    if not positions:
        raise InvalidValue("positions", {}, "at least one")
    for partition, position in positions.items():
        if not isinstance(partition, Partition) or not isinstance(position, Position):
            raise InvalidValue("positions", {partition: position}, "a Position for each Partition")
        whole_number(f"offset of {partition}", position.offset, at_least=0)
