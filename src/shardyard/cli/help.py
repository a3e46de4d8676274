"""The format of --help, the same for every command: paragraphs are wrapped, examples are not."""

import copy
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

MAX_WIDTH = 100
Rows = Sequence[tuple[str, str]]
"""Terms and their descriptions."""


class Command(TyperCommand):
    """A command with help in this format."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(_render_help(self, ctx, self.sections()))

    def sections(self) -> Mapping[str, Rows]:
        """Sections to add to the help, by title. Override it to describe more than arguments and options."""
        return {}


class CommandGroup(TyperGroup):
    """A group of commands with help in this format."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] in self.commands:
            # None of the group's own options is given. Typer would load Pydantic, which takes 0.1 s, to check the
            # values that --help and the options for completion do not have.
            bare = copy.copy(self)
            bare.add_help_option = False
            bare.params = [option for option in self.params if not str(option.name).endswith("_completion")]
            return super(CommandGroup, bare).parse_args(ctx, args)
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(_render_help(self, ctx, {**_commands_by_panel(self, ctx), **self.sections()}))

    def sections(self) -> Mapping[str, Rows]:
        return {}


def apply_help_format(app: typer.Typer) -> None:
    """Use this format for the app and everything below it. Subclasses of `Command` that are set already stay."""
    if not issubclass(app.info.cls or TyperGroup, CommandGroup):
        app.info.cls = CommandGroup
    for command in app.registered_commands:
        if not issubclass(command.cls or TyperCommand, Command):
            command.cls = Command
    for group in app.registered_groups:
        if group.typer_instance is not None:
            apply_help_format(group.typer_instance)


def _render_help(command: Any, ctx: Any, sections: Mapping[str, Rows]) -> str:
    buffer = io.StringIO()
    console = Console(file=buffer, force_terminal=sys.stdout.isatty(), highlight=False)
    console.width = min(console.width, MAX_WIDTH)
    params = [param for param in command.get_params(ctx) if not getattr(param, "hidden", False)]
    arguments = [param for param in params if param.param_type_name == "argument"]
    options = [param for param in params if param.param_type_name == "option"]
    operands = ["COMMAND ..."] if isinstance(command, TyperGroup) else [_argument_name(param) for param in arguments]
    console.print(Text.assemble(("Usage: ", "bold"), " ".join([ctx.command_path, "[OPTIONS]", *operands])))
    _print_paragraphs(console, inspect.cleandoc(command.help or "").split("\n\n"))
    _print_section(console, "Arguments", [(_argument_name(param), _description(param)) for param in arguments])
    for title, rows in sections.items():
        _print_section(console, title, rows)
    _print_section(console, "Options", [(_option_names(param), _description(param)) for param in options])
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines())


def _print_paragraphs(console: Console, paragraphs: Iterable[str]) -> None:
    """Indented paragraphs are examples, which are not wrapped, so that they can be copied."""
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
    for term, description in rows:
        table.add_row(Text(term, "cyan"), Text(description))
    console.print(Padding(table, (0, 0, 0, 2)))


def _commands_by_panel(group: TyperGroup, ctx: Any) -> dict[str, list[tuple[str, str]]]:
    """The commands of each panel, with the first paragraph of their help."""
    panels: dict[str, list[tuple[str, str]]] = {}
    for name in group.list_commands(ctx):
        command: Any = group.get_command(ctx, name)
        if command.hidden:
            continue
        summary = inspect.cleandoc(command.help or "").split("\n\n")[0]
        panels.setdefault(command.rich_help_panel or "Commands", []).append((name, " ".join(summary.split("\n"))))
    return panels


def _argument_name(param: Any) -> str:
    name: str = param.metavar or param.name.upper()
    return name if param.required or name.startswith("[") else f"[{name}]"


def _option_names(param: Any) -> str:
    names = " / ".join(", ".join(sorted(each, key=len)) for each in (param.opts, param.secondary_opts) if each)
    return names if param.is_flag else f"{names} {param.metavar or 'VALUE'}"


def _description(param: Any) -> str:
    parts = [param.help or ""]
    if param.required and param.param_type_name == "option":
        parts.append("[required]")
    elif param.show_default and param.default not in (None, (), []) and not getattr(param, "is_flag", False):
        parts.append(f"[default: {param.default}]")
    return " ".join(part for part in parts if part)
