"""`shardyard shards`: list, show, purge and delete queues, most of which are shards."""

from typing import Annotated, Any

import typer

from shardyard.cli.options import Json, value_option
from shardyard.cli.output import print_list, print_message
from shardyard.cli.queues.options import Brokers
from shardyard.cli.queues.session import request
from shardyard.cli.sharding.options import SHARD_COLUMNS, Queue, columns_of, path, print_row
from shardyard.cli.sharding.session import with_client

app = typer.Typer(name="shards", help="List, show, purge and delete shards and other queues.", no_args_is_help=True)


@app.command("list")
def list_shards(
    exchange: Annotated[
        str | None, value_option("--exchange", metavar="EXCHANGE", help="Only the shards of this exchange.")
    ] = None,
    brokers: Brokers = None,
    json: Json = False,
) -> None:
    """List shards and other queues: who owns them, and what is in them. A dash means that no owner could be asked.

    Examples:

      shardyard shards list

      shardyard shards list --exchange images --json
    """
    query = {} if exchange is None else {"exchange": exchange}
    found: list[dict[str, Any]] = request(brokers, "GET", "/v1/queues", **query)
    print_list(found if json else columns_of(found, SHARD_COLUMNS), "queues", json=json)


@app.command("show")
def show(queue: Queue, brokers: Brokers = None, json: Json = False) -> None:
    """Show everything about a queue.

    Examples:

      shardyard shards show 'sharding: images - a - 0'
    """
    print_row(request(brokers, "GET", path("queues", queue)), json=json)


@app.command("purge")
def purge(queue: Queue, brokers: Brokers = None, json: Json = False) -> None:
    """Remove the messages of a queue that wait for delivery. Those at consumers stay.

    Examples:

      shardyard shards purge 'dead letters: images'
    """
    purged = with_client(brokers, lambda client: client.administration.purge_queue(queue))
    print_row({"name": purged.name, "messages": purged.messages}, json=json)


@app.command("delete")
def delete(queue: Queue, brokers: Brokers = None, json: Json = False) -> None:
    """Delete a queue with its messages: one of your own, one of dead letters, or a shard that is draining. A shard of a
    sharded exchange goes with its policy.

    Examples:

      shardyard shards delete audit
    """
    deleted = request(brokers, "DELETE", path("queues", queue))
    print_row(deleted, json=json)
    if not json:
        print_message(f"queue {queue!r} was deleted")
