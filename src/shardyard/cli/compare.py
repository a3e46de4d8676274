"""`shardyard compare`: what moves when the number of partitions or members changes."""

# ruff: noqa: PLC0415 commands start quickly: what is slow to import is imported by those that need it

from collections import Counter
from collections.abc import Iterable
from typing import Annotated

import typer

from shardyard.cli.options import Json, Partitions, integer_option
from shardyard.cli.output import print_json, print_table
from shardyard.model import InvalidCall, InvalidValue, Member, Partition, whole_number
from shardyard.model.extras import require
from shardyard.placement import ASSIGNORS, assign, plan
from shardyard.placement.names import ID_KINDS, PARTITIONERS

Row = dict[str, object]
MAX_COUNT = 1_000_000
"""Of partitions and of members: comparing more would take minutes and gigabytes."""


def compare(
    partitions: Partitions,
    to: Annotated[int | None, integer_option("--to", help="The new number of partitions.")] = None,
    members: Annotated[int | None, integer_option("--members", help="The number of members.")] = None,
    to_members: Annotated[int | None, integer_option("--to-members", help="The new number of members.")] = None,
    hash_name: Annotated[
        str | None,
        typer.Option(
            "--hash",
            metavar="NAME",
            help="With --to: the hash of keys. Default: xxh64, which jump uses unless the hash has 64 bits.",
        ),
    ] = None,
    keys: Annotated[int, integer_option("--keys", help="With --to: how many keys to place.")] = 1_000_000,
    ids: Annotated[
        str, typer.Option("--ids", metavar="KIND", help=f"With --to: the kind of keys, one of {', '.join(ID_KINDS)}.")
    ] = "text",
    json: Json = False,
) -> None:
    """Show what moves: keys if the number of partitions changes, partitions if the number of members changes.

    Compares every partitioner (with --to) or every assignor (with --members and --to-members). The ideal fraction is
    the share that the added partitions or members get, or that the removed ones had. round_robin ignores keys, so its
    row compares where the n-th record goes.

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
    require("server", "compare --to", "numpy", "pyarrow", "xxhash")
    import numpy as np

    from shardyard.placement import generate_ids, hash_named, partitioner_named

    hash_name = hash_name or "xxh64"
    if name == "jump" and hash_named(hash_name).bits != 64:
        hash_name = "xxh64"
    old, new = partitioner_named(name, before, hash_name), partitioner_named(name, after, hash_name)
    if max(before, after) > MAX_COUNT:
        raise InvalidValue("partitions", max(before, after), f"at most {MAX_COUNT}")
    moved = 0
    sizes = np.zeros(after, np.int64)
    for chunk in generate_ids(ids, keys):
        target = new.place_array(chunk).to_numpy()
        moved += int((old.place_array(chunk).to_numpy() != target).sum())
        sizes += np.bincount(target, minlength=after)
    return _row(name, moved, keys, before, after, sizes.tolist())


def _assignor_row(name: str, partitions: int, before: int, after: int) -> Row:
    if whole_number("partitions", partitions, at_least=1) > MAX_COUNT:
        raise InvalidValue("partitions", partitions, f"at most {MAX_COUNT}")
    all_partitions = [Partition("topic", i) for i in range(partitions)]
    old = assign(all_partitions, _members("members", before), assignor=name)
    new = assign(all_partitions, _members("to_members", after), old, assignor=name)
    owned = Counter(new.values())
    sizes = [owned[member.name] for member in _members("to_members", after)]
    return _row(name, len(plan(old, new).moves), partitions, before, after, sizes)


def _members(name: str, count: int) -> list[Member]:
    if whole_number(name, count, at_least=1) > MAX_COUNT:
        raise InvalidValue(name, count, f"at most {MAX_COUNT}")
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
