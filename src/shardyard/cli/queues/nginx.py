"""`shardyard nginx-config`: Nginx as a load balancer in front of several brokers."""

# ruff: noqa: PLC0415 commands start quickly: what is slow to import is imported by those that need it

import sys
from typing import Annotated

import typer


def nginx_config(
    brokers: Annotated[
        str,
        typer.Option(
            "--brokers",
            metavar="HOST:PORT,...",
            help="The brokers to balance requests over, with or without http://.",
            show_default=False,
        ),
    ],
    listen: Annotated[
        str,
        typer.Option(
            "--listen",
            metavar="[HOST:]PORT",
            help="Where Nginx listens. Without a host: on 127.0.0.1; with *:PORT: on all interfaces.",
        ),
    ] = "7480",
) -> None:
    """Print an Nginx configuration that balances requests over brokers, and fails over when one of them dies.

    Examples:

      shardyard nginx-config --brokers 127.0.0.1:7400,127.0.0.1:7401 > nginx.conf

      nginx -p "$PWD" -c nginx.conf -e error.log
    """
    from shardyard.server.nginx import nginx_config as config

    addresses = [url.strip().removeprefix("http://").removesuffix("/") for url in brokers.split(",") if url.strip()]
    sys.stdout.write(config(addresses, listen))
