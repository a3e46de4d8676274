"""Commands for channels and their fan-out."""

import typer

from shardyard.cli.fanout import channels, control, servers

PANEL = "Channels"


def register(app: typer.Typer) -> None:
    """Add the commands to the root command."""
    app.command("coordinator", rich_help_panel=PANEL)(servers.coordinator)
    app.command("fanout-worker", rich_help_panel=PANEL)(servers.fanout_worker)
    app.add_typer(control.app, rich_help_panel=PANEL)
    app.add_typer(channels.app, rich_help_panel=PANEL)
