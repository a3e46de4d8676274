"""How commands print: a table for people, tab-separated lines into a pipe, JSON when asked."""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text


def _whole_number(text: str | int) -> int:
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r}: expected a whole number") from None


def Count(*names: str, help: str) -> Any:  # noqa: A002, N802 it stands where typer.Option would
    """An option that takes a whole number, and says which value was none."""
    return typer.Option(*names, help=help, parser=_whole_number, metavar="INTEGER")


Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


Row = Mapping[str, object]
dumps = partial(json.dumps, ensure_ascii=False)


def print_json(data: object) -> None:
    sys.stdout.write(dumps(data) + "\n")


def print_table(rows: Sequence[Row], title: str | None = None, *, header: bool = True) -> None:
    """Rows that share their keys. The title is for people: a pipe gets the header and the rows alone."""
    if not rows:
        return
    columns = list(rows[0])
    cells = [[_cell(row[column]) for column in columns] for row in rows]
    if not sys.stdout.isatty():
        sys.stdout.writelines("\t".join(line) + "\n" for line in ([columns, *cells] if header else cells))
        return
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in columns:
        is_text = any(isinstance(row[column], str) and row[column] for row in rows)
        table.add_column(column, justify="left" if is_text else "right", overflow="fold")  # nothing is cut off
    for line in cells:
        table.add_row(*map(Text, line))  # as it is: a key may look like markup
    Console().print(table)


def print_tables(tables: Mapping[str, Sequence[Row]]) -> None:
    """Several tables by their titles, without those that are empty. In a pipe each begins with a line `# TITLE`, and an
    empty line is between two."""
    for number, (title, rows) in enumerate((title, rows) for title, rows in tables.items() if rows):
        if not sys.stdout.isatty():
            sys.stdout.write(f"{chr(10) if number else ''}# {title}\n")
        print_table(rows, title)


def print_blocks(blocks: Iterable[Sequence[Row]], *, json: bool) -> None:
    """Rows that come in blocks, printed as they come: as one list, or as a table (a new one a block on a terminal)."""
    filled = (block for block in blocks if block)
    first = next(filled, [])  # a wrong call complains here, before anything is printed
    if json:
        sys.stdout.write("[" + ", ".join(map(dumps, first)))
        for block in filled:
            sys.stdout.writelines(", " + dumps(row) for row in block)
        sys.stdout.write("]\n")
        return
    print_table(first)
    for block in filled:
        print_table(block, header=sys.stdout.isatty())


def say(text: str) -> None:
    """A remark: not on standard output, which is for data."""
    sys.stderr.write(f"{text}\n")


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.0f}" if value.is_integer() or abs(value) >= 1000 else f"{value:.4g}"
    return str(value).replace("\t", "\\t").replace("\n", "\\n")
