"""What a snapshot of the routing table has, and up to where in the topics. The pipeline job `routing` writes snapshots.

    <snapshot>/manifest.json                    names the other files: what it does not name is not in the snapshot
    <snapshot>/<version>/users.arrow            users with their numbers and devices
    <snapshot>/<version>/partition-<p>.arrow    channels of a fan-out partition and the numbers of their members

A file does not change. A new version is a new folder and then a new manifest, which replaces the old one in one step.
"""

import os
from pathlib import Path
from uuid import uuid4

import msgspec
from msgspec import Struct
from xxhash import xxh64_hexdigest

from shardyard.model import Damaged, InvalidValue, NotOurs, Position, WrongSchemaVersion
from shardyard.wire.channels import FANOUT_PARTITIONS, HASH, PARTITIONER

SCHEMA_VERSION = 1
FILE_NAME = "manifest.json"


class SnapshotFile(Struct, frozen=True):
    """A file of a snapshot."""

    path: str
    """Relative to the folder of the snapshot."""
    size: int
    """In bytes."""
    checksum: str
    """The xxh64 of its content."""


class Manifest(Struct, frozen=True, kw_only=True):
    """A version of the snapshot."""

    users: SnapshotFile
    partitions: dict[int, SnapshotFile]
    """By fan-out partition. One that is not here, but has a position, has no members."""
    members: list[Position | None]
    """Per fan-out partition: the records of `members` before it are in the snapshot. None if it lacks the partition."""
    presence: list[Position | None]
    """The same for each partition of `presence`."""
    inbox_partitions: int
    fanout_partitions: int = FANOUT_PARTITIONS
    partitioner: str = PARTITIONER
    hash: str = HASH


class _Stored(Struct, frozen=True):
    schema_version: int
    checksum: str
    manifest: msgspec.Raw


def save_manifest(folder: Path, manifest: Manifest) -> None:
    """Make this the manifest of a snapshot. When it returns, the new one is durable; if the process is killed before,
    the old one is valid."""
    if len(manifest.members) != manifest.fanout_partitions:
        raise InvalidValue("positions of members", len(manifest.members), f"{manifest.fanout_partitions} of them")
    if len(manifest.presence) != manifest.inbox_partitions:
        raise InvalidValue("positions of presence", len(manifest.presence), f"{manifest.inbox_partitions} of them")
    body = msgspec.json.encode(manifest)
    stored = _Stored(SCHEMA_VERSION, xxh64_hexdigest(body), msgspec.Raw(body))
    write_durably(folder / FILE_NAME, msgspec.json.encode(stored))


def load_manifest(folder: Path) -> Manifest:
    """The manifest of the snapshot in a folder. Raises `NotOurs` if it has none, `WrongSchemaVersion` if another
    Shardyard wrote it, `Damaged` if it is not what was written, and `InvalidValue` if `fanout` had other partitions."""
    path = folder / FILE_NAME
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise NotOurs(str(folder), "a folder with a snapshot", "take one with `shardyard pipeline routing`") from None
    try:
        version = msgspec.json.decode(content, type=dict[str, msgspec.Raw]).get("schema_version")
        found = msgspec.json.decode(version, type=int) if version is not None else 0
        if found != SCHEMA_VERSION:
            raise WrongSchemaVersion(str(folder), found, SCHEMA_VERSION)
        stored = msgspec.json.decode(content, type=_Stored)
        if xxh64_hexdigest(stored.manifest) != stored.checksum:
            raise Damaged(str(path), "its checksum is another one")
        manifest = msgspec.json.decode(stored.manifest, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Damaged(str(path), str(error)) from None
    placement = (manifest.fanout_partitions, manifest.partitioner, manifest.hash)
    if placement != (FANOUT_PARTITIONS, PARTITIONER, HASH):
        expected = f"{FANOUT_PARTITIONS} partitions by {PARTITIONER} of {HASH}: take a new snapshot"
        raise InvalidValue(f"placement of channels in {path}", placement, expected)
    return manifest


def write_durably(path: Path, content: bytes) -> None:
    """Write or replace a file completely or not at all."""
    draft = path.with_name(f"{path.name}.{uuid4().hex}.tmp")
    with draft.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    draft.rename(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
