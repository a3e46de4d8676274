"""`Directory`: who is in a group, and who owns which partition."""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from shardyard.groups.broadcast import groups_of
from shardyard.groups.node import Node
from shardyard.groups.protocol import watch_name
from shardyard.model import Partition, ShardyardError
from shardyard.registry import ChangeSignal, MemberRow, OwnershipRow, Snapshot

_log = logging.getLogger(__name__)

REFRESH_SECONDS = 5.0
"""The longest time between two refreshes, also when nothing was signalled."""


@dataclass(frozen=True, slots=True)
class Presence:
    """A member of a group, as others see it."""

    name: str
    address: str | None
    metadata: object
    epoch: int


@dataclass(frozen=True, slots=True)
class Owner:
    """The owner of a partition. Its epoch tells it from earlier and later owners."""

    member: str
    address: str | None
    epoch: int


class Directory:
    """The members of a group and the owners of its partitions, kept current by a watch, from entering the block to
    leaving it.

    It answers from memory, and may be behind the registry by some milliseconds: an owner that it names may have changed
    just now, so a server that is addressed by it checks what it owns. In a broadcast group, where every member owns
    every partition, it knows the members, and no owners.
    """

    def __init__(self, node: Node, group: str) -> None:
        self._node = node
        self._group = group
        self._members: Mapping[str, Presence] = {}
        self._owners: Mapping[Partition, Owner] = {}
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self.refresh()
        self._task = asyncio.create_task(self._follow(), name=f"directory of {self._group}")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def members(self) -> Mapping[str, Presence]:
        """Everyone in the group, by name, also members without partitions."""
        return self._members

    def owner_of(self, partition: Partition) -> Owner | None:
        """The member that owns the partition, where it is reached, and the epoch of its ownership; None if nobody owns
        it now."""
        return self._owners.get(partition)

    async def changed(self) -> None:
        """Return after the next change of the directory."""
        await self._changed.wait()

    async def refresh(self) -> None:
        """Read the registry now."""
        rows, ownerships = await self._node.transactions.read(self._read)
        members = {row.name: Presence(row.name, row.address, row.metadata, row.epoch) for row in rows}
        owners = {
            row.partition: Owner(row.owner, members[row.owner].address, row.epoch)
            for row in ownerships
            if row.owner is not None and row.owner in members
        }
        if (members, owners) != (self._members, self._owners):
            self._members, self._owners = members, owners
            self._changed.set()
            self._changed = asyncio.Event()

    def _read(self, tx: Snapshot) -> tuple[list[MemberRow], list[OwnershipRow]]:
        members = [row for group in groups_of(tx, self._group) for row in tx.members(group)]
        return members, tx.ownerships(self._group)

    async def _follow(self) -> None:
        with ChangeSignal(self._node.registry, watch_name(self._group), self._node.clock) as changes:
            while True:
                await changes.wait(REFRESH_SECONDS)
                try:
                    await self.refresh()
                except ShardyardError as error:
                    _log.warning("the directory of %s will be refreshed later: %s", self._group, error)
