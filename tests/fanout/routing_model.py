"""A plain dictionary model of the routing table, and short ways to write records."""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from shardyard.placement import Jump, Modulus
from shardyard.wire.channels import FANOUT_PARTITIONS

Record = tuple[bytes | None, bytes | None]
"""Key and value."""
ALL = 10**9


def column(values: Iterable[bytes | None]) -> pa.Array:
    return pa.array(list(values), pa.binary())


def columns(records: Sequence[Record]) -> tuple[pa.Array, pa.Array]:
    """The keys and values of records."""
    return column(key for key, _ in records), column(value for _, value in records)


def fanout_partition(channel: bytes) -> int:
    return Jump("xxh64", FANOUT_PARTITIONS).place(channel)


def inbox_partition(user: bytes, partitions: int) -> int:
    return Modulus("fnv1a32", partitions).place(user)


def is_change(record: Record) -> bool:
    key, value = record
    if not key or value is None or len(value) < 2 or value[:1] not in (b"+", b"-"):
        return False
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


class Members:
    """Channel -> members, from records of one partition of `members`."""

    def __init__(self) -> None:
        self.channels: dict[bytes, set[bytes]] = {}

    def apply(self, records: Iterable[Record]) -> None:
        for record in filter(is_change, records):
            key, value = record
            assert key is not None
            assert value is not None
            members = self.channels.setdefault(key, set())
            (members.add if value[:1] == b"+" else members.discard)(value[1:])

    def copy(self) -> "Members":
        twin = Members()
        twin.channels = {channel: set(members) for channel, members in self.channels.items()}
        return twin


class Presence:
    """User -> devices, from records of all partitions of `presence`."""

    def __init__(self) -> None:
        self.devices: dict[bytes, set[bytes]] = {}

    def apply(self, q: int, partitions: int, records: Iterable[Record]) -> None:
        for record in records:
            key, value = record
            if key is None and value == b"=":
                self.clear(q, partitions)
            elif is_change(record):
                assert key is not None
                assert value is not None
                if inbox_partition(key, partitions) != q:  # it was written before `inbox` got more partitions
                    continue
                devices = self.devices.setdefault(key, set())
                (devices.add if value[:1] == b"+" else devices.discard)(value[1:])

    def clear(self, q: int, partitions: int) -> None:
        self.devices = {u: d for u, d in self.devices.items() if inbox_partition(u, partitions) != q}

    def resize(self, before: int, after: int) -> None:
        """Users that belong to another inbox partition than before have to connect there."""
        self.devices = {
            user: devices
            for user, devices in self.devices.items()
            if inbox_partition(user, before) == inbox_partition(user, after)
        }

    def copy(self) -> "Presence":
        twin = Presence()
        twin.devices = {user: set(devices) for user, devices in self.devices.items()}
        return twin


def expected(
    members: Members, presence: Presence, channels: Sequence[bytes], partitions: int
) -> tuple[npt.NDArray[np.bool_], list[int]]:
    """What `route` and `online` must give."""
    rows = np.zeros((len(channels), partitions), bool)
    counts = []
    for row, channel in enumerate(channels):
        online = [user for user in members.channels.get(channel, ()) if presence.devices.get(user)]
        counts.append(len(online))
        for user in online:
            rows[row, inbox_partition(user, partitions)] = True
    return rows, counts
