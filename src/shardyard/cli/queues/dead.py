"""`shardyard dead`: inspect and redrive dead letters."""

import sys
from typing import Annotated, Any

import typer

from shardyard.cli.options import Json, integer_option
from shardyard.cli.output import print_json, print_list, print_table, printable
from shardyard.cli.queues.options import Brokers, Group, Topic, check_group, format_time, text_of
from shardyard.cli.queues.session import request
from shardyard.model import InvalidCall, InvalidValue
from shardyard.wire.requests import Redrive

app = typer.Typer(
    name="dead",
    help="Inspect and redrive dead letters: records that a group failed to handle.",
    no_args_is_help=True,
)

MAX_LETTERS = 10_000
"""The most dead letters that a broker lists at once."""
VALUE_CHARACTERS = 40
"""How much of a value a list shows."""
_LEFT_OUT = ("attempts", "origin", "published")
"""Columns for which a terminal has no room beside an id."""


@app.command("list")
def list_dead(
    group: Group,
    topic: Topic,
    limit: Annotated[int, integer_option("--limit", help="The maximum number of dead letters to list.")] = 100,
    brokers: Brokers = None,
    json: Json = False,
) -> None:
    """List a group's dead letters from a topic, newest first. `dead show` prints one in full, and so does --json.

    On a terminal, the columns attempts, origin and published are left out.

    Examples:

      shardyard dead list billing orders
    """
    letters = _dead_letters(brokers, group, topic, limit)
    left_out = _LEFT_OUT if sys.stdout.isatty() else ()
    rows = [{name: cell for name, cell in _row(letter).items() if name not in left_out} for letter in letters]
    print_list(letters if json else rows, "dead letters", json=json)


@app.command("show")
def show(
    group: Group,
    topic: Topic,
    record_id: Annotated[
        str, typer.Argument(metavar="ID", help="The record's id, as `dead list` prints it.", show_default=False)
    ],
    brokers: Brokers = None,
    json: Json = False,
) -> None:
    """Show one dead letter: the record, why it failed (with the end of the traceback), and where it was published.

    Examples:

      shardyard dead show billing orders 6f1e0b2c8d5a4f7e9b3c1d2e4f5a6b7c
    """
    for letter in _dead_letters(brokers, group, topic, MAX_LETTERS):
        if letter["record"]["id"] == record_id:
            break
    else:
        expected = f"the id of one of the newest {MAX_LETTERS} dead letters; see `shardyard dead list`"
        raise InvalidValue("ID", record_id, expected)
    if json:
        print_json(letter)
        return
    record = {name: value for name, value in letter["record"].items() if name != "timestamp"}
    fields = _row(letter) | record
    print_table([{"field": name, "value": value} for name, value in fields.items() if value not in ({}, "")])
    if lines := letter["traceback"].splitlines():
        shown = map(printable, lines) if sys.stdout.isatty() else lines
        sys.stdout.write("".join(f"{line}\n" for line in ("", *shown)))


@app.command("redrive")
def redrive(
    group: Group,
    topic: Topic,
    record_ids: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ID...]", help="The records' ids, as `dead list` prints them.", show_default=False),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Redrive all of them.")] = False,
    brokers: Brokers = None,
    json: Json = False,
) -> None:
    """Deliver dead letters to their group again, as if they had never failed: those with the given ids, or all.

    Examples:

      shardyard dead redrive billing orders 6f1e0b2c8d5a4f7e9b3c1d2e4f5a6b7c

      shardyard dead redrive billing orders --all
    """
    if bool(record_ids) == every:
        raise InvalidCall("expected either ids of dead letters, or --all")
    body = Redrive(topic, None if every else record_ids)
    response = request(brokers, "POST", f"/v1/groups/{check_group(group)}/dead/redrive", body)
    if json:
        print_json(response)
    else:
        print_table([response])


def _dead_letters(brokers: list[str] | None, group: str, topic: str, limit: int) -> list[dict[str, Any]]:
    path = f"/v1/groups/{check_group(group)}/dead"
    letters: list[dict[str, Any]] = request(brokers, "GET", path, topic=topic, limit=limit)
    return letters


def _row(letter: dict[str, Any]) -> dict[str, Any]:
    record = letter["record"]
    published = letter["published"]
    return {
        "id": record["id"],
        "key": text_of(record, "key"),
        "value": _shorten(text_of(record, "value") or ""),
        "attempts": letter["attempts"],
        "reason": letter["reason"],
        "origin": letter["origin"],
        "published": None if published is None else format_time(published),
        "died": format_time(letter["died_at"]),
    }


def _shorten(text: str) -> str:
    return text if len(text) <= VALUE_CHARACTERS else f"{text[: VALUE_CHARACTERS - 1]}…"
