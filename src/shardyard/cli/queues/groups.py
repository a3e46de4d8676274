"""`shardyard groups`: who owns what and how far they got; settings, pauses, resets."""

import sys
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any

import typer

from shardyard.cli.help import Command, Rows
from shardyard.cli.output import Count, Json, Row, print_json, print_table, print_tables, say
from shardyard.cli.queues.options import (
    OWN,
    TIME,
    Brokers,
    Group,
    Session,
    Settings,
    Text,
    Topic,
    ask,
    changes,
    checked,
    print_listed,
    settings_help,
    shown_setting,
    time_ms,
)
from shardyard.cli.queues.topics import say_deleted
from shardyard.model import InvalidCall, InvalidValue

app = typer.Typer(
    name="groups",
    help="See who owns what and how far they got; set, pause, resume, reset and delete groups.",
    no_args_is_help=True,
)

Partitions = Annotated[
    list[str] | None,
    typer.Option("--partition", metavar="TOPIC/INDEX", help="Only this one; may be given several times."),
]
STUCK_SECONDS = 5.0
"""Without progress, of which a person hears."""


class To(StrEnum):
    EARLIEST = "earliest"
    LATEST = "latest"


@app.command("list")
def list_groups(
    every: Annotated[bool, typer.Option("--all", help="Also those that Shardyard keeps for itself.")] = False,
    brokers: Brokers = None,
    json: Json = False,
) -> None:
    """List the groups, with the number of their members and their lag.

    Examples:

      shardyard groups list

      shardyard groups list --all --json
    """
    found = ask(brokers, "GET", "/v1/groups")
    shown = [row for row in found if every or not row["group"].startswith(OWN)]
    print_listed(shown, "groups", len(found) - len(shown), json=json)


@app.command("show")
def show(group: Group, brokers: Brokers = None, json: Json = False) -> None:
    """Show a group: each partition with owner, epoch, committed, end and lag; the members; the settings.

    Also the next owner of a partition that moves, and for how many seconds (stuck_for) an owner has not got ahead. On a
    terminal that, and what is the same for all members, is left out where there is nothing to say.

    A group that is set before anybody joined has settings alone (in --json: joined is false).

    Examples:

      shardyard groups show billing

      watch shardyard groups show billing
    """
    found = ask(brokers, "GET", _path(group))
    if json:
        print_json(found)
        return
    print_tables(
        {
            "partitions": _telling([_row(row, group) for row in found["partitions"]]),
            "members": _telling([_member(member) for member in found["members"]]),
            "settings": _settings(found["settings"]),
        }
    )
    if not found["joined"]:
        say(f"group {group!r}: nobody has joined yet")


class _Set(Command):
    def sections(self) -> Mapping[str, Rows]:
        from shardyard.wire.settings import GroupSettings  # noqa: PLC0415 slow to import

        return {"Settings": settings_help(GroupSettings)}


@app.command("set", cls=_Set)
def set_group(group: Group, settings: Settings, brokers: Brokers = None, json: Json = False) -> None:
    """Change settings; those that are not named stay. It takes effect at once, for all members.

    A group may be set before its first member joins. docs/queues.md says what each setting does.

    Examples:

      shardyard groups set billing backoff=1,5,30 concurrency=32

      shardyard groups set billing lag_alarm=10000 webhook=https://example.org/alarm

      shardyard groups set billing tags=eu,us max_active=2 release_after=none
    """
    from shardyard.wire.settings import GroupSettings  # noqa: PLC0415 slow to import

    asked = changes(GroupSettings, settings)
    with Session(brokers) as session:
        told = session.ask("PATCH", _path(group), asked)
        joined = session.ask("GET", _path(group))["joined"]
    if json:
        print_json(told)
    else:
        print_table(_settings(told))
    if not joined:
        say(f"group {group!r} has no members yet: the settings will hold when one joins")


@app.command("pause")
def pause(group: Group, partitions: Partitions = None, brokers: Brokers = None, json: Json = False) -> None:
    """Give a group no more records, on all partitions or on some; its members stay.

    Examples:

      shardyard groups pause billing

      shardyard groups pause billing --partition orders/3
    """
    with Session(brokers) as session:
        found = session.ask("GET", _path(group))
        there = [f"{row['topic']}/{row['partition']}" for row in found["partitions"]]
        for each in partitions or ():
            if each not in there:
                raise InvalidValue("--partition", each, f"one of the group's: {', '.join(there)}")
        paused = [*found["settings"]["paused_partitions"], *(partitions or ())]
        asked = {"paused_partitions": sorted(set(paused))} if partitions else {"paused": True}
        _print_paused(group, session.ask("PATCH", _path(group), asked), json=json)


