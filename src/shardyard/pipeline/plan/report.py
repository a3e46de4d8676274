"""What if: other partition counts, more members. What each would hold, what moves on the way, and what to take."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from shardyard.model import InvalidValue, whole_number
from shardyard.pipeline.plan.load import Bytes, Load
from shardyard.pipeline.plan.recommendation import PartitionCount, recommendation, recommended
from shardyard.pipeline.plan.routing_size import ADR_009, TableSize, WorkerMemory, table_size, worker_memory
from shardyard.pipeline.plan.steps import MemberStep, PartitionStep, member_steps, partition_steps
from shardyard.placement import ASSIGNORS, DEFAULT_HASH, balance, hash_named

MOST = 1_000_000
"""Partitions times members of one case."""
MOST_WORK = 400_000
"""Partitions and members over all cases, for all assignors: half a minute."""
MOST_EACH = 100_000
"""Partitions or members."""
MOST_COUNTS = 50
"""Partition counts or member counts in one plan."""
BY_KEY = {name: hash_ for name, hash_ in DEFAULT_HASH.items() if hash_ is not None}
"""The partitioners that go by the key, and their default hashes."""


@dataclass(frozen=True, slots=True)
class Share:
    """How many of the partitions a member would own."""

    partitions: int
    members: int
    fewest: int
    most: int
    even: bool
    idle_members: int


@dataclass(frozen=True, slots=True)
class PlanReport:
    recommended_partitions: int
    recommendation: str
    load: Load
    partition_counts: tuple[PartitionCount, ...]
    shares: tuple[Share, ...]
    member_steps: tuple[MemberStep, ...]
    partition_steps: tuple[PartitionStep, ...]
    tables: tuple[TableSize, ...]
    """ADR-009's routing tables."""
    worker_memory: tuple[WorkerMemory, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain numbers, texts, lists and dicts, under the names of the fields."""
        rows = {name: getattr(self, name) for name in self.__slots__}
        plain: dict[str, Any] = json.loads(json.dumps(rows, default=_plain, allow_nan=False))
        return plain


def _plain(row: Any) -> dict[str, Any]:
    if not isinstance(row, Load):
        return asdict(row)
    figures = {name: getattr(row, name) for name in row.__slots__ if name != "keys"}
    sampled = 0 if row.keys is None else len(row.keys.keys)
    return {"basis": "measured" if row.partition_bytes else "assumed", **figures, "sampled_keys": sampled}


def make_plan(
    load: Load,
    *,
    partitions: Sequence[int],
    members: Sequence[int],
    assignors: Sequence[str] = tuple(ASSIGNORS),
    partitioners: Sequence[str] = tuple(BY_KEY),
    hash_: str | None = None,
) -> PlanReport:
    """Every partition count with every member count, one step (N -> N+1) and one doubling (N -> 2N) from each.

    The first of the members is what there is today; the first partitioner places a sample of keys. With `hash_` all
    partitioners use that hash, but for jump, which keeps its own where it has not 64 bits.
    """
    _check(partitions, members, assignors, partitioners)
    hashes = {name: _hash_of(name, hash_) for name in partitioners}
    counts, steps = [], []
    for count in partitions:
        held, basis = load.bytes_on(count, partitioners[0], hashes[partitioners[0]])
        counts.append(_partition_count(load, held, basis))
        for n in members:
            steps += [step for name in assignors for step in member_steps(held, n, name)]
    tables = tuple(map(table_size, ADR_009))
    return PlanReport(
        recommended_partitions=recommended(counts, members).partitions,
        recommendation=recommendation(counts, members, steps),
        load=load,
        partition_counts=tuple(counts),
        shares=tuple(_share(count, n) for count in partitions for n in members),
        member_steps=tuple(steps),
        partition_steps=tuple(partition_steps(load, partitions, hashes)),
        tables=tables,
        worker_memory=tuple(row for size in tables for row in worker_memory(size)),
    )


def _check(
    partitions: Sequence[int], members: Sequence[int], assignors: Sequence[str], partitioners: Sequence[str]
) -> None:
    for name, words, known in (("assignors", assignors, ASSIGNORS), ("partitioners", partitioners, BY_KEY)):
        if unknown := [word for word in words if word not in known]:
            raise InvalidValue(name, unknown[0], "some of " + ", ".join(known))
    for name, numbers in (("partitions", partitions), ("members", members)):
        for number in numbers:
            if whole_number(name, number, at_least=1) > MOST_EACH:
                raise InvalidValue(name, number, f"at most {MOST_EACH} to plan for")
    lists = {"partitions": partitions, "members": members, "assignors": assignors, "partitioners": partitioners}
    for name, asked in lists.items():
        if not 1 <= len(asked) <= MOST_COUNTS or len(set(asked)) != len(asked):
            raise InvalidValue(name, list(asked), f"from 1 to {MOST_COUNTS}, each once")
    if max(partitions) * max(members) > MOST:
        raise InvalidValue("partitions x members", max(partitions) * max(members), f"at most {MOST} to plan for")
    work = len(assignors) * (sum(partitions) * len(members) + sum(members) * len(partitions))
    if work > MOST_WORK:
        raise InvalidValue("partitions and members of all cases", work, f"at most {MOST_WORK} to plan for")


def _hash_of(partitioner: str, hash_: str | None) -> str:
    if hash_ is None or (partitioner == "jump" and hash_named(hash_).bits != 64):
        return BY_KEY[partitioner]
    return hash_named(hash_).name


def _partition_count(load: Load, held: Bytes, basis: str) -> PartitionCount:
    known = basis != "even"
    rate = load.records_per_second
    return PartitionCount(
        partitions=len(held),
        basis=basis,
        bytes_mean=round(float(held.mean())),
        bytes_max=round(float(held.max())) if known else None,
        max_over_mean=balance(held).max_over_mean if known else None,
        records_per_second=None if rate is None else rate / len(held),
    )


def _share(partitions: int, members: int) -> Share:
    return Share(
        partitions=partitions,
        members=members,
        fewest=partitions // members,
        most=-(-partitions // members),
        even=partitions % members == 0,
        idle_members=max(members - partitions, 0),
    )
