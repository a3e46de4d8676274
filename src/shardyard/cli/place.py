"""`shardyard place`: key -> partition."""

import sys
from collections.abc import Callable, Iterator
from enum import StrEnum
from itertools import groupby, islice
from typing import Annotated

import pyarrow as pa
import typer

from shardyard.cli.output import Count, Json, Row, print_blocks
from shardyard.model import InvalidValue
from shardyard.placement import HASHES, PARTITIONERS, Key, key_bytes, partitioner_named

HashName = Annotated[
    str | None,
    typer.Option(
        "--hash", help=f"One of {', '.join(HASHES)}. Default: fnv1a32, or xxh64 for jump.", show_default=False
    ),
]
Partitions = Annotated[int, Count("--partitions", "-p", help="How many partitions there are.")]
PartitionerName = Annotated[str, typer.Option("--partitioner", help=f"One of {', '.join(PARTITIONERS)}.")]


BLOCK = 50_000
"""Keys read from standard input before any is printed."""


class KeyType(StrEnum):
    TEXT = "text"
    INT = "int"
    HEX = "hex"


def _number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise InvalidValue("key", text, "a whole number, for --type int") from None


def _bytes(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise InvalidValue("key", text, "pairs of hex digits, for --type hex") from None


def _blocks_of_stdin() -> Iterator[list[str]]:
    """Standard input, a key a line, in blocks. What is not UTF-8 stays visible in `key_bytes`'s complaint."""
    while block := [line.removesuffix(b"\n") for line in islice(sys.stdin.buffer, BLOCK)]:
        yield [line.decode(errors="surrogateescape") for line in block]


_READ: dict[KeyType, Callable[[str], Key]] = {KeyType.TEXT: str, KeyType.INT: _number, KeyType.HEX: _bytes}


def place(
    keys: Annotated[
        list[str],
        typer.Argument(metavar="KEY...", help="Keys; - reads them from standard input, one a line."),
    ],
    partitions: Partitions = 12,
    hash_name: HashName = None,
    partitioner: PartitionerName = "modulus",
    key_type: Annotated[
        KeyType, typer.Option("--type", metavar="text|int|hex", help="What a key is: text, a number, or bytes in hex.")
    ] = KeyType.TEXT,
    json: Json = False,
) -> None:
    """Say on which partition each key lives.

    Examples:

      shardyard place alice bob --partitions 12

      shardyard place ch_general --partitioner jump --partitions 256

      cut -f1 users.tsv | shardyard place - --type int --json
    """
    rule = partitioner_named(partitioner, partitions, hash_name)
    read = _READ[key_type]

    def rows(texts: list[str]) -> list[Row]:
        values = pa.array([key_bytes(read(text)) for text in texts], pa.binary())
        places = rule.place_array(values).to_pylist()
        return [{"key": text, "partition": partition} for text, partition in zip(texts, places, strict=True)]

    named = groupby(keys, key="-".__eq__)  # those between two - are one block
    blocks = (
        rows(block) for from_stdin, some in named for block in (_blocks_of_stdin() if from_stdin else [list(some)])
    )
    print_blocks(blocks, json=json)
