"""`shardyard nginx-config`: a proxy before several brokers."""

import sys
from typing import Annotated

import typer


def nginx_config(
    brokers: Annotated[
        str,
        typer.Option(
            "--brokers",
            metavar="HOST:PORT,...",
            help="The brokers to spread calls over; http:// may stand before each.",
            show_default=False,
        ),
    ],
    listen: Annotated[
        str,
        typer.Option(
            "--listen",
            metavar="[HOST:]PORT",
            help="Where Nginx listens; on 127.0.0.1 if no host is named, on all with *:PORT.",
        ),
    ] = "7480",
) -> None:
    """Print an Nginx configuration that spreads calls over brokers, and goes on when one of them dies.

    Examples:

      shardyard nginx-config --brokers 127.0.0.1:7400,127.0.0.1:7401 > nginx.conf

      nginx -p "$PWD" -c nginx.conf -e error.log
    """
    from shardyard.server.nginx import nginx_config as config  # noqa: PLC0415 slow to import

    named = [each.strip().removeprefix("http://").removesuffix("/") for each in brokers.split(",") if each.strip()]
    sys.stdout.write(config(named, listen))
