"""Arguments, paths and tables that the commands for sharded queues share."""

from typing import Annotated, Any
from urllib.parse import quote

import typer

from shardyard.cli.output import print_json, print_message, print_table
from shardyard.model import InvalidValue
from shardyard.model.sharding import DEAD_PREFIX, SHARD_PREFIX

Exchange = Annotated[str, typer.Argument(metavar="EXCHANGE", help="The exchange's name.", show_default=False)]
Queue = Annotated[
    str,
    typer.Argument(metavar="QUEUE", help="The queue's name, such as 'sharding: images - a - 0'.", show_default=False),
]
SHARD_COLUMNS = ("name", "state", "owner", "ready", "unacknowledged", "consumers")


_POLICY_COLUMNS = ("name", "pattern", "shards_per_node", "priority", "routing_key")
_POLICY_LIMITS = ("message_ttl_ms", "max_length", "overflow", "delivery_limit", "dead_letter_exchange")


def path(kind: str, name: str, *more: str) -> str:
    """The path of an exchange, a policy, a queue or a node."""
    if "/" in name or not name.strip("."):
        raise InvalidValue("name", name, "a name without '/' and not only of dots")
    return "/v1/" + "/".join(quote(part, safe="") for part in (kind, name, *more))


def columns_of(rows: list[dict[str, Any]], columns: tuple[str, ...]) -> list[dict[str, Any]]:
    return [{column: row[column] for column in columns} for row in rows]


def policy_columns(policies: list[dict[str, Any]]) -> tuple[str, ...]:
    """What is shown of policies: of the limits, those that one of them has. `overflow` goes with `max_length`."""
    limits = (
        limit
        for limit in _POLICY_LIMITS
        if any(policy["max_length" if limit == "overflow" else limit] is not None for policy in policies)
    )
    return (*_POLICY_COLUMNS, *limits)


def print_row(row: dict[str, Any], columns: tuple[str, ...] | None = None, *, json: bool) -> None:
    if json:
        print_json(row)
    else:
        print_table(columns_of([row], columns or tuple(row)))


def print_removed(what: str, removed: dict[str, Any], *, json: bool) -> None:
    """Print what was done, such as "policy 'a' was deleted", and which shards are left with unread messages."""
    if json:
        print_json(removed)
        return
    print_message(what)
    print_remaining(removed["remaining"])


def print_remaining(remaining: list[dict[str, Any]]) -> None:
    """Print which shards and dead letters are left, and what can be done with them."""
    print_table(columns_of(remaining, ("queue", "messages")))
    names = [left["queue"] for left in remaining]
    if shards := [name for name in names if not name.startswith(DEAD_PREFIX)]:
        first = shards[0]
        exchange = first.removeprefix(SHARD_PREFIX).rsplit(" - ", 2)[0]
        print_message(
            "these shards take no more messages, and are removed once they are empty: "
            f"`shardyard exchanges consume '{exchange}'` reads all of that exchange, and "
            f"`shardyard exchanges consume '{first}'` this one; `shardyard shards delete` drops one with its messages"
        )
    if dead := [name for name in names if name.startswith(DEAD_PREFIX)]:
        print_message(
            f"dead letters stay until they are read: `shardyard exchanges consume '{dead[0]}'`, or `shardyard shards "
            f"delete '{dead[0]}'`"
        )
