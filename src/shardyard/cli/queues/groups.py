"""`shardyard groups`: who owns what and how far they got; settings, pauses, resets."""

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Any

import typer

from shardyard.cli.output import Count, Json, print_json, print_table
from shardyard.cli.queues.options import (
    Brokers,
    Group,
    Session,
    Settings,
    Topic,
    ask,
    changes,
    checked,
    say,
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


class To(StrEnum):
    EARLIEST = "earliest"
    LATEST = "latest"


@app.command("list")
def list_groups(brokers: Brokers = None, json: Json = False) -> None:
    """List the groups, with the number of their members and their lag.

    Examples:

      shardyard groups list
    """
    found = ask(brokers, "GET", "/v1/groups")
    if json:
        print_json(found)
    else:
        print_table(found)


@app.command("show")
def show(group: Group, brokers: Brokers = None, json: Json = False) -> None:
    """Show a group: each partition with owner, epoch, committed, end and lag; the members; the settings.

    A group that is set before anybody joined has settings alone (in --json: joined is false).

    Examples:

      shardyard groups show billing

      watch shardyard groups show billing
    """
    found = ask(brokers, "GET", _path(group))
    if json:
        print_json(found)
        return
    print_table([_row(row) for row in found["partitions"]], "partitions")
    if not found["joined"]:
        say(f"group {group!r}: nobody has joined yet")
    members = [{**member, "topics": ",".join(member["topics"])} for member in found["members"]]
    print_table(members, "members")
    _print_settings(found["settings"])


@app.command("set")
def set_group(group: Group, settings: Settings, brokers: Brokers = None, json: Json = False) -> None:
    """Change settings; those that are not named stay. It takes effect at once, for all members.

    A group may be set before its first member joins.

    backoff (seconds before each further attempt), tags, allow, deny (lists such as a,b), broadcast, concurrency,
    max_records, handler_seconds, lag_alarm, webhook, assignor, max_active, release_after. none takes a setting away.

    Examples:

      shardyard groups set billing backoff=1,5,30 concurrency=32

      shardyard groups set billing lag_alarm=10000 webhook=https://example.org/alarm

      shardyard groups set billing tags=eu,us max_active=2 release_after=none
    """
    from shardyard.queues.settings import GroupSettings  # noqa: PLC0415 slow to import

    asked = changes(GroupSettings, settings)
    with Session(brokers) as session:
        told = session.ask("PATCH", _path(group), asked)
        joined = session.ask("GET", _path(group))["joined"]
    if json:
        print_json(told)
    else:
        _print_settings(told)
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
    to: Annotated[To | None, typer.Option("--to", help="The first record there is, or the end.")] = None,
    offset: Annotated[int | None, Count("--offset", help="An offset.")] = None,
    time: Annotated[
        str | None, typer.Option("--time", help="The first record from then on, such as 2026-01-31T12:00:00Z.")
    ] = None,
    partitions: Annotated[list[int] | None, Count("--partition", help="Only this one; may be given several times.")] = (
        None
    ),
    brokers: Brokers = None,
    json: Json = False,
) -> None:
    """Let a group go on from elsewhere, also while its members run.

    Examples:

      shardyard groups reset billing orders --to earliest

      shardyard groups reset billing orders --offset 1200 --partition 3

      shardyard groups reset billing orders --time 2026-01-31T12:00:00Z
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


def _row(row: dict[str, Any]) -> dict[str, object]:
    """What people look for; the rest is in --json."""
    place = f"{row['topic']}/{row['partition']}"
    owner = row["owner"] if row["next_owner"] is None else f"{row['owner'] or ''} -> {row['next_owner']}"
    told = {"partition": place, "owner": owner, "committed": row["committed"], "end": row["end"], "lag": row["lag"]}
    return {name: _text(value) for name, value in told.items()}


def _print_settings(settings: dict[str, Any]) -> None:
    print_table([{"setting": name, "value": _text(value)} for name, value in settings.items()], "settings")


def _print_paused(group: str, settings: dict[str, Any], *, json: bool) -> None:
    row = {"group": group, **{name: settings[name] for name in ("paused", "paused_partitions")}}
    if json:
        print_json(row)
    else:
        print_table([{name: _text(value) for name, value in row.items()}])


def _text(value: object) -> object:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ",".join(map(str, value))
    return "" if value is None else value
