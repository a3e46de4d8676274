"""How commands print: a table for people, tab-separated lines into a pipe, JSON when asked."""

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table


def _whole_number(text: str | int) -> int:
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r}: expected a whole number") from None


def Count(*names: str, help: str) -> Any:  # noqa: A002, N802 it stands where typer.Option would
    """An option that takes a whole number, and says which value was none."""
    return typer.Option(*names, help=help, parser=_whole_number, metavar="INTEGER")


Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def print_json(data: object) -> None:
    sys.stdout.write(json.dumps(data, ensure_ascii=False) + "\n")


def print_table(rows: Sequence[Mapping[str, object]], title: str | None = None) -> None:
    """Rows that share their keys. The title is for people: a pipe gets the header and the rows alone."""
    if not rows:
        return
    columns = list(rows[0])
    cells = [[_cell(row[column]) for column in columns] for row in rows]
    if not sys.stdout.isatty():
        sys.stdout.writelines("\t".join(line) + "\n" for line in [columns, *cells])
        return
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in columns:
        table.add_column(column, justify="left" if isinstance(rows[0][column], str) else "right")
    for line in cells:
        table.add_row(*line)
    Console().print(table)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if value.is_integer() and abs(value) >= 10 else f"{value:.4g}"
    return str(value)
