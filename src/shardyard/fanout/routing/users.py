"""The users that a routing table knows: their numbers, their inbox partitions, and which devices are connected."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from xxhash import xxh64_intdigest

from shardyard.fanout.routing.changes import Names
from shardyard.fanout.routing.names import GrowingNames, Ids, NameIndex
from shardyard.placement import Modulus, hash_named, partitioner_named

STORED_HASH = "fnv1a32"
"""By which `inbox` usually places users; a snapshot has these hashes."""
_xxh64 = hash_named("xxh64")
_FREE = 0
"""In place of a device's hash."""


class Users:
    """A user is online while it has at least one device.

    Devices are known by their hash. The first two of a user are in flat arrays, for others there is a dictionary: most
    users have one or two, and a dictionary of sets would take far more memory.
    """

    def __init__(
        self,
        partitions: int,
        partitioner: str,
        hash_: str,
        names: NameIndex | None = None,
        stored_hashes: npt.NDArray[np.uint32] | None = None,
    ) -> None:
        """`partitions`, `partitioner`, `hash_`: how the topic `inbox` places users."""
        self.names = GrowingNames(names)
        self._stored_hashes = stored_hashes
        self._placement = (partitioner, hash_)
        count = len(self.names)
        self._first: npt.NDArray[np.uint64] = np.zeros(count, np.uint64)
        self._second: npt.NDArray[np.uint64] = np.zeros(count, np.uint64)
        self._more: dict[int, set[int]] = {}
        self.place(partitions)

    def place(self, partitions: int) -> None:
        """Compute the inbox partition of every user."""
        name, hash_ = self._placement
        self._partitioner = partitioner_named(name, partitions, hash_)
        if isinstance(self._partitioner, Modulus) and hash_ == STORED_HASH and self._stored_hashes is not None:
            base = self._stored_hashes % np.uint32(partitions)
        else:
            base = self._partitioner.place_array(self.names.base.names).to_numpy()
        added = self._partitioner.place_array(pa.array(list(self.names.added), pa.binary())).to_numpy()
        self.inboxes: npt.NDArray[Any] = np.zeros(len(self._first), np.min_scalar_type(max(partitions - 1, 255)))
        self.inboxes[: len(base)] = base
        self.inboxes[len(base) : len(base) + len(added)] = added
        self._view()

    def place_again(self, partitions: int) -> None:
        """Place users in another number of inbox partitions. Those that belong to another one than before have no
        devices."""
        count, before = len(self.names), self.inboxes
        self.place(partitions)
        self.disconnect_all(np.flatnonzero(before[:count] != self.inboxes[:count]))

    def _view(self) -> None:
        # For one user at a time: these give Python numbers without creating NumPy's.
        self._first_view, self._second_view = self._first.data, self._second.data
        self._inbox_view = self.inboxes.data

    def __len__(self) -> int:
        return len(self.names)

    @property
    def nbytes(self) -> int:
        flat = self._first.nbytes + self._second.nbytes + self.inboxes.nbytes + self.names.base.nbytes
        if self._stored_hashes is not None:
            flat += self._stored_hashes.nbytes
        return int(flat + 160 * len(self.names.added) + 400 * len(self._more))

    def number(self, names: Names) -> Ids:
        """The number of each user. Those that are not known yet are added."""
        known = len(self.names)
        numbers = self.names.number(names)
        if len(self.names) > known:
            self._grow(known)
        return numbers

    def _grow(self, known: int) -> None:
        """Make room for the users from number `known` on, and place them."""
        if len(self.names) > len(self._first):
            room = len(self.names) + len(self.names) // 4 + 1024
            self._first, self._second, self.inboxes = (
                np.concatenate([values[:known], np.zeros(room - known, values.dtype)])
                for values in (self._first, self._second, self.inboxes)
            )
            self._view()
        new = len(self.names) - known
        added = list(self.names.added)[-new:] if new > 1 else [next(reversed(self.names.added))]
        if new <= 8:
            for number, name in enumerate(added, known):
                self._inbox_view[number] = self._partitioner.place(name)
        else:
            places = self._partitioner.place_array(pa.array(added, pa.binary()))
            self.inboxes[known : known + new] = places.to_numpy()

    def inbox(self, user: int) -> int:
        """The inbox partition of a user."""
        return self._inbox_view[user]

    def is_online(self, user: int) -> bool:
        return self._first_view[user] != _FREE

    def are_online(self, users: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        """Whether each of these users is online."""
        flags: npt.NDArray[np.bool_] = self._first[users] != _FREE
        return flags

    def online_count(self) -> int:
        """How many are online."""
        return int(np.count_nonzero(self._first[: len(self.names)] != _FREE))

    def online_in(self, inbox: int) -> Ids:
        """The users of an inbox partition that are online."""
        count = len(self.names)
        return np.flatnonzero((self.inboxes[:count] == inbox) & (self._first[:count] != _FREE))

    def load_devices(self, users: npt.NDArray[np.uint32], devices: npt.NDArray[np.uint64]) -> None:
        """Add distinct pairs of users and hashes of devices, sorted by user, where no user has devices yet."""
        new = np.ones(len(users), bool)
        new[1:] = users[1:] != users[:-1]
        rows = np.arange(len(users))
        place = rows - np.maximum.accumulate(np.where(new, rows, 0))
        self._first[users[place == 0]] = devices[place == 0]
        self._second[users[place == 1]] = devices[place == 1]
        for row in np.flatnonzero(place > 1).tolist():
            self._more.setdefault(int(users[row]), set()).add(int(devices[row]))

    def connect(self, user: int, device: int) -> None:
        """Add a device, if the user does not have it."""
        first, second = self._first_view, self._second_view
        if first[user] == _FREE:
            first[user] = device
        elif first[user] == device or second[user] == device:
            return
        elif second[user] == _FREE:
            second[user] = device
        else:
            self._more.setdefault(user, set()).add(device)

    def disconnect(self, user: int, device: int) -> None:
        """Remove a device, if the user has it. The others move up, so that the first place is free only if all are."""
        first, second = self._first_view, self._second_view
        more = self._more.get(user)
        if more is not None and device in more:
            more.remove(device)
        elif first[user] == device:
            first[user] = second[user]
            second[user] = more.pop() if more else _FREE
        elif second[user] == device:
            second[user] = more.pop() if more else _FREE
        if more is not None and not more:
            del self._more[user]

    def disconnect_all(self, users: Ids) -> None:
        """Remove all devices of these users."""
        self._first[users] = _FREE
        self._second[users] = _FREE
        if self._more:
            for user in users.tolist():
                self._more.pop(user, None)


def device_hashes(devices: Names) -> Iterable[int]:
    """The hash of each device."""
    if isinstance(devices, list):
        return [xxh64_intdigest(device) or 1 for device in devices]
    hashes: list[int] = device_hash_array(devices).tolist()
    return hashes


def device_hash_array(devices: pa.Array) -> npt.NDArray[np.uint64]:
    """The same as an array."""
    hashes: npt.NDArray[np.uint64] = _xxh64.array(devices)
    hashes[hashes == _FREE] = 1
    return hashes
