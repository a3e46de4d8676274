"""`shardyard nodes`: list and forget the nodes of sharded queues."""

from typing import Annotated

import typer

from shardyard.cli.options import Json
from shardyard.cli.output import print_list
from shardyard.cli.queues.options import Brokers
from shardyard.cli.queues.session import request
from shardyard.cli.sharding.options import path, print_removed

app = typer.Typer(name="nodes", help="List and forget the nodes of sharded queues.", no_args_is_help=True)


@app.command("list")
def list_nodes(brokers: Brokers = None, json: Json = False) -> None:
    """List the brokers that ever took part in sharded queues, also those that do not run.

    Examples:

      shardyard nodes list
    """
    print_list(request(brokers, "GET", "/v1/nodes"), "nodes", json=json)


@app.command("forget")
def forget(
    node: Annotated[str, typer.Argument(metavar="NODE", help="The node's name.", show_default=False)],
    brokers: Brokers = None,
    json: Json = False,
) -> None:
    """Forget a node that was stopped for good. Its shards take no more messages; those with unread messages are kept
    until they are read, and listed.

    A node that only restarts needs nothing: until it is back, others serve its shards.

    Examples:

      shardyard nodes forget shardyard-7401@host
    """
    print_removed(f"node {node!r} was forgotten", request(brokers, "DELETE", path("nodes", node)), json=json)
