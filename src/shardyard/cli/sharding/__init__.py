"""Commands for sharded queues: exchanges, policies, shards, nodes."""

import typer

from shardyard.cli.sharding import exchanges, messages, moving, nodes, policies, shards

PANEL = "Sharded queues"


def register(app: typer.Typer) -> None:
    """Add the commands to the root command."""
    messages.register(exchanges.app)
    exchanges.app.command("move")(moving.move)
    for each in (exchanges.app, policies.app, shards.app, nodes.app):
        app.add_typer(each, rich_help_panel=PANEL)
