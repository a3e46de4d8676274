"""Commands for users of messaging servers."""

import typer

from shardyard.cli.messaging import chat, where

PANEL = "Messaging"


def register(app: typer.Typer) -> None:
    """Add the commands to the root command."""
    app.command("chat", rich_help_panel=PANEL)(chat.chat)
    app.command("where", rich_help_panel=PANEL)(where.where)
