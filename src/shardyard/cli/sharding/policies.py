"""`shardyard policies`: set, list, show and clear policies."""

import sys
from typing import Annotated, Any

import typer

from shardyard.cli.options import Json, integer_option, value_option
from shardyard.cli.output import print_json, print_list, print_table
from shardyard.cli.queues.options import Brokers
from shardyard.cli.queues.session import request
from shardyard.cli.sharding.options import columns_of, path, policy_columns, print_remaining, print_removed, print_row
from shardyard.model import InvalidValue, whole_number
from shardyard.model.sharding import MAX_SHARDS_PER_NODE, Overflow
from shardyard.wire.sharding import NewPolicy

app = typer.Typer(
    name="policies", help="Set, list, show and clear the policies that give exchanges shards.", no_args_is_help=True
)

Name = Annotated[str, typer.Argument(metavar="POLICY", help="The policy's name.", show_default=False)]


@app.command("set")
def set_policy(
    name: Name,
    pattern: Annotated[
        str,
        typer.Argument(metavar="PATTERN", help="A regular expression for the names of exchanges.", show_default=False),
    ],
    shards_per_node: Annotated[
        int,
        integer_option("--shards-per-node", "-s", help=f"How many shards each node gets, 1 to {MAX_SHARDS_PER_NODE}."),
    ],
    routing_key: Annotated[
        str,
        typer.Option(
            *("--routing-key", "-k"),
            metavar="KEY",
            help="The key that shards are bound with, for direct exchanges.",
            show_default=False,
        ),
    ] = "",
    priority: Annotated[
        int, integer_option("--priority", help="Of several policies that match, the highest applies.")
    ] = 0,
    message_ttl: Annotated[
        int | None, integer_option("--message-ttl", help="Milliseconds after which messages expire.")
    ] = None,
    max_length: Annotated[
        int | None, integer_option("--max-length", help="The maximum number of messages in a shard.")
    ] = None,
    overflow: Annotated[
        str, typer.Option("--overflow", metavar="NAME", help=f"What happens beyond it: {', '.join(Overflow)}.")
    ] = Overflow.DROP_HEAD.value,
    delivery_limit: Annotated[
        int | None,
        integer_option(
            "--delivery-limit",
            help="How many deliveries of a message may fail; with the next one, it is a dead letter.",
        ),
    ] = None,
    dead_letter_exchange: Annotated[
        str | None,
        value_option(
            "--dead-letter-exchange",
            metavar="EXCHANGE",
            help="Where dead letters go. Default: the queue 'dead letters: EXCHANGE'.",
        ),
    ] = None,
    brokers: Brokers = None,
    json: Json = False,
) -> None:
    """Set a policy, or replace the one of that name. Exchanges whose names match get that many shards on every node, at
    once and whenever an exchange is declared or a node joins.

    With fewer shards than before, the surplus ones take no more messages. Those with unread messages are kept until
    they are read, and listed.

    Examples:

      shardyard policies set images-shard '^shard\\.images$' --shards-per-node 2

      shardyard policies set orders '^orders' -s 4 --delivery-limit 5 --message-ttl 86400000
    """
    if not 1 <= shards_per_node <= MAX_SHARDS_PER_NODE:
        raise InvalidValue("--shards-per-node", shards_per_node, f"a whole number from 1 to {MAX_SHARDS_PER_NODE}")
    for option, limit in (
        ("--message-ttl", message_ttl),
        ("--max-length", max_length),
        ("--delivery-limit", delivery_limit),
    ):
        if limit is not None:
            whole_number(option, limit, at_least=1)
    if overflow not in tuple(Overflow):
        raise InvalidValue("--overflow", overflow, "one of " + ", ".join(Overflow))
    body = NewPolicy(
        pattern,
        shards_per_node,
        routing_key,
        priority,
        message_ttl,
        max_length,
        overflow,  # type: ignore[arg-type]  # the broker checks it
        delivery_limit,
        dead_letter_exchange,
    )
    done = request(brokers, "PUT", path("policies", name), body)
    print_row(done, policy_columns([done]), json=json)
    if not json and done["remaining"]:
        sys.stdout.write("\n")
        print_remaining(done["remaining"])


@app.command("list")
def list_policies(brokers: Brokers = None, json: Json = False) -> None:
    """List policies.

    Examples:

      shardyard policies list
    """
    found: list[dict[str, Any]] = request(brokers, "GET", "/v1/policies")
    print_list(found if json else columns_of(found, policy_columns(found)), "policies", json=json)


@app.command("show")
def show(name: Name, brokers: Brokers = None, json: Json = False) -> None:
    """Show everything that a policy says. `shardyard exchanges show` shows which one applies to an exchange.

    Examples:

      shardyard policies show images-shard
    """
    found: dict[str, Any] = request(brokers, "GET", path("policies", name))
    if json:
        print_json(found)
    else:
        print_table([{"setting": setting, "value": value} for setting, value in found.items()])


@app.command("clear")
def clear(name: Name, brokers: Brokers = None, json: Json = False) -> None:
    """Clear a policy, and remove the shards that it created. Shards with unread messages are kept until they are read,
    and listed, as are dead letters.

    Examples:

      shardyard policies clear images-shard
    """
    print_removed(f"policy {name!r} was cleared", request(brokers, "DELETE", path("policies", name)), json=json)
