"""The `shardyard` command."""

import sys
from collections.abc import Mapping

import typer
from rich.console import Console
from rich.markup import escape

from shardyard import __version__
from shardyard.cli import (
    broker,
    check,
    compare,
    copy_stores,
    demo,
    fanout,
    history_worker,
    messaging,
    messenger,
    pipeline,
    place,
    queues,
    sharding,
    tour,
)
from shardyard.cli.help import CommandGroup, Rows, apply_help_format
from shardyard.cli.messaging.options import DEFAULT_SERVER
from shardyard.cli.output import printable
from shardyard.cli.queues.session import DEFAULT_BROKER
from shardyard.model import ShardyardError
from shardyard.wire.errors import exit_code_of

_HELP = """Every message on the right partition, every partition with the right owner.

Start with `shardyard tour`, which shows what Shardyard does, or with a work queue:

  shardyard broker

  shardyard topics create orders

  shardyard publish orders hello

  shardyard consume billing orders

Run any command with --help to see its options and examples."""


class _Root(CommandGroup):
    def sections(self) -> Mapping[str, Rows]:
        return {
            "Environment": [
                ("SHARDYARD_BROKER", f"Addresses of brokers, separated by commas. Default: {DEFAULT_BROKER}."),
                (
                    "SHARDYARD_TOKEN",
                    "The token that a broker requires of callers, and that other commands send.",
                ),
                (
                    "SHARDYARD_MESSENGER",
                    f"Addresses of messaging servers, separated by commas. Default: {DEFAULT_SERVER}.",
                ),
                ("SHARDYARD_SECRET", "The secret with which users sign in at messaging servers."),
            ],
            "Exit codes": [
                ("0", "Success."),
                ("1", "Failure: a topic exists already, is in use or requires a token, no broker can be reached, ..."),
                ("2", "Invalid call. Nothing was changed, and nothing was printed on standard output."),
                ("130", "Interrupted by Ctrl-C, before the command was done."),
            ],
        }


app = typer.Typer(name="shardyard", cls=_Root, help=_HELP, rich_markup_mode="rich", pretty_exceptions_enable=False)
app.command("broker", rich_help_panel=queues.PANEL)(broker.broker)
queues.register(app)
sharding.register(app)
app.command("messenger", rich_help_panel="Messaging")(messenger.messenger)
app.command("drain", rich_help_panel="Messaging")(messenger.drain)
app.command(history_worker.COMMAND, hidden=True)(history_worker.history_worker)
messaging.register(app)
fanout.register(app)
app.command("copy", rich_help_panel="Storage")(copy_stores.copy)
app.command("place", rich_help_panel="Placement")(place.place)
app.command("check", rich_help_panel="Placement")(check.check)
app.command("compare", rich_help_panel="Placement")(compare.compare)
app.add_typer(pipeline.app, rich_help_panel="Pipeline (Spark)")
app.command("tour", rich_help_panel="Demos")(tour.tour)
app.command("demo", rich_help_panel="Demos")(demo.demo)
apply_help_format(app)


def _show_version(requested: bool) -> None:
    if requested:
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
    except KeyboardInterrupt:  # before the command itself has begun
        sys.exit(130)
    except ShardyardError as error:
        _say_error(error)
        sys.exit(exit_code_of(error))
    except OSError as error:
        _say_error(error)
        sys.exit(1)


def _say_error(error: Exception) -> None:
    text = "\n".join(map(printable, str(error).split("\n")))  # it may quote a file, or what a server sent
    Console(stderr=True).print(f"[bold red]error:[/] {escape(text)}", highlight=False, soft_wrap=True)
