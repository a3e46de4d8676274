"""The channels of one fan-out partition and their members."""

from collections.abc import Iterable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from shardyard.fanout.routing.changes import FEW, Changes, Names
from shardyard.fanout.routing.counts import OnlineCounts
from shardyard.fanout.routing.flat import FlatArrays, address
from shardyard.fanout.routing.memberships import Memberships, Numbers, distinct, pair_keys
from shardyard.fanout.routing.names import UNKNOWN, GrowingNames, NameIndex
from shardyard.fanout.routing.users import Users
from shardyard.model import Position

MERGE_ROWS = 256
"""Changes are kept beside the memberships up to as many, or an eighth of those. Then both are merged into new flat
arrays, while the caller waits: half a millisecond for few memberships, and 1 to 2 microseconds for each change if they
are many, which is less than the changes take one by one."""
WAITING_ROWS = 1_000_000
"""Up to as many changes wait until they are needed. Together they are applied faster."""


class FanoutPartition:
    """Memberships in flat arrays that do not change, and what was added and removed since.

    Changes wait until someone looks up a channel, because reading a topic from its start brings many of them.
    """

    def __init__(
        self,
        p: int,
        users: Users,
        flat: FlatArrays,
        inbox_partitions: int,
        channels: NameIndex | None = None,
        memberships: Memberships | None = None,
        position: Position | None = None,
    ) -> None:
        self.position = position
        """All records of `members` before it were applied."""
        self._p = p
        self._users = users
        self._flat = flat
        self._added: dict[int, set[int]] = {}
        """User -> channels that the base does not have."""
        self._removed: dict[int, set[int]] = {}
        """User -> channels that only the base has."""
        self._waiting: list[tuple[Numbers, Numbers, Numbers]] = []
        self._waiting_rows = 0
        empty = np.empty(0, np.int64)
        self._set_base(channels, memberships or Memberships.build(empty, empty), inbox_partitions)

    def _set_base(self, channels: NameIndex | None, memberships: Memberships, inbox_partitions: int) -> None:
        self._channels = GrowingNames(channels)
        self._base = memberships
        self.forget()
        self._added, self._removed = {}, {}
        self._changed_rows = 0
        self.count(inbox_partitions)

    def forget(self) -> None:
        """The flat arrays are about to be replaced, or the partition is dropped."""
        self._flat.forget_changes(self._p, (*self._added, *self._removed))
        self._flat.move(self._p)

    def count(self, inbox_partitions: int) -> None:
        """Count the online members of all channels again, for this number of inbox partitions."""
        users, channels = self._base.rows()
        if self._added or self._removed:
            keys = self._current_keys()
            users, channels = (keys >> np.uint64(32)).astype(np.uint32), keys.astype(np.uint32)
        sizes = (len(self._channels), inbox_partitions)
        inboxes, online = self._users.inboxes[users], self._users.are_online(users)
        self._flat.move(self._p)
        self._counts = OnlineCounts(channels, inboxes, online, sizes, partial(self._flat.move, self._p))

    # Changes of members --------------------------------------------------------------------------------------

    def apply(self, changes: Changes) -> None:
        """Apply joins and leaves, in order."""
        if not len(changes.keys):
            return
        channels, users = self._channels.number(changes.keys), self._users.number(changes.names)
        self._waiting.append((users, channels, np.asarray(changes.added, bool)))
        self._waiting_rows += len(users)
        if self._waiting_rows > max(WAITING_ROWS, len(self._base)):
            self.settle()

    def settle(self) -> None:
        """Apply the changes that wait."""
        if not self._waiting:
            return
        users, channels, added = (np.concatenate(columns) for columns in zip(*self._waiting, strict=True))
        self._waiting, self._waiting_rows = [], 0
        limit = max(MERGE_ROWS, len(self._base) // 8)
        if self._changed_rows + len(users) > limit:
            self._merge(pair_keys(users, channels), added)
            return
        for user, channel, joins in zip(users.tolist(), channels.tolist(), added.tolist(), strict=True):
            self._change(user, channel, joins)

    def _change(self, user: int, channel: int, joins: bool) -> None:
        """Apply one join or leave, unless it is no change."""
        in_base = channel < len(self._channels.base) and channel in self._base.of(user)
        others = self._removed if in_base else self._added
        # A pair that the base has is listed if it was removed, another one if it was added.
        listed, should_be_listed = channel in others.get(user, ()), joins != in_base
        if listed == should_be_listed:
            return
        if should_be_listed:
            others.setdefault(user, set()).add(channel)
            self._changed_rows += 1
            self._flat.note_change(self._p, user)
        else:
            others[user].remove(channel)
            self._changed_rows -= 1
            if not others[user]:
                del others[user]
                if user not in self._added and user not in self._removed:
                    self._flat.forget_changes(self._p, (user,))
        if self._users.is_online(user):
            self._counts.add(channel, self._users.inbox(user), 1 if joins else -1)

    def _merge(self, changed: npt.NDArray[np.uint64], added: npt.NDArray[np.bool_]) -> None:
        """Apply changes, of which the last one of a pair counts, and move everything into new flat arrays."""
        current = self._current_keys()
        keys = np.concatenate([current, changed])
        present = np.concatenate([np.ones(len(current), bool), added])
        order = np.argsort(keys, kind="stable")
        keys, present = keys[order], present[order]
        last = np.ones(len(keys), bool)
        last[:-1] = keys[1:] != keys[:-1]
        keys = keys[last & present]
        # Channels without members are forgotten, so that their number has a limit.
        used, rows = np.unique(keys.astype(np.uint32), return_inverse=True)
        names, ranks = NameIndex.build(self._channels.all().take(pa.array(used)))
        users = keys >> np.uint64(32)
        self._set_base(names, Memberships.build(users, ranks[rows]), self._counts.partitions)

    def _current_keys(self) -> npt.NDArray[np.uint64]:
        """All memberships but those that wait, as ascending `pair_keys`."""
        keys = self._base.keys()
        if self._removed:
            keys = np.setdiff1d(keys, _keys_of(self._removed), assume_unique=True)
        return distinct(np.concatenate([keys, _keys_of(self._added)])) if self._added else keys

    # Changes of presence -------------------------------------------------------------------------------------

    def change_presence(self, user: int, inbox: int, change: int) -> None:
        """Count a user in (1) or out (-1) in all of its channels."""
        add = self._counts.add
        removed = self._removed.get(user, ())
        for channel in self._base.of(user):
            if channel not in removed:
                add(channel, inbox, change)
        for channel in self._added.get(user, ()):
            add(channel, inbox, change)

    def change_count(self, channel: int, inbox: int, change: int) -> None:
        """Count a user in (1) or out (-1) in one channel."""
        self._counts.add(channel, inbox, change)

    def lay_out(self, row: npt.NDArray[np.int64]) -> tuple[Numbers, ...]:
        """Set a row of the layout for the compiled loop. Returns the arrays whose addresses it has."""
        base, counts = self._base, self._counts
        row[:5] = (
            address(base.starts, 4),
            address(base.low, 1),
            address(base.channels),
            base.channels.itemsize,
            len(base.starts) - 1,
        )
        row[5:] = (
            address(counts.starts, 4),
            address(counts.inboxes),
            counts.inboxes.itemsize,
            address(counts.counts),
            counts.counts.itemsize,
            counts.channels,
        )
        return base.starts, base.low, base.channels, counts.starts, counts.inboxes, counts.counts

    def change_presences(self, users: npt.NDArray[np.int64], changes: npt.NDArray[np.int64]) -> None:
        """Count many distinct users in or out. `changes`: 1 or -1 for each user."""
        places, channels = self._base.of_many(users)
        cells = [(users[places], channels, changes[places])]
        for listed, sign in ((self._added, 1), (self._removed, -1)):
            rows = [
                (user, channel, sign * change)
                for user, change in zip(users.tolist(), changes.tolist(), strict=True)
                for channel in listed.get(user, ())
            ] if listed else []  # fmt: skip
            if rows:
                changed = np.array(rows, np.int64)
                cells.append((changed[:, 0], changed[:, 1], changed[:, 2]))
        # All at once: a channel that a user has left is among those of the base, so that a count without what corrects
        # this could fall below zero.
        user, channel, change = (np.concatenate(columns) for columns in zip(*cells, strict=True))
        self._counts.add_all(channel, self._users.inboxes[user], change)

    # Lookup --------------------------------------------------------------------------------------------------

    def numbers(self, channels: Names) -> Sequence[int] | Numbers:
        """The numbers of these channels, `UNKNOWN` for those that have never had a member."""
        self.settle()
        if isinstance(channels, list):
            return list(map(self._channels.find, channels))
        return self._channels.find_all(channels.to_pylist() if len(channels) <= FEW else channels)

    def where(self, channels: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """A row for each of these numbers of channels: in which inbox partitions it has online members."""
        return self._counts.where(channels)

    def mark_later(self, channels: Sequence[int] | Numbers, flags: npt.NDArray[np.bool_]) -> None:
        """Set the flags of those inbox partitions of these channels that are not in the flat arrays."""
        self._counts.mark_later(channels, flags)

    def online(self, channel: bytes) -> int:
        """How many members of a channel are online."""
        self.settle()
        number = self._channels.find(channel)
        return 0 if number == UNKNOWN else self._counts.total(number)

    def channels(self) -> int:
        """How many channels are known, including such that had members and have none any more."""
        return len(self._channels)

    def memberships(self) -> int:
        self.settle()
        added = sum(map(len, self._added.values()))
        return len(self._base) + added - (self._changed_rows - added)

    @property
    def nbytes(self) -> int:
        flat = self._base.nbytes + self._counts.nbytes + self._channels.base.nbytes
        changed = 300 * (len(self._added) + len(self._removed)) + 60 * self._changed_rows
        return flat + changed + 160 * len(self._channels.added) + 17 * self._waiting_rows


def _keys_of(listed: dict[int, set[int]]) -> npt.NDArray[np.uint64]:
    def pairs() -> Iterable[int]:
        return (user << 32 | channel for user, channels in listed.items() for channel in channels)

    return np.sort(np.fromiter(pairs(), np.uint64))
