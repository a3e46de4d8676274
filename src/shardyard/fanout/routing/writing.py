"""Writes snapshots of the routing table, in four steps, of which the third may run in many processes at once:

    version = new_version(folder)
    users = write_users(folder, version, names, device_users, device_names)
    file = write_partition(folder, version, channels, members, read_users(folder, users).names, p)    # for each p
    finish_snapshot(folder, Manifest(users=users, partitions={p: file, ...}, members=[...], presence=[...], ...))

`SnapshotFile`, which two of them return, is small and can be sent between processes. Nothing of it is visible to
readers before the last step. The caller makes sure that only one snapshot is written at a time.
"""

import contextlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from uuid import uuid4

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from xxhash import xxh64_hexdigest

from shardyard.fanout.routing.manifest import (
    FILE_NAME,
    Manifest,
    SnapshotFile,
    load_manifest,
    save_manifest,
    sync_folder,
    write_durably,
)
from shardyard.fanout.routing.memberships import Memberships, Numbers
from shardyard.fanout.routing.names import UNKNOWN, NameIndex
from shardyard.fanout.routing.snapshot import read_users
from shardyard.fanout.routing.users import STORED_HASH, device_hash_array
from shardyard.model import InvalidValue, Position, ShardyardError
from shardyard.placement import Jump, hash_named
from shardyard.wire.channels import FANOUT_PARTITIONS, HASH


def new_version(folder: Path) -> str:
    """Create the subfolder of a new version, and return its name."""
    version = uuid4().hex
    (folder / version).mkdir(parents=True)
    sync_folder(folder)
    return version


def write_users(
    folder: Path, version: str, names: pa.Array, device_users: pa.Array, device_names: pa.Array
) -> SnapshotFile:
    """Write the file of the users. `names`: the distinct names of all members and of all users that are online, binary
    or text. `device_users`, `device_names`: a row for each connected device."""
    index, _ = NameIndex.build(names)
    users = numbers_of(device_users, index)
    devices = device_hash_array(_binary(device_names))
    order = np.lexsort((devices, users))
    users, devices = users[order], devices[order]
    distinct = np.ones(len(order), bool)
    distinct[1:] = (users[1:] != users[:-1]) | (devices[1:] != devices[:-1])
    columns = {
        "hashes": pa.array(index.hashes),
        "names": index.names,
        "fnv1a32": pa.array(hash_named(STORED_HASH).array(index.names)),
        "device_users": pa.array(users[distinct].astype(np.uint32)),
        "devices": pa.array(devices[distinct]),
    }
    return _write(folder, f"{version}/users.arrow", columns)


def write_partition(
    folder: Path, version: str, channels: pa.Array, members: pa.Array | Numbers, users: NameIndex, p: int
) -> SnapshotFile:
    """Write the file of a fan-out partition. `channels`, `members`: a row for each membership, in any order; a
    member is its name (an Arrow array), or its number in the file of the users (a NumPy array). `users`: the names of
    that file. The same memberships give the same file, so that a task may be repeated."""
    numbers = members if isinstance(members, np.ndarray) else numbers_of(members, users)
    encoded = _binary(channels).dictionary_encode()
    index, ranks = NameIndex.build(encoded.dictionary)
    memberships = Memberships.build(numbers, ranks[encoded.indices.to_numpy()])
    columns = {
        "hashes": pa.array(index.hashes),
        "names": index.names,
        "starts": pa.array(memberships.starts),
        "low": pa.array(memberships.low),
        "members": pa.array(memberships.channels),
    }
    return _write(folder, f"{version}/partition-{p}.arrow", columns)


def numbers_of(members: pa.Array, users: NameIndex) -> npt.NDArray[np.int64]:
    """The number of each user. All of them must be in the index."""
    encoded = _binary(members).dictionary_encode()
    found = users.find_all(encoded.dictionary)
    if (found == UNKNOWN).any():
        missing = encoded.dictionary[int(np.argmin(found))].as_py()
        raise InvalidValue("user", missing, "one of the users of the snapshot")
    numbers: npt.NDArray[np.int64] = found[encoded.indices.to_numpy()]
    return numbers


def finish_snapshot(folder: Path, manifest: Manifest) -> None:
    """Make a version that is written completely the current one. The version before it stays until the next one, for
    those who are opening it; older ones are deleted."""
    keep = {_version(manifest)}
    if (folder / FILE_NAME).exists():
        with contextlib.suppress(ShardyardError):  # a version that nobody can open need not stay
            keep.add(_version(load_manifest(folder)))
    save_manifest(folder, manifest)
    for entry in folder.iterdir():
        if entry.is_dir() and entry.name not in keep:
            shutil.rmtree(entry)


def write_snapshot(
    folder: Path,
    channels: pa.Array,
    members: pa.Array,
    device_users: pa.Array,
    device_names: pa.Array,
    *,
    members_positions: Sequence[Position | None],
    presence_positions: Sequence[Position | None],
) -> None:
    """Write a snapshot of memberships (channel and member of each) and connected devices, all in this process."""
    channels, members, device_users = _binary(channels), _binary(members), _binary(device_users)
    version = new_version(folder)
    names = pa.chunked_array([members, device_users], pa.binary()).unique()
    users = write_users(folder, version, names, device_users, device_names)
    index = read_users(folder, users).names
    places = Jump(HASH, FANOUT_PARTITIONS).place_array(channels).to_numpy()
    partitions = {}
    for p in np.unique(places).tolist():
        rows = pa.array(np.flatnonzero(places == p))
        partitions[p] = write_partition(folder, version, channels.take(rows), members.take(rows), index, p)
    manifest = Manifest(
        users=users,
        partitions=partitions,
        members=list(members_positions),
        presence=list(presence_positions),
        inbox_partitions=len(presence_positions),
    )
    finish_snapshot(folder, manifest)


def _version(manifest: Manifest) -> str:
    return manifest.users.path.split("/")[0]


def _binary(names: pa.Array | pa.ChunkedArray) -> pa.Array:
    if isinstance(names, pa.ChunkedArray):
        names = pa.concat_arrays(names.chunks) if names.num_chunks else pa.array([], names.type)
    return names if names.type == pa.binary() else names.cast(pa.binary())


def _write(folder: Path, path: str, columns: dict[str, pa.Array]) -> SnapshotFile:
    """Write columns of any length as lists in one row."""
    lists = {
        name: pa.LargeListArray.from_arrays(pa.array([0, len(values)], pa.int64()), values)
        for name, values in columns.items()
    }
    batch = pa.record_batch(lists)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    content = sink.getvalue().to_pybytes()
    write_durably(folder / path, content)
    return SnapshotFile(path, len(content), xxh64_hexdigest(content))
