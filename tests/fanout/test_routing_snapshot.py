"""Snapshots of the routing table: whole or refused, never wrong."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from xxhash import xxh64_hexdigest

from shardyard.fanout.routing import (
    Manifest,
    RoutingTable,
    Snapshot,
    finish_snapshot,
    manifest,
    new_version,
    read_users,
    write_partition,
    write_snapshot,
    write_users,
)
from shardyard.model import Damaged, InvalidValue, NotOurs, Position, WrongSchemaVersion
from shardyard.placement import Jump
from shardyard.wire.channels import FANOUT_PARTITIONS
from tests.fanout.routing_model import column, columns, fanout_partition, inbox_partition

P = fanout_partition(b"general")
INBOXES = 4


def write(folder: Path, members: list[bytes], devices: list[tuple[bytes, bytes]], offset: int = 1) -> None:
    write_snapshot(
        folder,
        column([b"general"] * len(members)),
        column(members),
        column([user for user, _ in devices]),
        column([device for _, device in devices]),
        members_positions=[Position(1, offset)] * FANOUT_PARTITIONS,
        presence_positions=[Position(1, offset)] * INBOXES,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path, [b"ann", b"bob"], [(b"ann", b"phone"), (b"cleo", b"phone")])
    return tmp_path


def load(folder: Path) -> RoutingTable:
    snapshot = Snapshot.open(folder)
    table = RoutingTable(INBOXES, snapshot)
    table.add(P, snapshot.partition(P))
    return table


def test_a_table_continues_where_the_snapshot_ends(folder: Path) -> None:
    table = load(folder)
    assert table.members_offset(P) == Position(1, 1)
    assert table.presence_offsets == [Position(1, 1)] * INBOXES
    assert table.online(P, b"general") == 1
    table.apply_members(P, *columns([(b"general", b"+cleo"), (b"general", b"+new")]), Position(1, 3))
    for user in (b"new", b"bob"):
        table.apply_presence(inbox_partition(user, INBOXES), *columns([(user, b"+phone")]), Position(1, 5))
    assert table.online(P, b"general") == 4 - (inbox_partition(b"new", INBOXES) == inbox_partition(b"bob", INBOXES))


def test_a_partition_without_members_has_no_file(folder: Path) -> None:
    snapshot, other = Snapshot.open(folder), (P + 1) % FANOUT_PARTITIONS
    table = RoutingTable(INBOXES, snapshot)
    table.add(other, snapshot.partition(other))
    assert table.members_offset(other) == Position(1, 1)
    assert not table.route(other, column([b"general"])).any()


def test_a_partition_of_another_snapshot_is_renumbered(folder: Path) -> None:
    first = Snapshot.open(folder)
    table = RoutingTable(INBOXES, first)
    write(folder, [b"zoe", b"ann", b"cleo"], [], offset=9)
    table.add(P, Snapshot.open(folder).partition(P))
    assert table.online(P, b"general") == 2
    assert table.members_offset(P) == Position(1, 9)


def test_with_other_inbox_partitions_only_memberships_are_used(folder: Path) -> None:
    snapshot = Snapshot.open(folder)
    table = RoutingTable(INBOXES + 1, snapshot)
    table.add(P, snapshot.partition(P))
    assert table.presence_offsets == [None] * (INBOXES + 1)
    assert table.online(P, b"general") == 0
    q = inbox_partition(b"bob", INBOXES + 1)
    table.apply_presence(q, *columns([(b"bob", b"+phone")]), Position(1, 1))
    assert table.route(P, column([b"general"]))[0].nonzero()[0].tolist() == [q]


def test_another_placement_of_users_is_followed(folder: Path) -> None:
    snapshot = Snapshot.open(folder)
    table = RoutingTable(INBOXES, snapshot, partitioner="jump", hash_="xxh64")
    table.add(P, snapshot.partition(P))
    from_start = RoutingTable(INBOXES, partitioner="jump", hash_="xxh64")
    from_start.add(P)
    from_start.apply_members(P, *columns([(b"general", b"+ann")]), Position(1, 1))
    from_start.apply_presence(Jump("xxh64", INBOXES).place(b"ann"), *columns([(b"ann", b"+phone")]), Position(1, 1))
    assert table.route(P, column([b"general"])).any()
    assert (table.route(P, column([b"general"])) == from_start.route(P, column([b"general"]))).all()


# Bad files


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("how", ["truncated", "emptied", "longer", "missing"])
def test_a_torn_file_is_refused(folder: Path, which: int, how: str) -> None:
    path = files(folder)[which]
    content = path.read_bytes()
    if how == "missing":
        path.unlink()
    else:
        path.write_bytes({"truncated": content[:-1], "emptied": b"", "longer": content + b"\0"}[how])
        if how == "longer" and path.name == manifest.FILE_NAME:
            path.write_bytes(content + b"x")
    with pytest.raises(NotOurs if how == "missing" and path.name == manifest.FILE_NAME else Damaged):
        load(folder)


@pytest.mark.parametrize("which", range(3))
def test_a_flipped_bit_is_noticed(folder: Path, which: int) -> None:
    path = files(folder)[which]
    content = path.read_bytes()
    for place in range(0, len(content), 1 + len(content) // 100):
        path.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
        with pytest.raises((Damaged, WrongSchemaVersion, InvalidValue)):
            load(folder)
    path.write_bytes(content)
    load(folder)


def rewrite(folder: Path, old: bytes, new: bytes) -> None:
    """Change the manifest, as another Shardyard would have written it."""
    path = folder / manifest.FILE_NAME
    stored = msgspec.json.decode(path.read_bytes())
    body = msgspec.json.encode(stored["manifest"]).replace(old, new)
    stored["manifest"], stored["checksum"] = msgspec.Raw(body), xxh64_hexdigest(body)
    path.write_bytes(msgspec.json.encode(stored))


def test_another_schema_version_is_refused(folder: Path) -> None:
    path = folder / manifest.FILE_NAME
    path.write_bytes(path.read_bytes().replace(b'"schema_version":1', b'"schema_version":2'))
    with pytest.raises(WrongSchemaVersion, match="schema version 2"):
        Snapshot.open(folder)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"fanout_partitions":256', b'"fanout_partitions":128'),
        (b'"hash":"xxh64"', b'"hash":"fnv1a64"'),
        (b'"partitioner":"jump"', b'"partitioner":"modulus"'),
    ],
)
def test_another_placement_of_channels_is_refused(folder: Path, old: bytes, new: bytes) -> None:
    rewrite(folder, old, new)
    with pytest.raises(InvalidValue, match="take a new snapshot"):
        Snapshot.open(folder)


def test_a_folder_without_manifest_is_no_snapshot(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(NotOurs, match="take one with `shardyard pipeline routing`"):
            Snapshot.open(folder)


# Writing


def test_members_are_given_by_name_or_by_number(tmp_path: Path) -> None:
    version = new_version(tmp_path)
    users = write_users(tmp_path, version, column([b"ann", b"bob"]), column([]), column([]))
    index = read_users(tmp_path, users).names
    numbers = np.array([index.find(b"bob"), index.find(b"ann"), index.find(b"bob")])
    channels = pa.array(["general", "general", "random"])
    by_name = write_partition(tmp_path, version, channels, pa.array(["bob", "ann", "bob"]), index, P)
    assert write_partition(tmp_path, version, channels, numbers, index, P) == by_name
    with pytest.raises(InvalidValue, match="stranger"):
        write_partition(tmp_path, version, pa.array(["general"]), pa.array(["stranger"]), index, P)


def test_positions_must_be_complete(tmp_path: Path) -> None:
    version = new_version(tmp_path)
    users = write_users(tmp_path, version, column([]), column([]), column([]))
    for members, presence in ((255, 4), (256, 3)):
        bad = Manifest(
            users=users, partitions={}, members=[None] * members, presence=[None] * presence, inbox_partitions=4
        )
        with pytest.raises(InvalidValue, match="positions"):
            finish_snapshot(tmp_path, bad)
    assert not (tmp_path / manifest.FILE_NAME).exists()


def test_the_version_before_stays_for_those_who_are_opening_it(folder: Path) -> None:
    first = Snapshot.open(folder)
    write(folder, [b"zoe"], [(b"zoe", b"phone")], offset=2)
    table = RoutingTable(INBOXES, first)
    table.add(P, first.partition(P))
    assert table.online(P, b"general") == 1
    write(folder, [b"zoe"], [], offset=3)
    assert len([path for path in folder.iterdir() if path.is_dir()]) == 2
    with pytest.raises(Damaged, match="missing"):
        first.partition(P)
    assert table.size().memberships == 2  # what is mapped stays readable


STOPPED = """
import os, signal, sys
from pathlib import Path
from shardyard.fanout.routing import manifest
from tests.fanout.test_routing_snapshot import write
calls, write_durably = 0, manifest.write_durably
rename = Path.rename
def stop_before(self, target):
    global calls
    calls += 1
    if calls == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    return rename(self, target)
Path.rename = stop_before
write(Path(sys.argv[1]), [b"zoe"], [(b"zoe", b"phone")], offset=2)
"""


@pytest.mark.processes
@pytest.mark.parametrize("file", [1, 2, 3])
def test_killed_while_writing_the_old_snapshot_is_valid(folder: Path, file: int) -> None:
    killed = subprocess.run(
        [sys.executable, "-c", STOPPED, str(folder), str(file)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL
    assert load(folder).members_offset(P) == Position(1, 1)
    write(folder, [b"zoe"], [(b"zoe", b"phone")], offset=2)
    assert load(folder).members_offset(P) == Position(1, 2)
