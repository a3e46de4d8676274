"""Which inbox partitions have online members of a channel."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from shardyard.fanout.routing.changes import Column, Names, parse_changes
from shardyard.fanout.routing.flat import IS_COMPILED, FlatArrays
from shardyard.fanout.routing.memberships import Memberships
from shardyard.fanout.routing.partition import FanoutPartition
from shardyard.fanout.routing.snapshot import Snapshot, SnapshotPartition
from shardyard.fanout.routing.users import STORED_HASH, Users, device_hashes
from shardyard.model import InvalidValue, Position, whole_number

MANY_USERS = 4000 if IS_COMPILED else 400
"""From as many users whose presence changed in one batch, all of them are counted together. Estimates: without
numba, one by one was still faster at 200; with numba, it follows from what each way takes for a user."""


@dataclass(frozen=True, slots=True)
class TableSize:
    """What a routing table holds."""

    bytes: int
    """Of its arrays, and by estimate of the changes since they were built."""
    channels: int
    users: int
    online: int
    """Users with at least one device."""
    memberships: int


class RoutingTable:
    """Holds the fan-out partitions that were added, and the presence of all users.

    It is exact: `route` and `online` give what follows from the records that were applied. Records may be applied
    again, from any earlier offset on: those whose `end` is not beyond the position that was reached are skipped, and
    applying the others twice makes no difference. An `end` in a later epoch says that the topic was deleted and
    recreated: what its partition said before is void. Records that hold no change are skipped, and counted in
    `malformed`.

    With a snapshot, users and devices begin as they are in it. Changes are kept in memory, the files stay as
    they are. A table belongs to one thread.
    """

    def __init__(
        self,
        inbox_partitions: int,
        snapshot: Snapshot | None = None,
        *,
        partitioner: str = "modulus",
        hash_: str = STORED_HASH,
    ) -> None:
        """`inbox_partitions`, `partitioner`, `hash_`: how the topic `inbox` places users. If the snapshot was taken
        with another number of inbox partitions, its devices are not used, and `presence` has to be read from its
        start."""
        self._partitions: dict[int, FanoutPartition] = {}
        self._flat = FlatArrays()
        self.inbox_partitions = whole_number("inbox partitions", inbox_partitions, at_least=1)
        self.malformed = 0
        """Records that were skipped because they hold no change."""
        self.presence_offsets: list[Position | None] = [None] * inbox_partitions
        """Per inbox partition: all records of `presence` before it were applied; None if none was."""
        self._numbering = ""
        """The checksum of the file that numbers the users."""
        if snapshot is None:
            self._users = Users(inbox_partitions, partitioner, hash_)
            return
        base = snapshot.users
        self._numbering = base.checksum
        self._users = Users(inbox_partitions, partitioner, hash_, base.names, base.hashes)
        if snapshot.manifest.inbox_partitions == inbox_partitions:
            self._users.load_devices(base.device_users, base.devices)
            self.presence_offsets = snapshot.presence
        base.release_pages()  # hashes and devices are not needed any more

    # Presence ------------------------------------------------------------------------------------------------

    def apply_presence(self, q: int, keys: Column, values: Column, end: Position) -> None:
        """Apply records of `presence` partition `q`, in order. `end`: the position after the last one. Those of users
        that belong to another inbox partition are void: they were written before `inbox` got more partitions."""
        reached = self.presence_offsets[q]
        if reached is not None and end <= reached:
            return
        changes = parse_changes(keys, values, clears=True)
        self.malformed += changes.malformed
        was_online: dict[int, bool] = {}
        if changes.cleared or (reached is not None and end.epoch > reached.epoch):
            gone = self._users.online_in(q)
            was_online = dict.fromkeys(gone.tolist(), True)
            self._users.disconnect_all(gone)
        users, is_online = self._users.number(changes.keys).tolist(), self._users.is_online
        connect, disconnect = self._users.connect, self._users.disconnect
        for user, device, added in zip(users, device_hashes(changes.names), changes.added, strict=True):
            if self._users.inbox(user) != q:
                continue
            if user not in was_online:
                was_online[user] = is_online(user)
            (connect if added else disconnect)(user, device)
        self._count([user for user, was in was_online.items() if is_online(user) != was])
        self.presence_offsets[q] = end

    def _count(self, users: list[int]) -> None:
        """Count users whose presence has changed."""
        if len(users) < MANY_USERS:
            for user in users:
                change = 1 if self._users.is_online(user) else -1
                self._flat.count(self._partitions, user, self._users.inbox(user), change)
            return
        numbers = np.array(users, np.int64)
        changes = np.where(self._users.are_online(numbers), 1, -1)
        for partition in self._partitions.values():
            partition.change_presences(numbers, changes)

    # Members -------------------------------------------------------------------------------------------------

    def add(self, p: int, snapshot: SnapshotPartition | None = None) -> None:
        """Hold a fan-out partition, which is empty or as in a snapshot. The caller waits while its members are
        counted, and longer if the snapshot is not the one that the table was created with, as then the numbers of
        users differ."""
        whole_number("fan-out partition", p, at_least=0)
        if p in self._partitions:
            raise InvalidValue("fan-out partition", p, "one that the table does not hold yet")
        build = partial(FanoutPartition, p, self._users, self._flat, self.inbox_partitions)
        if snapshot is None:
            self._partitions[p] = build()
            return
        memberships = snapshot.memberships
        if snapshot.users.checksum != self._numbering:
            users, channels = memberships.rows()
            known, rows = np.unique(users, return_inverse=True)
            numbers = self._users.number(snapshot.users.names.names.take(pa.array(known)))
            memberships = Memberships.build(numbers[rows], channels)
        self._partitions[p] = build(snapshot.channels, memberships, snapshot.position)

    def drop(self, p: int) -> None:
        """Hold a fan-out partition no longer."""
        self._held(p).forget()
        del self._partitions[p]

    @property
    def partitions(self) -> list[int]:
        """The fan-out partitions that the table holds."""
        return sorted(self._partitions)

    def members_offset(self, p: int) -> Position | None:
        """All records of `members` partition `p` before it were applied; None if none was."""
        return self._held(p).position

    def apply_members(self, p: int, keys: Column, values: Column, end: Position) -> None:
        """Apply records of `members` partition `p`, in order. `end`: the position after the last one."""
        partition = self._held(p)
        reached = partition.position
        if reached is not None and end <= reached:
            return
        if reached is not None and end.epoch > reached.epoch:
            partition.forget()
            partition = FanoutPartition(p, self._users, self._flat, self.inbox_partitions)
            self._partitions[p] = partition
        changes = parse_changes(keys, values)
        self.malformed += changes.malformed
        partition.apply(changes)
        partition.position = end

    # Lookup --------------------------------------------------------------------------------------------------

    def route(self, p: int, channels: pa.Array | pa.ChunkedArray) -> npt.NDArray[np.bool_]:
        """A row for each channel (binary or text), and in it True for each inbox partition with online members of the
        channel. An unknown channel has none."""
        if isinstance(channels, pa.ChunkedArray):
            channels = pa.concat_arrays(channels.chunks) if channels.num_chunks else pa.array([], pa.binary())
        return self.route_all([(p, channels if channels.type == pa.binary() else channels.cast(pa.binary()))])

    def route_all(self, groups: Sequence[tuple[int, Names]]) -> npt.NDArray[np.bool_]:
        """The same for channels of several fan-out partitions: the rows of each group follow those of the one
        before."""
        numbers = [(p, self._held(p).numbers(channels)) for p, channels in groups]
        return self._flat.mark(self._partitions, numbers, self.inbox_partitions)

    def online(self, p: int, channel: bytes) -> int:
        """How many members of a channel are online."""
        return self._held(p).online(channel)

    def resize(self, inbox_partitions: int) -> None:
        """Place users in another number of inbox partitions, and count again. Users that belong to another partition
        than before are offline until their clients connect to the server that owns it. Nothing of the partitions
        of `presence` that are new was applied, and those that are gone are forgotten."""
        whole_number("inbox partitions", inbox_partitions, at_least=1)
        for partition in self._partitions.values():
            partition.settle()
        self._users.place_again(inbox_partitions)
        self.inbox_partitions = inbox_partitions
        for partition in self._partitions.values():
            partition.count(inbox_partitions)
        kept = self.presence_offsets[:inbox_partitions]
        self.presence_offsets = kept + [None] * (inbox_partitions - len(kept))

    def size(self) -> TableSize:
        """How much the table holds."""
        held = self._partitions.values()
        return TableSize(
            bytes=self._users.nbytes + self._flat.nbytes + sum(partition.nbytes for partition in held),
            channels=sum(partition.channels() for partition in held),
            users=len(self._users),
            online=self._users.online_count(),
            memberships=sum(partition.memberships() for partition in held),
        )

    def _held(self, p: int) -> FanoutPartition:
        try:
            return self._partitions[p]
        except KeyError:
            raise InvalidValue("fan-out partition", p, "one that the table holds: add it first") from None
