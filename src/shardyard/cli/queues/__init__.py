"""Commands that talk to brokers: topics, records, groups, dead letters."""

import typer

from shardyard.cli.queues import audit_log, consume, dead, groups, nginx, publish, search, topics

PANEL = "Work queues"


def register(app: typer.Typer) -> None:
    """Add the commands to the root command."""
    app.add_typer(topics.app, rich_help_panel=PANEL)
    app.command("publish", rich_help_panel=PANEL)(publish.publish)
    app.command("consume", rich_help_panel=PANEL)(consume.consume)
    app.add_typer(groups.app, rich_help_panel=PANEL)
    app.add_typer(dead.app, rich_help_panel=PANEL)
    app.command("search", rich_help_panel=PANEL)(search.search)
    app.command("audit-log", rich_help_panel=PANEL)(audit_log.audit_log)
    app.command("nginx-config", rich_help_panel=PANEL)(nginx.nginx_config)
