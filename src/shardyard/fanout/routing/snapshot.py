"""Reads snapshots of the routing table. Files are checked, then memory-mapped: processes on a machine share them."""

import mmap
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from xxhash import xxh64

from shardyard.fanout.routing.manifest import Manifest, SnapshotFile, load_manifest
from shardyard.fanout.routing.memberships import Memberships
from shardyard.fanout.routing.names import NameIndex
from shardyard.model import Damaged, Position, whole_number

_CHUNK_BYTES = 2**20


@dataclass(frozen=True, slots=True, eq=False)
class SnapshotUsers:
    """The users of a snapshot. The number of a user is its rank in `names`."""

    names: NameIndex
    hashes: npt.NDArray[np.uint32]
    """The fnv1a32 of each user, by number."""
    device_users: npt.NDArray[np.uint32]
    """The user of each device that was connected, ascending."""
    devices: npt.NDArray[np.uint64]
    """The hash of each of these devices."""
    checksum: str
    """Partitions with the same checksum of the users' file number users alike."""
    mapped: mmap.mmap

    def release_pages(self) -> None:
        """Release the pages in memory. Those that are needed again are read again."""
        self.mapped.madvise(mmap.MADV_DONTNEED)


@dataclass(frozen=True, slots=True, eq=False)
class SnapshotPartition:
    """The members of the channels of one fan-out partition."""

    channels: NameIndex
    memberships: Memberships
    """With the numbers of `users` and `channels`."""
    position: Position | None
    """The records of `members` before it are included; None if there was no record to include."""
    users: SnapshotUsers


class Snapshot:
    """A snapshot in a folder, at the version that was current when it was opened."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest

    @classmethod
    def open(cls, folder: Path | str) -> "Snapshot":
        """Open the snapshot of a folder; its errors are those of `load_manifest`. The files are read when they are
        needed; then `Damaged` is raised if one is missing or not what was written."""
        return cls(Path(folder), load_manifest(Path(folder)))

    @property
    def presence(self) -> list[Position | None]:
        """Per inbox partition: the records of `presence` before it are included."""
        return list(self.manifest.presence)

    @property
    def members(self) -> list[Position | None]:
        """Per fan-out partition: the records of `members` before it are included."""
        return list(self.manifest.members)

    @cached_property
    def users(self) -> SnapshotUsers:
        """The users and their devices."""
        return read_users(self.folder, self.manifest.users)

    def partition(self, p: int) -> SnapshotPartition:
        """The channels of a fan-out partition. It may be called in another thread than the table's."""
        position = self.manifest.members[whole_number("fan-out partition", p, at_least=0)]
        file = self.manifest.partitions.get(p)
        if file is None:
            none = np.empty(0, np.uint32)
            channels, _ = NameIndex.build(pa.array([], pa.binary()))
            return SnapshotPartition(channels, Memberships.build(none, none), position, self.users)
        columns = _Columns(self.folder, file)
        memberships = Memberships(
            columns.numbers("starts"),
            columns.numbers("low"),
            columns.numbers("members"),
            searchable=columns.mapped,
            origin=columns.origin("low"),
        )
        return SnapshotPartition(columns.names(), memberships, position, self.users)


def read_users(folder: Path, file: SnapshotFile) -> SnapshotUsers:
    """The users of a snapshot whose manifest may not be written yet."""
    columns = _Columns(folder, file)
    return SnapshotUsers(
        columns.names(),
        columns.numbers("fnv1a32"),
        columns.numbers("device_users"),
        columns.numbers("devices"),
        file.checksum,
        columns.mapped,
    )


class _Columns:
    """The columns of a file, each a list in its only row, because they differ in length."""

    def __init__(self, folder: Path, file: SnapshotFile) -> None:
        path = folder / file.path
        self._path = str(path)
        _check(path, file)
        with path.open("rb") as opened:
            self.mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        self._buffer = pa.py_buffer(self.mapped)
        try:
            self._batch = pa.ipc.open_file(self._buffer).get_batch(0)
        except pa.ArrowInvalid as error:
            raise Damaged(self._path, str(error)) from None

    def _column(self, name: str) -> pa.Array:
        try:
            return self._batch.column(name).values
        except KeyError:
            raise Damaged(self._path, f"it has no column {name!r}") from None

    def numbers(self, name: str) -> npt.NDArray[Any]:
        numbers: npt.NDArray[Any] = self._column(name).to_numpy(zero_copy_only=True)
        return numbers

    def names(self) -> NameIndex:
        return NameIndex(self.numbers("hashes"), self._column("names"))

    def origin(self, name: str) -> int:
        """Where in the file a column of numbers begins."""
        buffer = self._column(name).buffers()[1]
        return int(buffer.address - self._buffer.address) if buffer else 0


def _check(path: Path, file: SnapshotFile) -> None:
    """Read the file once as a whole, rather than through the mapping, so that it need not stay in memory."""
    checksum = xxh64()
    try:
        with path.open("rb") as opened:
            while chunk := opened.read(_CHUNK_BYTES):
                checksum.update(chunk)
            size = opened.tell()
    except FileNotFoundError:
        raise Damaged(str(path), "the file is missing") from None
    if size != file.size:
        raise Damaged(str(path), f"it has {size} bytes, and {file.size} were written")
    if checksum.hexdigest() != file.checksum:
        raise Damaged(str(path), "its checksum is another one")
