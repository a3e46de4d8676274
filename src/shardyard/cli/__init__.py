"""The `shardyard` command."""

import sys
from collections.abc import Mapping

import typer
from rich.console import Console
from rich.markup import escape

from shardyard import __version__
from shardyard.cli import broker, check, compare, demo, pipeline, place, queues, tour
from shardyard.cli.help import Group, Rows, with_this_help
from shardyard.cli.queues.options import DEFAULT_BROKER
from shardyard.model import ShardyardError
from shardyard.wire.errors import exit_code_of

_HELP = """Every message on the right partition, every partition with the right owner.

Begin with `shardyard tour`, which shows what there is, or with a work queue:

  shardyard broker

  shardyard topics create orders

  shardyard publish orders hello

  shardyard consume billing orders

Each command has --help, with examples."""


class _Root(Group):
    def sections(self) -> Mapping[str, Rows]:
        return {
            "Environment": [
                ("SHARDYARD_BROKER", f"Where brokers are, separated by commas, if not {DEFAULT_BROKER}."),
                ("SHARDYARD_TOKEN", "The token that a broker asks for, and that commands show."),
            ],
            "Exit codes": [
                ("0", "Done."),
                ("1", "Failed, or refused as things are: it exists, is in use, asks for a token, can't be reached."),
                ("2", "The call was wrong. Nothing was changed, or printed on standard output."),
            ],
        }


app = typer.Typer(name="shardyard", cls=_Root, help=_HELP, rich_markup_mode="rich", pretty_exceptions_enable=False)
app.command("broker", rich_help_panel=queues.PANEL)(broker.broker)
queues.register(app)
app.command("place", rich_help_panel="Placement")(place.place)
app.command("check", rich_help_panel="Placement")(check.check)
app.command("compare", rich_help_panel="Placement")(compare.compare)
app.add_typer(pipeline.app, rich_help_panel="All of the data, on Spark")
app.command("tour", rich_help_panel="See it work")(tour.tour)
app.command("demo", rich_help_panel="See it work")(demo.demo)
with_this_help(app)


def _show_version(asked: bool) -> None:
    if asked:
        sys.stdout.write(f"shardyard {__version__}\n")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    _version: bool = typer.Option(False, "--version", callback=_show_version, is_eager=True, help="Show the version."),
) -> None:
    if context.invoked_subcommand is None:
        sys.stdout.write(context.get_help() + "\n")


def main() -> None:
    """The command's entry point: errors that Shardyard raises on purpose become one line and an exit code."""
    try:
        app()
    except ShardyardError as error:
        _say_error(error)
        sys.exit(exit_code_of(error))
    except OSError as error:
        _say_error(error)
        sys.exit(1)


def _say_error(error: Exception) -> None:
    Console(stderr=True).print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
