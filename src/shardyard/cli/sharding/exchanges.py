"""`shardyard exchanges`: declare, show, bind, purge, rebalance and delete exchanges."""

from typing import Annotated

import typer

from shardyard.cli.options import Json, value_option
from shardyard.cli.output import print_json, print_list, print_message, print_table, print_tables
from shardyard.cli.queues.options import Brokers
from shardyard.cli.queues.session import request
from shardyard.cli.sharding.options import (
    SHARD_COLUMNS,
    Exchange,
    columns_of,
    path,
    policy_columns,
    print_removed,
    print_row,
)
from shardyard.cli.sharding.session import with_client
from shardyard.model.sharding import ExchangeType
from shardyard.wire.sharding import NewBinding, NewExchange

app = typer.Typer(
    name="exchanges", help="Declare and show exchanges, and publish to and consume from them.", no_args_is_help=True
)

RoutingKey = Annotated[
    str,
    typer.Option(
        *("--routing-key", "-k"),
        metavar="KEY",
        help="The routing key; of an x-consistent-hash exchange, the weight.",
        show_default=False,
    ),
]
_COLUMNS = ("name", "type", "hash_header", "hash_property")


@app.command("declare")
def declare(
    exchange: Exchange,
    type_: Annotated[
        str, typer.Option("--type", "-t", metavar="TYPE", help=f"How it routes: {', '.join(ExchangeType)}.")
    ] = "x-modulus-hash",
    hash_header: Annotated[
        str | None, value_option("--hash-header", metavar="NAME", help="Hash this header instead of the routing key.")
    ] = None,
    hash_property: Annotated[
        str | None,
        value_option(
            "--hash-property",
            metavar="NAME",
            help="Hash this property instead: message_id, correlation_id or timestamp.",
        ),
    ] = None,
    brokers: Brokers = None,
    json: Json = False,
) -> None:
    """Declare an exchange. If a policy matches its name, it gets its shards at once. Declaring it again changes
    nothing.

    Examples:

      shardyard exchanges declare images

      shardyard exchanges declare orders --type x-consistent-hash --hash-header customer
    """
    body = NewExchange(exchange, type_, hash_header, hash_property)  # type: ignore[arg-type]  # the broker checks it
    print_row(request(brokers, "POST", "/v1/exchanges", body), _COLUMNS, json=json)


@app.command("list")
def list_exchanges(brokers: Brokers = None, json: Json = False) -> None:
    """List exchanges.

    Examples:

      shardyard exchanges list --json
    """
    print_list(request(brokers, "GET", "/v1/exchanges"), "exchanges", json=json)


@app.command("show")
def show(exchange: Exchange, brokers: Brokers = None, json: Json = False) -> None:
    """Show an exchange with the policy that applies to it, its shards and what is in them, and other bindings.

    Examples:

      shardyard exchanges show images
    """
    found = request(brokers, "GET", path("exchanges", exchange))
    if json:
        print_json(found)
        return
    shards = {shard["name"] for shard in found["shards"]}
    policies = [found["policy"]] if found["policy"] else []
    print_tables(
        {
            "exchange": [found["exchange"]],
            "policy": columns_of(policies, policy_columns(policies)),
            "shards": columns_of(found["shards"], SHARD_COLUMNS),
            "bindings": [
                {"queue": binding["queue"], "routing_key": binding["routing_key"]}
                for binding in found["bindings"]
                if binding["queue"] not in shards
            ],
        }
    )
    if not found["policy"]:
        print_message(f"no policy applies to {exchange!r}: `shardyard policies set` gives it shards")


@app.command("bind")
def bind(
    exchange: Exchange,
    queue: Annotated[str, typer.Argument(metavar="QUEUE", help="The queue's name.", show_default=False)],
    routing_key: RoutingKey = "",
    brokers: Brokers = None,
    json: Json = False,
) -> None:
    """Bind a queue of your own to an exchange, and declare it if it does not exist. Shards are bound by their policy.

    Examples:

      shardyard exchanges bind events audit --routing-key paid

      shardyard exchanges bind orders large --routing-key 3
    """
    body = NewBinding(queue, routing_key, declare=True)
    print_row(request(brokers, "POST", path("exchanges", exchange, "bindings"), body), json=json)


@app.command("unbind")
def unbind(
    exchange: Exchange,
    queue: Annotated[str, typer.Argument(metavar="QUEUE", help="The queue's name.", show_default=False)],
    routing_key: RoutingKey = "",
    brokers: Brokers = None,
    json: Json = False,
) -> None:
    """Undo a binding. The queue keeps its messages.

    Examples:

      shardyard exchanges unbind events audit --routing-key paid
    """
    where = path("exchanges", exchange, "bindings")
    done = request(brokers, "DELETE", where, queue=queue, routing_key=routing_key)
    print_row(done, json=json)
    if not json and not done["was_bound"]:
        print_message(f"nothing has changed: queue {queue!r} was not bound to {exchange!r} with key {routing_key!r}")


@app.command("purge")
def purge(exchange: Exchange, brokers: Brokers = None, json: Json = False) -> None:
    """Remove the messages of all shards that wait for delivery. Those at consumers stay.

    If the node of a shard has died, this waits until another one serves it. If some shards can't be purged, the command
    fails, and names them.

    Examples:

      shardyard exchanges purge images
    """
    purged = with_client(brokers, lambda client: client.administration.purge_exchange(exchange))
    print_row({"name": purged.name, "messages": purged.messages}, json=json)


@app.command("rebalance")
def rebalance(exchange: Exchange, brokers: Brokers = None, json: Json = False) -> None:
    """Move the messages that wait to the shards where they would be routed now, in order per routing key.

    Useful after nodes have joined or `--shards-per-node` was raised: new shards get only new messages by themselves.
    Publishers and consumers wait meanwhile; nothing is lost if it is interrupted.

    Examples:

      shardyard exchanges rebalance images
    """
    done = with_client(brokers, lambda client: client.rebalance(exchange))
    if json:
        print_json({"name": done.name, "total": done.total, "messages": done.messages})
    else:
        print_table([{"shard": name, "messages": count} for name, count in done.messages.items()])


@app.command("delete")
def delete(
    exchange: Exchange,
    discard: Annotated[bool, typer.Option("--discard", help="Also delete its shards that have messages.")] = False,
    brokers: Brokers = None,
    json: Json = False,
) -> None:
    """Delete an exchange and its empty shards. Shards with unread messages are kept until they are read, and listed, as
    are dead letters.

    Examples:

      shardyard exchanges delete images

      shardyard exchanges delete images --discard
    """
    removed = request(brokers, "DELETE", path("exchanges", exchange), discard=str(discard).lower())
    print_removed(f"exchange {exchange!r} was deleted", removed, json=json)
