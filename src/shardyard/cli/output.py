"""How commands print: a table on a terminal, tab-separated lines in a pipe, or JSON with --json."""

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from unicodedata import category

from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

Row = Mapping[str, object]
_OBEYED = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""The Unicode categories of characters that a terminal obeys instead of showing them, or can't encode."""
_JOINERS = "\u200c\u200d"
"""Zero-width (non-)joiners, which emoji and some scripts need: they only change how their neighbours look."""
ID_CHARACTERS = 36
"""Ids up to this length, such as UUIDs, are not wrapped: people copy them."""
dumps = partial(json.dumps, ensure_ascii=False)


def print_json(data: object) -> None:
    sys.stdout.write(_dumps(data) + "\n")


def _dumps(data: object) -> str:
    text = dumps(data)
    return printable(text, escape_json) if sys.stdout.isatty() else text


def print_table(rows: Sequence[Row], title: str | None = None, *, header: bool = True) -> None:
    """Print rows that all have the same keys. The title is for terminals: a pipe gets only the header and the rows."""
    if not rows:
        return
    columns = list(rows[0])
    cells = [[_format_cell(row[column]) for column in columns] for row in rows]
    if sys.stdout.isatty():
        cells = [[printable(cell) for cell in line] for line in cells]
    if not sys.stdout.isatty():
        sys.stdout.writelines("\t".join(line) + "\n" for line in ([columns, *cells] if header else cells))
        return
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in columns:
        is_text = any(isinstance(row[column], str) and row[column] for row in rows)
        is_id = column == "id" and all(len(str(row[column])) <= ID_CHARACTERS for row in rows)
        justify: JustifyMethod = "left" if is_text else "right"
        table.add_column(column, justify=justify, overflow="fold", no_wrap=is_id)  # wrap, do not truncate
    for line in cells:
        table.add_row(*map(Text, line))  # not as markup, which a key may look like
    Console().print(table)


def print_tables(tables: Mapping[str, Sequence[Row]]) -> None:
    """Print several tables by title, skipping empty ones.

    In a pipe each table starts with a line `# TITLE`, and tables are separated by an empty line.
    """
    for number, (title, rows) in enumerate((title, rows) for title, rows in tables.items() if rows):
        if not sys.stdout.isatty():
            sys.stdout.write(f"{chr(10) if number else ''}# {title}\n")
        print_table(rows, title)


def print_blocks(blocks: Iterable[Sequence[Row]], *, json: bool) -> None:
    """Print blocks of rows as they come: as one JSON list, or as one table (on a terminal, one table per block)."""
    non_empty = (block for block in blocks if block)
    first = next(non_empty, [])  # an invalid call fails here, before anything is printed
    if json:
        sys.stdout.write("[" + ", ".join(map(_dumps, first)))
        for block in non_empty:
            sys.stdout.writelines(", " + _dumps(row) for row in block)
        sys.stdout.write("]\n")
        return
    print_table(first)
    for block in non_empty:
        print_table(block, header=sys.stdout.isatty())


def print_list(rows: Sequence[Row], what: str, hidden: int = 0, *, json: bool) -> None:
    """Print rows, or a message that there are none. On a terminal, also say how many are hidden without --all."""
    if json:
        print_json(rows)
    else:
        print_table(rows)
        if not rows:
            print_message(f"no {what}")
    if hidden and sys.stderr.isatty():
        print_message(f"{hidden} internal {what} not shown; --all shows them")


def escape(character: str) -> str:
    """The character as Python writes it in a string, such as `\\x1b`."""
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def escape_json(character: str) -> str:
    """The character as JSON may have it in a string, such as `\\u001b`."""
    return json.dumps(character)[1:-1]


def printable(text: str, escape: Callable[[str], str] = escape) -> str:
    """The text for a terminal: control characters, and those that change the direction or are invisible, are escaped.
    `escape`: how one is written."""
    if text.isprintable():
        return text
    return "".join(escape(c) if category(c) in _OBEYED and c not in _JOINERS else c for c in text)


def printable_lines(text: str) -> str:
    """The same of several lines."""
    return "\n".join(map(printable, text.split("\n")))


def print_message(text: str) -> None:
    """Print a message to standard error; standard output is for data. It may quote what others wrote."""
    sys.stderr.write(printable_lines(text) + "\n")


def _format_cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.0f}" if value.is_integer() or abs(value) >= 1000 else f"{value:.4g}"
    return str(value).replace("\t", "\\t").replace("\n", "\\n")
