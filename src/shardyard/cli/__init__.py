"""The `shardyard` command.

Exit codes: 0 done, 1 failed, 2 the call was wrong (and nothing was changed or printed on standard output).
"""

import sys

import typer
from rich.console import Console
from rich.markup import escape

from shardyard import __version__
from shardyard.cli import broker, check, compare, demo, pipeline, place, queues, tour
from shardyard.model import InvalidCall, ShardyardError

app = typer.Typer(
    name="shardyard",
    help="Every message on the right partition, every partition with the right owner.",
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
app.command("broker", rich_help_panel=queues.PANEL)(broker.broker)
queues.register(app)
app.command("place", rich_help_panel="Placement")(place.place)
app.command("check", rich_help_panel="Placement")(check.check)
app.command("compare", rich_help_panel="Placement")(compare.compare)
app.add_typer(pipeline.app, rich_help_panel="All of the data, on Spark")
app.command("tour", rich_help_panel="See it work")(tour.tour)
app.command("demo", rich_help_panel="See it work")(demo.demo)


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
        Console(stderr=True).print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(2 if isinstance(error, InvalidCall) else 1)
    except OSError as error:
        Console(stderr=True).print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(1)
