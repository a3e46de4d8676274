"""`shardyard where`: which server serves a user."""

# ruff: noqa: PLC0415 commands start quickly: what is slow to import is imported by those that need it

import asyncio
from typing import Annotated

import typer
from msgspec import structs

from shardyard.cli.messaging.options import Servers, addresses, explain_errors
from shardyard.cli.options import Json
from shardyard.cli.output import print_json, print_table
from shardyard.model import check_text


def where(
    user: Annotated[str, typer.Argument(metavar="USER", help="The name of the user.", show_default=False)],
    servers: Servers = None,
    json: Json = False,
) -> None:
    """Show which messaging server serves a user, and the partition that the user belongs to.

    Examples:

      shardyard where bob

      shardyard where bob --server http://10.0.0.5:7500 --json
    """
    from shardyard.client.messaging_directory import locate

    check_text("user", user)
    with explain_errors():
        row = structs.asdict(asyncio.run(locate(addresses(servers), user)))
    if json:
        print_json(row)
    else:
        print_table([row])
