"""Options that several commands share."""

from typing import Annotated, Any

import typer

from shardyard.placement.names import HASH_NAMES, PARTITIONERS


def _parse_integer(text: str | int) -> int:
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r}: expected an integer") from None


def integer_option(*names: str, help: str) -> Any:  # noqa: A002 named as in typer.Option
    """An option that takes an integer; the error for anything else quotes the value."""
    return typer.Option(*names, help=help, parser=_parse_integer, metavar="INTEGER")


def value_option(*names: str, metavar: str, help: str) -> Any:  # noqa: A002 named as in typer.Option
    """An option that takes a value and has no default to show."""
    return typer.Option(*names, metavar=metavar, help=help, show_default=False)


Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Partitions = Annotated[int, integer_option("--partitions", "-p", help="The number of partitions.")]
PartitionerName = Annotated[
    str,
    typer.Option(
        "--partitioner", metavar="NAME", help=f"How keys map to partitions: one of {', '.join(PARTITIONERS)}."
    ),
]
HashName = Annotated[
    str | None,
    value_option(
        "--hash",
        metavar="NAME",
        help=f"The hash of keys: one of {', '.join(HASH_NAMES)}. Default: fnv1a32, or xxh64 for jump.",
    ),
]
