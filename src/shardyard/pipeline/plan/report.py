"""What-if plans: the load with other numbers of partitions and members, what moves on the way, and a recommendation."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from shardyard.model import InvalidValue, whole_number
from shardyard.pipeline.plan.load import Bytes, Load
from shardyard.pipeline.plan.recommendation import PartitionCount, recommend, recommendation
from shardyard.pipeline.plan.routing_size import ADR_009, TableSize, WorkerMemory, table_size, worker_memory
from shardyard.pipeline.plan.steps import MemberStep, PartitionStep, member_steps, partition_steps
from shardyard.placement import ASSIGNORS, DEFAULT_HASH, balance, hash_named

MAX_PRODUCT = 1_000_000
"""Limit of partitions times members in one case."""
MAX_WORK = 400_000
"""Limit of partitions plus members over all cases and assignors: takes about half a minute."""
MAX_COUNT = 100_000
"""Limit of partitions, and of members."""
MAX_COUNTS = 50
"""Limit of the number of values for partitions, and for members, in one plan."""
BY_KEY = {name: hash_ for name, hash_ in DEFAULT_HASH.items() if hash_ is not None}
"""The partitioners that place by key, and their default hashes."""


@dataclass(frozen=True, slots=True)
class Share:
    """How many partitions each member would own."""

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
    """The routing tables of fan-out, at three scales, if they were asked for."""
    worker_memory: tuple[WorkerMemory, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts, named like the fields."""
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
    fan_out_memory: bool = False,
) -> PlanReport:
    """A plan for all combinations of `partitions` and `members`, with the steps from N to N+1 and to 2N members.
    `fan_out_memory` adds the memory of fan-out workers, which does not depend on the load.

    The first number of members is today's. The first partitioner places the sample of keys. With `hash_`, all
    partitioners use that hash, except that jump keeps its default if the hash does not have 64 bits.
    """
    _check(partitions, members, assignors, partitioners)
    hashes = {name: _hash_of(name, hash_) for name in partitioners}
    counts, steps = [], []
    for count in partitions:
        partition_bytes, basis = load.bytes_on(count, partitioners[0], hashes[partitioners[0]])
        counts.append(_partition_count(load, partition_bytes, basis))
        for n in members:
            steps += [step for name in assignors for step in member_steps(partition_bytes, n, name)]
    tables = tuple(map(table_size, ADR_009)) if fan_out_memory else ()
    return PlanReport(
        recommended_partitions=recommend(counts, members, load.distinct_keys).partitions,
        recommendation=recommendation(counts, members, steps, load.distinct_keys, load.largest_key),
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
    for name, values, known in (("assignors", assignors, ASSIGNORS), ("partitioners", partitioners, BY_KEY)):
        if unknown := [value for value in values if value not in known]:
            raise InvalidValue(name, unknown[0], "some of " + ", ".join(known))
    for name, numbers in (("partitions", partitions), ("members", members)):
        for number in numbers:
            if whole_number(name, number, at_least=1) > MAX_COUNT:
                raise InvalidValue(name, number, f"at most {MAX_COUNT} to plan for")
    lists = {"partitions": partitions, "members": members, "assignors": assignors, "partitioners": partitioners}
    for name, given in lists.items():
        if not 1 <= len(given) <= MAX_COUNTS or len(set(given)) != len(given):
            raise InvalidValue(name, list(given), f"1 to {MAX_COUNTS} different ones")
    if max(partitions) * max(members) > MAX_PRODUCT:
        product = max(partitions) * max(members)
        raise InvalidValue("partitions x members", product, f"at most {MAX_PRODUCT} to plan for")
    work = len(assignors) * (sum(partitions) * len(members) + sum(members) * len(partitions))
    if work > MAX_WORK:
        raise InvalidValue("partitions and members of all cases", work, f"at most {MAX_WORK} to plan for")


def _hash_of(partitioner: str, hash_: str | None) -> str:
    if hash_ is None or (partitioner == "jump" and hash_named(hash_).bits != 64):
        return BY_KEY[partitioner]
    return hash_named(hash_).name


def _partition_count(load: Load, partition_bytes: Bytes, basis: str) -> PartitionCount:
    known = basis != "even"
    rate = load.records_per_second
    return PartitionCount(
        partitions=len(partition_bytes),
        basis=basis,
        bytes_mean=round(float(partition_bytes.mean())),
        bytes_max=round(float(partition_bytes.max())) if known else None,
        max_over_mean=balance(partition_bytes).max_over_mean if known else None,
        records_per_second=None if rate is None else rate / len(partition_bytes),
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
