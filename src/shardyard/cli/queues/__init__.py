"""Commands that talk to brokers: topics, records, groups, dead letters."""

import typer

from shardyard.cli.queues import audit_log, consume, dead, groups, nginx, publish, search, topics


def register(app: typer.Typer) -> None:
    """Add the commands to the root command."""
    app.add_typer(topics.app)
    app.command("publish")(publish.publish)
    app.command("consume")(consume.consume)
    app.add_typer(groups.app)
    app.add_typer(dead.app)
    app.command("search")(search.search)
    app.command("audit-log")(audit_log.audit_log)
    app.command("nginx-config")(nginx.nginx_config)
