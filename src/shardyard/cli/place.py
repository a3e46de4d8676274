"""`shardyard place`: the partition of a key."""

# ruff: noqa: PLC0415 commands start quickly: what is slow to import is imported by those that need it

import sys
from collections.abc import Callable, Iterator
from enum import StrEnum
from itertools import groupby, islice
from typing import TYPE_CHECKING, Annotated

import typer

from shardyard.cli.options import HashName, Json, PartitionerName, Partitions
from shardyard.cli.output import Row, print_blocks
from shardyard.model import InvalidValue
from shardyard.model.extras import require

if TYPE_CHECKING:
    from shardyard.placement import Key

BLOCK_KEYS = 50_000
"""How many keys are read from standard input before their partitions are printed."""


class KeyType(StrEnum):
    TEXT = "text"
    INT = "int"
    HEX = "hex"


def _parse_integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise InvalidValue("key", text, "an integer, for --type int") from None


def _parse_hex(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise InvalidValue("key", text, "pairs of hex digits, for --type hex") from None


def _read_stdin_blocks() -> Iterator[list[str]]:
    """Read keys from standard input, one per line, in blocks.

    Bytes that are not UTF-8 are kept as surrogates, so that the error of `key_bytes` can show them.
    """
    while block := [line.removesuffix(b"\n") for line in islice(sys.stdin.buffer, BLOCK_KEYS)]:
        yield [line.decode(errors="surrogateescape") for line in block]


_PARSERS: "dict[KeyType, Callable[[str], Key]]" = {
    KeyType.TEXT: str,
    KeyType.INT: _parse_integer,
    KeyType.HEX: _parse_hex,
}


def place(
    keys: Annotated[
        list[str],
        typer.Argument(metavar="KEY...", help="The keys; - reads them from standard input, one per line."),
    ],
    partitions: Partitions = 12,
    hash_name: HashName = None,
    partitioner_name: PartitionerName = "modulus",
    key_type: Annotated[
        KeyType,
        typer.Option("--type", metavar="text|int|hex", help="How to read keys: as text, as integers, or as hex bytes."),
    ] = KeyType.TEXT,
    json: Json = False,
) -> None:
    """Print the partition of each key.

    Examples:

      shardyard place alice bob --partitions 12

      shardyard place ch_general --partitioner jump --partitions 256

      cut -f1 users.tsv | shardyard place - --type int --json
    """
    require("server", "this command", "numpy", "pyarrow", "xxhash")
    import pyarrow as pa

    from shardyard.placement import key_bytes, partitioner_named

    partitioner = partitioner_named(partitioner_name, partitions, hash_name)
    parse = _PARSERS[key_type]

    def rows(texts: list[str]) -> list[Row]:
        values = pa.array([key_bytes(parse(text)) for text in texts], pa.binary())
        placed = partitioner.place_array(values).to_pylist()
        return [{"key": text, "partition": partition} for text, partition in zip(texts, placed, strict=True)]

    runs = groupby(keys, key="-".__eq__)  # the keys between two - form one block
    blocks = (
        rows(block) for from_stdin, run in runs for block in (_read_stdin_blocks() if from_stdin else [list(run)])
    )
    print_blocks(blocks, json=json)
