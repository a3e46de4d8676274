"""Memberships at ADR-009's extreme scale, for `bench.fanout_table`."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from shardyard.fanout.routing import (
    Manifest,
    finish_snapshot,
    new_version,
    read_users,
    write_partition,
    write_users,
)
from shardyard.model import Position
from shardyard.wire.channels import FANOUT_PARTITIONS

USERS = 2_000_000
CHANNELS = 5_000_000
CHANNELS_PER_USER = 200
MEMBERSHIPS = USERS * CHANNELS_PER_USER
INBOXES = 256
WRITTEN = 16
"""Fan-out partitions that are written. The others of the whole table have the same content: to a process these are
mappings of their own, which it has in memory besides the others."""
SHARE = 16
"""Fan-out partitions of one of 16 workers."""
MIX = ((0.01, 5610), (0.10, 150), (0.89, 10))
"""Share and mean size of large, medium and small channels."""
MAX_MEMBERS = 200_000
TWO_DEVICES = 0.25
"""Share of users with a second device."""


def channel_sizes(rng: np.random.Generator, channels: int, users: int) -> npt.NDArray[np.int64]:
    """The members of each channel, in a random order of kinds; sizes of a kind are distributed exponentially."""
    means = rng.choice([mean for _, mean in MIX], channels, p=[share for share, _ in MIX])
    sizes = np.maximum(rng.exponential(means), 1).astype(np.int64)
    return np.minimum(sizes, min(MAX_MEMBERS, users))


def memberships(seed: int, channels: int, users: int, total: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Channels and users of `total` memberships; the last channels fill up or are cut."""
    rng = np.random.default_rng(seed)
    sizes = channel_sizes(rng, channels, users)
    of_channel = np.repeat(np.arange(channels), np.rint(sizes * (total * 1.02 / sizes.sum())).astype(np.int64))
    pairs = np.sort(of_channel * users + rng.integers(0, users, len(of_channel)))
    pairs = rng.permutation(pairs[np.diff(pairs, prepend=-1) > 0])[:total]
    return pairs // users, pairs % users


def names(prefix: str, first: int, count: int) -> pa.Array:
    numbers = pa.array(np.arange(first, first + count)).cast(pa.string())
    return pc.binary_join_element_wise(prefix, numbers, "").cast(pa.binary())


def write_snapshot(folder: Path, partitions: int, users: int) -> None:
    version = new_version(folder)
    members = names("user-", 0, users)
    doubled = np.flatnonzero(np.random.default_rng(0).random(users) < TWO_DEVICES)
    device_users = pa.concat_arrays([members, members.take(pa.array(doubled))])
    devices = pa.array([b"phone"] * users + [b"laptop"] * len(doubled), pa.binary())
    file = write_users(folder, version, members, device_users, devices)
    index = read_users(folder, file).names
    channels = CHANNELS // FANOUT_PARTITIONS
    files = {}
    for p in range(min(partitions, WRITTEN)):
        of_channel, numbers = memberships(p, channels, users, MEMBERSHIPS // FANOUT_PARTITIONS)
        rows = names("ch_", p * channels, channels).take(pa.array(of_channel))
        files[p] = write_partition(folder, version, rows, numbers, index, p)
    files.update({p: files[p % WRITTEN] for p in range(WRITTEN, partitions)})
    positions: list[Position | None] = [Position(1, 0)] * FANOUT_PARTITIONS
    manifest = Manifest(
        users=file,
        partitions=files,
        members=positions,
        presence=[Position(1, 0)] * INBOXES,
        inbox_partitions=INBOXES,
    )
    finish_snapshot(folder, manifest)
