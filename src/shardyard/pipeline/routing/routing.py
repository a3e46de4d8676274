"""routing: the topics `members` and `presence` -> a snapshot of the routing table, which fan-out workers start from.

A run reads both topics up to where they end when it starts, and records these positions in the snapshot, so that a
worker applies what was appended since. It always reads the whole topics. A run that is killed leaves the snapshot as it
was: the manifest, which names the files, is replaced last.
"""

import contextlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession

from shardyard.fanout.routing import Manifest, SnapshotFile, finish_snapshot, new_version, write_users
from shardyard.fanout.routing.manifest import FILE_NAME, load_manifest
from shardyard.log import Log
from shardyard.model import Damaged, InvalidValue, NotOurs, Position
from shardyard.pipeline.atomic_files import exclusive_lock
from shardyard.pipeline.blocking import blocking
from shardyard.pipeline.routing.files import write_partitions
from shardyard.pipeline.routing.pairs import Pairs, devices, memberships, users
from shardyard.pipeline.source.offset_lookup import topic_spans
from shardyard.pipeline.source.options import absolute
from shardyard.pipeline.spark_errors import translate_spark_errors
from shardyard.wire.channels import FANOUT_PARTITIONS, HASH, MEMBERS, PARTITIONER, PRESENCE

_LOCK = "lock"
_SCHEMA = "partition int, offset long, key binary, value binary"

OnStep = Callable[[str], None]
Positions = Mapping[str, Sequence[Position]]
"""Of each topic: where each of its partitions ended."""


@dataclass(frozen=True, slots=True)
class RoutingRun:
    """The result of a run."""

    snapshot: str
    version: str
    channels: int
    """With at least one member."""
    users: int
    """Members of a channel, or online."""
    memberships: int
    devices: int
    """Clients that are connected."""
    malformed: int
    """Records that hold no change, and were left out."""
    bytes: int
    """Of all files."""


def routing(spark: SparkSession, log: str, folder: Path | str, *, on_step: OnStep = lambda _: None) -> RoutingRun:
    """Take a snapshot of the routing table at the current ends of the topics."""
    url, target = absolute(log), Path(folder).absolute()
    check_folder(target)
    with exclusive_lock(target / _LOCK, f"the snapshot in {target} (another run is in progress)"):
        with blocking(url) as opened:
            ends = opened.wait(current_ends(opened.log))
        members, presence = (read_upto(spark, url, topic, ends[topic]) for topic in (MEMBERS, PRESENCE))
        with translate_spark_errors():
            return write_snapshot(members, presence, ends, target, on_step=on_step)


def check_folder(folder: Path) -> None:
    """Raise an error if the folder holds anything but a snapshot, or one that another Shardyard wrote. A damaged one
    will be replaced."""
    if (folder / FILE_NAME).exists():
        with contextlib.suppress(Damaged, InvalidValue):
            load_manifest(folder)
    elif folder.exists() and not (folder.is_dir() and all(map(_is_ours, folder.iterdir()))):
        raise NotOurs(str(folder), "a folder with a snapshot of the job `routing`, nor an empty one")


def _is_ours(path: Path) -> bool:
    """Whether a run that was killed before the first manifest may have left it."""
    return path.name == _LOCK or (path.is_dir() and re.fullmatch("[0-9a-f]{32}", path.name) is not None)


async def current_ends(log: Log) -> dict[str, list[Position]]:
    """Where the partitions of both topics end now."""
    members = await log.topic(MEMBERS)
    placement = (members.partitions, members.partitioner, members.hash)
    if placement != (FANOUT_PARTITIONS, PARTITIONER, HASH):
        expected = f"{FANOUT_PARTITIONS} partitions by {PARTITIONER} of {HASH}"
        raise InvalidValue(f"placement of the topic {MEMBERS!r}", placement, expected)
    spans = await topic_spans(log, (MEMBERS, PRESENCE))
    return {name: [Position(has.epoch, span.end) for span in has.spans] for name, has in spans.items()}


def read_upto(spark: SparkSession, log: str, topic: str, ends: Sequence[Position]) -> DataFrame:
    """The records of a topic before these positions."""
    offsets = {topic: {p: end.offset for p, end in enumerate(ends)}}
    reader = spark.read.format("shardyard").schema(_SCHEMA).options(log=log, topics=topic)
    # `presence` is trimmed up to a record that clears a partition. If that happens now, what is missing here is void
    # for those who apply the records after the snapshot, too.
    reader = reader.options(endingOffsets=json.dumps(offsets), failOnDataLoss=str(topic != PRESENCE).lower())
    return reader.load()


def write_snapshot(
    members: DataFrame, presence: DataFrame, ends: Positions, folder: Path, *, on_step: OnStep = lambda _: None
) -> RoutingRun:
    """Write a snapshot of these records (with the columns `packing.RECORDS`), which are those before `ends`."""
    on_step("reading who is online")
    malformed, user_column, device_column = _collect_devices(presence.transform(devices))
    pairs = members.transform(memberships).persist(StorageLevel.DISK_ONLY)
    try:
        on_step("reading the members of channels")
        names = pairs.transform(users).toArrow()["user"]
        names = pa.chunked_array([*names.chunks, *user_column.chunks], pa.binary()).unique()
        on_step(f"writing the files of {len(names)} users and their channels")
        version = new_version(folder)
        users_file = write_users(folder, version, names, user_column, device_column)
        rows = write_partitions(pairs, folder, version, users_file).collect()
    finally:
        pairs.unpersist()
    partitions = {row["partition"]: SnapshotFile(row["path"], row["size"], row["checksum"]) for row in rows}
    manifest = Manifest(
        users=users_file,
        partitions=partitions,
        members=list(ends[MEMBERS]),
        presence=list(ends[PRESENCE]),
        inbox_partitions=len(ends[PRESENCE]),
    )
    finish_snapshot(folder, manifest)
    return RoutingRun(
        snapshot=str(folder),
        version=version,
        channels=sum(row["channels"] for row in rows),
        users=len(names),
        memberships=sum(row["memberships"] for row in rows),
        devices=len(user_column),
        malformed=malformed + sum(row["malformed"] for row in rows),
        bytes=users_file.size + sum(row["size"] for row in rows),
    )


def _collect_devices(pairs: DataFrame) -> tuple[int, pa.ChunkedArray, pa.ChunkedArray]:
    """How many records of `presence` hold no change, and the user and the device of each connected client."""
    rows = pairs.toArrow()
    found = [Pairs.from_bytes(stored) for stored in rows["pairs"]]
    columns = (
        pa.chunked_array([column.dictionary.take(column.indices) for column in columns], pa.binary())
        for columns in ([pair.keys for pair in found], [pair.names for pair in found])
    )
    return sum(rows["malformed"].to_pylist()), *columns
