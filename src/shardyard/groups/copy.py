"""Copying what a registry keeps for the long run to another one: settings, groups and their committed positions.

Members, ownership and leases belong to running processes, and the audit log to the old registry: they are not copied.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from shardyard.groups import protocol
from shardyard.log.copy import Checkpoint, Checkpoints
from shardyard.model import GroupInUse, Partition, Position
from shardyard.registry import GroupRow, OwnershipRow, SettingRow, Snapshot, Transaction

SCOPE = "copy"
"""The scope of the settings in the target that keep the checkpoints of a copy."""


@dataclass(frozen=True, slots=True)
class RegistryContents:
    """What is copied from a registry."""

    groups: tuple[GroupRow, ...]
    positions: Mapping[str, Mapping[Partition, Position]]
    """The committed positions of each group."""
    settings: tuple[SettingRow, ...]


def contents(tx: Snapshot, leave_out: Collection[str] = ()) -> RegistryContents:
    """What is to be copied from a registry. `leave_out`: scopes of settings that mean nothing in another one."""
    groups = tuple(tx.groups())
    return RegistryContents(
        groups,
        {
            group.name: {row.partition: row.committed for row in tx.ownerships(group.name) if row.committed is not None}
            for group in groups
        },
        tuple(row for scope in tx.scopes() if scope not in (SCOPE, *leave_out) for row in tx.settings(scope)),
    )


def put_contents(tx: Transaction, source: RegistryContents, checkpoints: Checkpoints, who: str) -> dict[str, int]:
    """Store settings, groups and positions in another registry, the positions as offsets of the copied log.

    Returns how many of each are there now. `GroupInUse` if a group has members in the target. A position never moves
    back there: a group that has consumed from the target keeps its own. A position on a topic that was not copied, or
    that was recreated since, is left out.
    """
    for group in source.groups:
        for member in tx.members(group.name):
            if member.expires_at > tx.now:
                raise GroupInUse(group.name, member.name)
    for row in source.settings:
        known = tx.setting(row.scope, row.name)
        if known is None or known.value != row.value:
            tx.put_setting(row.scope, row.name, row.value)
    translated = 0
    for group in source.groups:
        known_group = tx.group(group.name)
        lowest = int(tx.now * 1000) if known_group is None else known_group.epoch
        tx.put_group(replace(group, epoch=max(group.epoch, lowest), assigned=-1, shape=-1))
        rows = list(_ownerships(tx, group.name, source.positions.get(group.name, {}), checkpoints))
        tx.put_ownerships(rows)
        translated += len(rows)
        protocol.touch(tx, group.name)
    copied = {"groups": len(source.groups), "positions": translated, "settings": len(source.settings)}
    tx.audit(who, "registry copied", "copy", copied)
    return copied


def _ownerships(
    tx: Snapshot, group: str, positions: Mapping[Partition, Position], checkpoints: Checkpoints
) -> Iterable[OwnershipRow]:
    for partition, committed in positions.items():
        checkpoint = checkpoints.get(partition)
        position = None if checkpoint is None else checkpoint.translate(committed)
        if position is not None:
            row = tx.ownership(group, partition) or OwnershipRow(group, partition, progress_at=tx.now)
            ahead = row.committed is not None and row.committed > position
            yield row if ahead else replace(row, committed=position)


def load_checkpoints(tx: Snapshot) -> Checkpoints:
    """The checkpoints of earlier runs, from the target's registry."""
    return dict(map(_checkpoint, tx.settings(SCOPE)))


def store_checkpoint(tx: Transaction, partition: Partition, at: Checkpoint) -> None:
    """Keep a checkpoint in the target's registry."""
    value = [at.source.epoch, at.source.offset, at.target.epoch, at.target.offset]
    tx.put_setting(SCOPE, str(partition), value)


def _checkpoint(row: SettingRow) -> tuple[Partition, Checkpoint]:
    topic, _, index = row.name.rpartition("/")
    numbers = row.value
    assert isinstance(numbers, list)  # noqa: S101 `store_checkpoint` stored it
    source_epoch, source_offset, target_epoch, target_offset = map(int, numbers)
    at = Checkpoint(Position(source_epoch, source_offset), Position(target_epoch, target_offset))
    return Partition(topic, int(index)), at
