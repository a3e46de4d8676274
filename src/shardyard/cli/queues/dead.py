"""`shardyard dead`: records that were given up."""

from typing import Annotated, Any

import typer

from shardyard.cli.output import Count, Json, print_json, print_table
from shardyard.cli.queues.options import Brokers, Group, Topic, ask, checked, print_listed, shown_time
from shardyard.model import InvalidCall, InvalidValue

app = typer.Typer(name="dead", help="Look at records that a group gave up, and try them again.", no_args_is_help=True)

MOST = 10_000
"""Dead letters that a broker lists at once."""
VALUE_CHARACTERS = 40
"""Of a value in a list."""


@app.command("list")
def list_dead(
    group: Group,
    topic: Topic,
    limit: Annotated[int, Count("--limit", help="The most to list.")] = 100,
    brokers: Brokers = None,
    json: Json = False,
) -> None:
    """List a group's dead letters of a topic, the newest first. `dead show` has the whole value.

    Examples:

      shardyard dead list billing orders
    """
    found = _found(brokers, group, topic, limit)
    print_listed(found if json else [_row(letter) for letter in found], "dead letters", json=json)


@app.command("show")
def show(
    group: Group,
    topic: Topic,
    record: Annotated[
        str, typer.Argument(metavar="ID", help="The record's id, as `dead list` has it.", show_default=False)
    ],
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
    record_shown = {name: value for name, value in letter["record"].items() if name != "timestamp"}
    told = _row(letter) | record_shown
    print_table([{"field": name, "value": value} for name, value in told.items() if value != {}])


@app.command("redrive")
def redrive(
    group: Group,
    topic: Topic,
    records: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ID...]", help="Their ids, as `dead list` has them.", show_default=False),
    ] = None,
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
    published = letter["published"]
    return {
        "id": record["id"],
        "key": record.get("key", record.get("key_base64")),
        "value": _short(record.get("value", record.get("value_base64", ""))),
        "attempts": letter["attempts"],
        "reason": letter["reason"],
        "origin": letter["origin"],
        "published": None if published is None else shown_time(published),
        "died": shown_time(letter["died_at"]),
    }


def _short(text: str) -> str:
    return text if len(text) <= VALUE_CHARACTERS else f"{text[: VALUE_CHARACTERS - 1]}…"
