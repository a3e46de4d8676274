"""What moves when members or partitions are added, step by step."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardyard.model import Member, Partition
from shardyard.pipeline.plan.load import Bytes, Load
from shardyard.placement import assign, balance, generate_ids, partitioner_named, plan

GENERATED_KEYS = 200_000
"""Placed if there is no sample: enough for fractions that are exact to 0.3 percentage points."""


@dataclass(frozen=True, slots=True)
class MemberStep:
    """What moves from `before` to `after` members. Bytes moved are those of the partitions that change their owner."""

    assignor: str
    partitions: int
    before: int
    after: int
    moves: int
    fraction: float
    ideal_fraction: float
    """The fraction that has to move for an even spread: the share of the new members that can own a partition."""
    bytes_moved: int
    most_bytes_before: int
    """On one member."""
    most_bytes_after: int
    max_over_mean_before: float
    max_over_mean_after: float
    fewest_partitions: int
    """On one member, afterwards."""
    most_partitions: int


@dataclass(frozen=True, slots=True)
class PartitionStep:
    """What changes from `before` to `after` partitions: the keys that change theirs, and with them their bytes."""

    partitioner: str
    hash: str
    before: int
    after: int
    keys: int
    basis: str
    """sample, or generated keys."""
    fraction: float
    ideal_fraction: float
    bytes_moved: int
    bytes_fraction: float


def member_steps(partition_bytes: Bytes, members: int, assignor: str) -> list[MemberStep]:
    """What moves from `members` to one more, and to twice as many. `partition_bytes` has one value per partition."""
    partitions = [Partition("topic", i) for i in range(len(partition_bytes))]
    all_members = [Member(f"member-{i:06}") for i in range(2 * members)]
    old = assign(partitions, all_members[:members], assignor=assignor)
    bytes_before, _ = _on_members(old, partition_bytes, all_members[:members])
    steps = []
    for after in sorted({members + 1, 2 * members}):
        new = assign(partitions, all_members[:after], old, assignor=assignor)
        bytes_after, sizes = _on_members(new, partition_bytes, all_members[:after])
        moved = plan(old, new)
        step = MemberStep(
            assignor=assignor,
            partitions=len(partition_bytes),
            before=members,
            after=after,
            moves=len(moved.moves),
            fraction=moved.fraction,
            ideal_fraction=1 - min(members, len(partition_bytes)) / min(after, len(partition_bytes)),
            bytes_moved=round(math.fsum(partition_bytes[move.partition.index] for move in moved.moves)),
            most_bytes_before=round(float(bytes_before.max())),
            most_bytes_after=round(float(bytes_after.max())),
            max_over_mean_before=balance(bytes_before).max_over_mean,
            max_over_mean_after=balance(bytes_after).max_over_mean,
            fewest_partitions=int(sizes.min()),
            most_partitions=int(sizes.max()),
        )
        steps.append(step)
    return steps


def _on_members(
    owners: Mapping[Partition, str], partition_bytes: Bytes, members: Sequence[Member]
) -> tuple[Bytes, npt.NDArray[np.int64]]:
    """Bytes and partitions on each member."""
    number = {member.name: i for i, member in enumerate(members)}
    owner = np.fromiter((number[name] for name in owners.values()), np.int64, len(owners))
    index = np.fromiter((partition.index for partition in owners), np.int64, len(owners))
    sizes = np.bincount(owner, minlength=len(members))
    return np.asarray(np.bincount(owner, partition_bytes[index], len(members)), np.float64), sizes.astype(np.int64)


def partition_steps(load: Load, partitions: Iterable[int], hashes: Mapping[str, str]) -> list[PartitionStep]:
    """What changes from each number of partitions to one more, and to twice as many, for each partitioner and hash."""
    sample = load.keys
    keys = next(generate_ids("text", GENERATED_KEYS)) if sample is None else sample.keys
    sizes = np.full(len(keys), load.bytes / len(keys)) if sample is None else sample.bytes
    steps = []
    for before in partitions:
        for name, hash_ in hashes.items():
            old = partitioner_named(name, before, hash_).place_array(keys).to_numpy()
            for after in sorted({before + 1, 2 * before}):
                changed = partitioner_named(name, after, hash_).place_array(keys).to_numpy() != old
                bytes_moved = float(sizes[changed].sum())
                step = PartitionStep(
                    partitioner=name,
                    hash=hash_,
                    before=before,
                    after=after,
                    keys=len(keys),
                    basis="generated keys" if sample is None else "sample",
                    fraction=float(changed.mean()),
                    ideal_fraction=1 - before / after,
                    bytes_moved=round(bytes_moved),
                    bytes_fraction=bytes_moved / load.bytes if load.bytes else 0.0,
                )
                steps.append(step)
    return steps
