"""`shardyard dead`: records that were given up."""

from typing import Annotated, Any

import typer

from shardyard.cli.output import Count, Json, print_json, print_table
from shardyard.cli.queues.options import Brokers, Group, Topic, ask, checked, shown_time
from shardyard.model import InvalidCall, InvalidValue

app = typer.Typer(name="dead", help="Look at records that a group gave up, and try them again.", no_args_is_help=True)

MOST = 10_000
"""Dead letters that a broker lists at once."""


@app.command("list")
def list_dead(
    group: Group,
    topic: Topic,
    limit: Annotated[int, Count("--limit", help="The most to list.")] = 100,
    brokers: Brokers = None,
    json: Json = False,
) -> None:
    """List a group's dead letters of a topic, the newest first.

    Examples:

      shardyard dead list billing orders
    """
    found = _found(brokers, group, topic, limit)
    if json:
        print_json(found)
    else:
        print_table([_row(letter) for letter in found])


@app.command("show")
def show(
    group: Group,
    topic: Topic,
    record: Annotated[str, typer.Argument(metavar="ID", show_default=False)],
    brokers: Brokers = None,
    json: Json = False,
) -> None:
    """Show one dead letter: the record, why it was given up, and where it came from.

    Examples:

      shardyard dead show billing orders 6f1e0b2c8d5a4f7e9b3c1d2e4f5a6b7c
    """
    for letter in _found(brokers, group, topic, MOST):
        if letter["record"]["id"] == record:
            break
    else:
        raise InvalidValue("ID", record, f"that of one of the newest {MOST} dead letters; see `shardyard dead list`")
    if json:
        print_json(letter)
        return
    told = _row(letter) | letter["record"] | {"headers": letter["record"].get("headers", {})}
    print_table([{"field": name, "value": value} for name, value in told.items() if value != {}])


@app.command("redrive")
def redrive(
    group: Group,
    topic: Topic,
    records: Annotated[list[str] | None, typer.Argument(metavar="[ID...]", show_default=False)] = None,
    every: Annotated[bool, typer.Option("--all", help="All there are.")] = False,
    brokers: Brokers = None,
    json: Json = False,
) -> None:
    """Give a group its dead letters again, as if they had never failed: those with the ids, or all.

    Examples:

      shardyard dead redrive billing orders 6f1e0b2c8d5a4f7e9b3c1d2e4f5a6b7c

      shardyard dead redrive billing orders --all
    """
    if bool(records) == every:
        raise InvalidCall("expected either ids of dead letters, or --all")
    asked = {"topic": topic, "ids": None if every else records}
    told = ask(brokers, "POST", f"/v1/groups/{checked(group)}/dead/redrive", asked)
    if json:
        print_json(told)
    else:
        print_table([told])


def _found(brokers: list[str] | None, group: str, topic: str, limit: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = ask(brokers, "GET", f"/v1/groups/{checked(group)}/dead", topic=topic, limit=limit)
    return found


def _row(letter: dict[str, Any]) -> dict[str, Any]:
    record = letter["record"]
    return {
        "id": record["id"],
        "key": record.get("key", ""),
        "attempts": letter["attempts"],
        "reason": letter["reason"],
        "origin": letter["origin"] or "",
        "died": shown_time(letter["died_at"]),
    }