@app.command("resume")
def resume(group: Group, partitions: Partitions = None, brokers: Brokers = None, json: Json = False) -> None:
    """Give a group records again, on all partitions or on some that were paused.

    Examples:

      shardyard groups resume billing

      shardyard groups resume billing --partition orders/3
    """
    with Session(brokers) as session:
        settings = session.ask("GET", _path(group))["settings"]
        left: list[str] = settings["paused_partitions"]
        if partitions and settings["paused"]:
            raise InvalidCall(f"group {group!r} is paused as a whole: resume it as a whole")
        for each in partitions or ():
            if each not in left:
                raise InvalidValue("--partition", each, f"one that is paused: {', '.join(left) or 'none is'}")
        stay = [each for each in left if partitions and each not in partitions]
        asked = {"paused": False, "paused_partitions": stay}
        _print_paused(group, session.ask("PATCH", _path(group), asked), json=json)


@app.command("reset")
def reset(
    group: Group,
    topic: Topic,
    to: Annotated[
        To | None, typer.Option("--to", metavar="earliest|latest", help="The first record there is, or the end.")
    ] = None,
    offset: Annotated[int | None, Count("--offset", help="An offset.")] = None,
    time: Annotated[
        str | None, Text("--time", metavar="TIME", help=f"The first record from then on, such as {TIME}.")
    ] = None,
    partitions: Annotated[list[int] | None, Count("--partition", help="Only this one; may be given several times.")] = (
        None
    ),
    brokers: Brokers = None,
    json: Json = False,
) -> None:
    """Let a group go on from elsewhere, also while its members run.

    Examples:

      shardyard.groups.position_reset billing orders --to earliest

      shardyard.groups.position_reset billing orders --offset 1200 --partition 3

      shardyard.groups.position_reset billing orders --time 2026-01-31T12:00:00Z
    """
    ways = {"to": to, "offset": offset, "time": time_ms("--time", time)}
    named = [(way, value) for way, value in ways.items() if value is not None]
    if len(named) != 1:
        raise InvalidCall("expected one of --to, --offset and --time")
    ((way, value),) = named
    asked: dict[str, object] = {"topic": topic, "partitions": partitions or None}
    asked |= {"to": value} if way == "to" else {"to": way, "value": value}
    found = ask(brokers, "POST", f"{_path(group)}/reset", asked)
    if json:
        print_json(found)
    else:
        print_table([{"partition": name, "offset": at} for name, at in found.items()])


@app.command("delete")
def delete(
    group: Group,
    force: Annotated[
        bool, typer.Option("--force", help="Also with dead letters, and with records that wait to be tried again.")
    ] = False,
    brokers: Brokers = None,
) -> None:
    """Forget a group that has no members: its positions and its settings.

    Its retry and dead-letter topics go with it. Those with records that wait to be tried again, or with dead letters,
    are kept, unless by force.

    Examples:

      shardyard groups delete billing

      shardyard groups delete billing --force
    """
    told = ask(brokers, "DELETE", _path(group), force=str(force).lower())
    say_deleted(f"group {group!r}", told)


def _path(group: str) -> str:
    return f"/v1/groups/{checked(group)}"


def _row(row: dict[str, Any], group: str) -> dict[str, object]:
    of = {} if row["group"] == group else {"group": row["group"]}  # of a broadcast group each member has its own
    return of | {
        "partition": f"{row['topic']}/{row['partition']}",
        "owner": row["owner"],
        "next_owner": row["next_owner"],
        "epoch": row["epoch"],
        "committed": row["committed"],
        "end": row["end"],
        "lag": row["lag"],
        "stuck_for": row["stuck_for"] if row["stuck_for"] >= STUCK_SECONDS else None,
    }


def _member(member: dict[str, Any]) -> dict[str, object]:
    """Its retry topics go without saying."""
    from shardyard.queues.retry_topics import parse_companion  # noqa: PLC0415 slow to import

    return {
        "member": member["member"],
        "topics": ",".join(topic for topic in member["topics"] if parse_companion(topic) is None),
        "weight": member["weight"],
        "static": member["static"],
        "session_timeout": member["session_timeout"],
        "standby": member["standby"],
    }


_USUAL: dict[str, object] = {
    "next_owner": None,
    "stuck_for": None,
    "weight": 1,
    "static": False,
    "session_timeout": 10.0,
    "standby": False,
}
"""Of which people need not hear. A program in a pipe gets the same columns always."""


def _telling(rows: list[dict[str, object]]) -> list[Row]:
    """On a terminal, without the columns that say nothing."""
    dull = {name for name, usual in _USUAL.items() if all(row.get(name, usual) == usual for row in rows)}
    dull = dull if sys.stdout.isatty() else set()
    return [{name: value for name, value in row.items() if name not in dull} for row in rows]


def _settings(settings: dict[str, Any]) -> list[Row]:
    return [{"setting": name, "value": shown_setting(value)} for name, value in settings.items()]


def _print_paused(group: str, settings: dict[str, Any], *, json: bool) -> None:
    row = {"group": group, **{name: settings[name] for name in ("paused", "paused_partitions")}}
    if json:
        print_json(row)
    else:
        print_table([{**row, "paused_partitions": shown_setting(row["paused_partitions"])}])
