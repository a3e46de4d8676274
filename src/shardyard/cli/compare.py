"""`shardyard compare`: what moves when the number of partitions or members changes."""

from collections import Counter
from collections.abc import Iterable
from typing import Annotated

import numpy as np
import typer

from shardyard.cli.output import Count, Json, print_json, print_table
from shardyard.model import InvalidCall, InvalidValue, Member, Partition, whole_number
from shardyard.placement import (
    ASSIGNORS,
    ID_KINDS,
    PARTITIONERS,
    assign,
    generate_ids,
    hash_named,
    partitioner_named,
    plan,
)

Row = dict[str, object]
MOST = 1_000_000
"""Partitions or members: more take minutes and gigabytes to compare."""


def compare(
    partitions: Annotated[int, Count("--partitions", "-p", help="How many partitions there are.")],
    to: Annotated[int | None, Count("--to", help="How many partitions there will be.")] = None,
    members: Annotated[int | None, Count("--members", help="How many members there are.")] = None,
    to_members: Annotated[int | None, Count("--to-members", help="How many members there will be.")] = None,
    hash_name: Annotated[
        str | None,
        typer.Option("--hash", help="With --to: the hash (default xxh64); jump uses xxh64 where it has not 64 bits."),
    ] = None,
    keys: Annotated[int, Count("--keys", help="With --to: how many ids to try.")] = 1_000_000,
    ids: Annotated[str, typer.Option("--ids", help=f"With --to: one of {', '.join(ID_KINDS)}.")] = "text",
    json: Json = False,
) -> None:
    """Say what moves: for every partitioner when partitions are added, for every assignor when members are.

    The ideal fraction is what the newcomers' share is, or the leavers' was. round_robin knows no keys: its row
    compares where the n-th record goes.

    Examples:

      shardyard compare --partitions 12 --to 13

      shardyard compare --partitions 256 --members 16 --to-members 17
    """
    if to is not None and members is None and to_members is None:
        rows = [_partitioner_row(name, partitions, to, hash_name, ids, keys) for name in PARTITIONERS]
        title = f"{keys:,} {ids} keys from {partitions} to {to} partitions"
    elif to is None and members is not None and to_members is not None:
        rows = [_assignor_row(name, partitions, members, to_members) for name in ASSIGNORS]
        title = f"{partitions} partitions from {members} to {to_members} members"
    else:
        raise InvalidCall("compare: expected either --to, or --members and --to-members")
    if json:
        print_json(rows)
    else:
        print_table(rows, title)


def _partitioner_row(name: str, before: int, after: int, hash_name: str | None, ids: str, keys: int) -> Row:
    hash_name = hash_name or "xxh64"
    if name == "jump" and hash_named(hash_name).bits != 64:
        hash_name = "xxh64"
    old, new = partitioner_named(name, before, hash_name), partitioner_named(name, after, hash_name)
    if max(before, after) > MOST:
        raise InvalidValue("partitions", max(before, after), f"at most {MOST} to compare")
    moved = 0
    sizes = np.zeros(after, np.int64)
    for chunk in generate_ids(ids, keys):
        target = new.place_array(chunk).to_numpy()
        moved += int((old.place_array(chunk).to_numpy() != target).sum())
        sizes += np.bincount(target, minlength=after)
    return _row(name, moved, keys, before, after, sizes.tolist())


def _assignor_row(name: str, partitions: int, before: int, after: int) -> Row:
    if whole_number("partitions", partitions, at_least=1) > MOST:
        raise InvalidValue("partitions", partitions, f"at most {MOST} to compare")
    everything = [Partition("topic", i) for i in range(partitions)]
    old = assign(everything, _members("members", before), assignor=name)
    new = assign(everything, _members("to_members", after), old, assignor=name)
    held = Counter(new.values())
    sizes = [held[member.name] for member in _members("to_members", after)]
    return _row(name, len(plan(old, new).moves), partitions, before, after, sizes)


def _members(name: str, count: int) -> list[Member]:
    if whole_number(name, count, at_least=1) > MOST:
        raise InvalidValue(name, count, f"at most {MOST} to compare")
    return [Member(f"member-{i:0{len(str(count))}}") for i in range(count)]


def _row(name: str, moved: int, total: int, before: int, after: int, sizes: Iterable[int]) -> Row:
    sizes = list(sizes)
    return {
        "name": name,
        "moved": moved,
        "total": total,
        "fraction": moved / total,
        "ideal_fraction": abs(after - before) / max(after, before),
        "min_size": min(sizes),
        "max_size": max(sizes),
    }
