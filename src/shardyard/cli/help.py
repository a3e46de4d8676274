"""Help, the same for every command: paragraphs are wrapped, examples are not."""

import inspect
import io
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import typer
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

WIDEST = 100
Rows = Sequence[tuple[str, str]]


class Command(TyperCommand):
    """A command with this help."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(_help(self, ctx, self.sections()))

    def sections(self) -> Mapping[str, Rows]:
        """What the help has besides: terms and what is to be said of them, by title."""
        return {}


class Group(TyperGroup):
    """A command of commands, likewise."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(_help(self, ctx, {**_commands(self, ctx), **self.sections()}))

    def sections(self) -> Mapping[str, Rows]:
        return {}


def with_this_help(app: typer.Typer) -> None:
    """For the app and all below it. A command may have a `Command` of its own."""
    if not issubclass(app.info.cls or TyperGroup, Group):
        app.info.cls = Group
    for command in app.registered_commands:
        if not issubclass(command.cls or TyperCommand, Command):
            command.cls = Command
    for group in app.registered_groups:
        if group.typer_instance is not None:
            with_this_help(group.typer_instance)


def _help(command: Any, ctx: Any, sections: Mapping[str, Rows]) -> str:
    written = io.StringIO()
    console = Console(file=written, force_terminal=sys.stdout.isatty(), highlight=False)
    console.width = min(console.width, WIDEST)
    params = [param for param in command.get_params(ctx) if not getattr(param, "hidden", False)]
    arguments = [param for param in params if param.param_type_name == "argument"]
    options = [param for param in params if param.param_type_name == "option"]
    ends = ["COMMAND ..."] if isinstance(command, TyperGroup) else [_argument(param) for param in arguments]
    console.print(Text.assemble(("Usage: ", "bold"), " ".join([ctx.command_path, "[OPTIONS]", *ends])))
    _print_text(console, inspect.cleandoc(command.help or "").split("\n\n"))
    _print_section(console, "Arguments", [(_argument(param), _said(param)) for param in arguments])
    for title, rows in sections.items():
        _print_section(console, title, rows)
    _print_section(console, "Options", [(_option(param), _said(param)) for param in options])
    return "\n".join(line.rstrip() for line in written.getvalue().splitlines())


def _print_text(console: Console, paragraphs: Iterable[str]) -> None:
    """What is indented is an example, and stays on its line, so that it can be copied."""
    after_example = False
    for paragraph in paragraphs:
        is_example = paragraph.startswith("  ")
        if not (is_example and after_example):
            console.print()
        text = Text(paragraph if is_example else " ".join(paragraph.split("\n")))
        console.print(text, soft_wrap=is_example)
        after_example = is_example or paragraph == "Examples:"


def _print_section(console: Console, title: str, rows: Rows) -> None:
    if not rows:
        return
    console.print(Text(f"\n{title}:", "bold"))
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(max_width=max(console.width // 3, 24), overflow="fold")
    table.add_column()
    for term, said in rows:
        table.add_row(Text(term, "cyan"), Text(said))
    console.print(Padding(table, (0, 0, 0, 2)))


def _commands(group: TyperGroup, ctx: Any) -> dict[str, list[tuple[str, str]]]:
    """By panel, each with the first paragraph of its help."""
    found: dict[str, list[tuple[str, str]]] = {}
    for name in group.list_commands(ctx):
        command: Any = group.get_command(ctx, name)
        first = inspect.cleandoc(command.help or "").split("\n\n")[0]
        found.setdefault(command.rich_help_panel or "Commands", []).append((name, " ".join(first.split("\n"))))
    return found


def _argument(param: Any) -> str:
    name: str = param.metavar or param.name.upper()
    return name if param.required or name.startswith("[") else f"[{name}]"


def _option(param: Any) -> str:
    names = ", ".join(sorted([*param.opts, *param.secondary_opts], key=len))
    return names if param.is_flag else f"{names} {param.metavar or 'VALUE'}"


def _said(param: Any) -> str:
    said = [param.help or ""]
    if param.required and param.param_type_name == "option":
        said.append("[required]")
    elif param.show_default and param.default not in (None, (), []) and not getattr(param, "is_flag", False):
        said.append(f"[default: {param.default}]")
    return " ".join(part for part in said if part)
