"""`shardyard groups`: owners, positions and lag of groups; settings, pauses, resets."""

import sys
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any

import typer

from shardyard.cli.help import Command, Rows
from shardyard.cli.options import Json, integer_option, value_option
from shardyard.cli.output import Row, print_json, print_list, print_message, print_table, print_tables
from shardyard.cli.queues.options import TIME, Brokers, Group, Settings, Topic, check_group, parse_time
from shardyard.cli.queues.session import Session, request
from shardyard.cli.queues.settings import format_setting, parse_settings, settings_help
from shardyard.cli.queues.topics import print_deleted
from shardyard.model import InvalidCall, InvalidValue
from shardyard.model.limits import INTERNAL_PREFIX
from shardyard.wire.companions import parse_companion
from shardyard.wire.requests import Pause, Reset
from shardyard.wire.settings import GroupSettings

app = typer.Typer(
    name="groups",
    help="Show owners, positions and lag of groups; configure, pause, resume, reset and delete them.",
    no_args_is_help=True,
)

Partitions = Annotated[
    list[str] | None,
    typer.Option("--partition", metavar="TOPIC/INDEX", help="Only this partition; may be repeated."),
]
STUCK_SECONDS = 5.0
"""How long an owner may make no progress before a table shows it."""


class ResetTarget(StrEnum):
    EARLIEST = "earliest"
    LATEST = "latest"


@app.command("list")
def list_groups(
    every: Annotated[bool, typer.Option("--all", help="Include Shardyard's internal groups.")] = False,
    brokers: Brokers = None,
    json: Json = False,
) -> None:
    """List groups, with their number of members and their lag.

    Examples:

      shardyard groups list

      shardyard groups list --all --json
    """
    groups = request(brokers, "GET", "/v1/groups")
    shown = [row for row in groups if every or not row["group"].startswith(INTERNAL_PREFIX)]
    print_list(shown, "groups", len(groups) - len(shown), json=json)


@app.command("show")
def show(group: Group, brokers: Brokers = None, json: Json = False) -> None:
    """Show a group: its partitions with owner, epoch, committed offset, end and lag; its members; its settings.

    For a partition that is moving, next_owner is the member it moves to. stuck_for is the number of seconds for which
    an owner has made no progress. dropped_unread counts records that retention dropped before the group had read them:
    they are not in the lag. On a terminal, columns in which every row has the default value are hidden.

    A group that no member has joined yet has only settings (with --json, joined is false).

    Examples:

      shardyard groups show billing

      watch shardyard groups show billing
    """
    shown = request(brokers, "GET", _path(group))
    if json:
        print_json(shown)
        return
    print_tables(
        {
            "partitions": _hide_default_columns([_partition_row(row, group) for row in shown["partitions"]]),
            "members": _hide_default_columns([_member_row(member) for member in shown["members"]]),
            "settings": _setting_rows(shown["settings"]),
        }
    )
    if not shown["joined"]:
        print_message(f"no member has joined group {group!r} yet")


class _Set(Command):
    def sections(self) -> Mapping[str, Rows]:
        return {"Settings": settings_help(GroupSettings)}


@app.command("set", cls=_Set)
def set_group(group: Group, settings: Settings, brokers: Brokers = None, json: Json = False) -> None:
    """Change a group's settings; those not named stay as they are. Takes effect at once, for all members.

    A group can be configured before its first member joins. docs/queues.md describes each setting.

    Examples:

      shardyard groups set billing backoff=1,5,30 concurrency=32

      shardyard groups set billing lag_alarm=10000 webhook=https://example.org/alarm

      shardyard groups set billing tags=eu,us max_active=2 release_after=none
    """
    changes = parse_settings(GroupSettings, settings)
    with Session(brokers) as session:
        changed = session.request("PATCH", _path(group), changes)
        joined = session.request("GET", _path(group))["joined"]
    if json:
        print_json(changed)
    else:
        print_table(_setting_rows(changed))
    if not joined:
        print_message(f"no member has joined group {group!r} yet: the settings will apply when one does")


@app.command("pause")
def pause(group: Group, partitions: Partitions = None, brokers: Brokers = None, json: Json = False) -> None:
    """Stop delivering records to a group, from all partitions or from some. Its members stay in the group.

    Examples:

      shardyard groups pause billing

      shardyard groups pause billing --partition orders/3
    """
    with Session(brokers) as session:
        shown = session.request("GET", _path(group))
        existing = [f"{row['topic']}/{row['partition']}" for row in shown["partitions"]]
        for partition in partitions or ():
            if partition not in existing:
                raise InvalidValue("--partition", partition, f"one of the group's partitions: {', '.join(existing)}")
        paused = [*shown["settings"]["paused_partitions"], *(partitions or ())]
        changes = Pause(paused_partitions=sorted(set(paused))) if partitions else Pause(paused=True)
        _print_paused(group, session.request("PATCH", _path(group), changes), json=json)


@app.command("resume")
def resume(group: Group, partitions: Partitions = None, brokers: Brokers = None, json: Json = False) -> None:
    """Deliver records to a paused group again, from all partitions or from some.

    Examples:

      shardyard groups resume billing

      shardyard groups resume billing --partition orders/3
    """
    with Session(brokers) as session:
        settings = session.request("GET", _path(group))["settings"]
        paused: list[str] = settings["paused_partitions"]
        if partitions and settings["paused"]:
            raise InvalidCall(f"all of group {group!r} is paused: resume it without --partition")
        for partition in partitions or ():
            if partition not in paused:
                raise InvalidValue(
                    "--partition", partition, f"a paused partition: {', '.join(paused) or 'there is none'}"
                )
        still_paused = [partition for partition in paused if partitions and partition not in partitions]
        changes = Pause(paused=False, paused_partitions=still_paused)
        _print_paused(group, session.request("PATCH", _path(group), changes), json=json)


@app.command("reset")
def reset(
    group: Group,
    topic: Topic,
    to: Annotated[
        ResetTarget | None,
        typer.Option("--to", metavar="earliest|latest", help="Continue with the first stored record, or at the end."),
    ] = None,
    offset: Annotated[int | None, integer_option("--offset", help="Continue at this offset.")] = None,
    time: Annotated[
        str | None,
        value_option(
            "--time", metavar="TIME", help=f"Continue with the first record at or after a time, such as {TIME}."
        ),
    ] = None,
    partitions: Annotated[
        list[int] | None, integer_option("--partition", help="Reset only this partition; may be repeated.")
    ] = None,
    brokers: Brokers = None,
    json: Json = False,
) -> None:
    """Reset a group's position in a topic. Works while its members run.

    Examples:

      shardyard groups reset billing orders --to earliest

      shardyard groups reset billing orders --offset 1200 --partition 3

      shardyard groups reset billing orders --time 2026-01-31T12:00:00Z
    """
    at = parse_time("--time", time)
    if sum(value is not None for value in (to, offset, at)) != 1:
        raise InvalidCall("expected exactly one of --to, --offset and --time")
    if to is not None:
        body = Reset(topic, to.value)
    else:
        body = Reset(topic, "time", at) if offset is None else Reset(topic, "offset", offset)
    body.partitions = partitions or None
    offsets = request(brokers, "POST", f"{_path(group)}/reset", body)
    if json:
        print_json(offsets)
    else:
        print_table([{"partition": partition, "offset": position} for partition, position in offsets.items()])


@app.command("delete")
def delete(
    group: Group,
    force: Annotated[
        bool, typer.Option("--force", help="Also delete dead letters, and records that wait for a retry.")
    ] = False,
    brokers: Brokers = None,
    json: Json = False,
) -> None:
    """Delete a group that has no members, with its positions and settings.

    Its retry and dead-letter topics are deleted too. Without --force, those that hold dead letters, or records that
    wait for a retry, are kept.

    Examples:

      shardyard groups delete billing

      shardyard groups delete billing --force
    """
    deleted = request(brokers, "DELETE", _path(group), force=str(force).lower())
    print_deleted(f"group {group!r}", deleted, json=json)


def _path(group: str) -> str:
    return f"/v1/groups/{check_group(group)}"


def _partition_row(row: dict[str, Any], group: str) -> dict[str, object]:
    # Each member of a broadcast group has a group of its own.
    member_group = {} if row["group"] == group else {"group": row["group"]}
    return member_group | {
        "partition": f"{row['topic']}/{row['partition']}",
        "owner": row["owner"],
        "next_owner": row["next_owner"],
        "epoch": row["epoch"],
        "committed": row["committed"],
        "end": row["end"],
        "lag": row["lag"],
        "stuck_for": row["stuck_for"] if row["stuck_for"] >= STUCK_SECONDS else None,
        "dropped_unread": row["dropped_unread"],
    }


def _member_row(member: dict[str, Any]) -> dict[str, object]:
    """A member without its retry topics, which every member has."""
    return {
        "member": member["member"],
        "topics": ",".join(topic for topic in member["topics"] if parse_companion(topic) is None),
        "weight": member["weight"],
        "static": member["static"],
        "session_timeout": member["session_timeout"],
        "standby": member["standby"],
    }


_COLUMN_DEFAULTS: dict[str, object] = {
    "next_owner": None,
    "stuck_for": None,
    "dropped_unread": 0,
    "weight": 1,
    "static": False,
    "session_timeout": 10.0,
    "standby": False,
}
"""Values that a terminal need not show. In a pipe the columns are always the same, for programs to rely on."""


def _hide_default_columns(rows: list[dict[str, object]]) -> list[Row]:
    """On a terminal, the rows without the columns in which all of them have the default value."""
    hidden = {
        name for name, default in _COLUMN_DEFAULTS.items() if all(row.get(name, default) == default for row in rows)
    }
    hidden = hidden if sys.stdout.isatty() else set()
    return [{name: value for name, value in row.items() if name not in hidden} for row in rows]


def _setting_rows(settings: dict[str, Any]) -> list[Row]:
    return [{"setting": name, "value": format_setting(value)} for name, value in settings.items()]


def _print_paused(group: str, settings: dict[str, Any], *, json: bool) -> None:
    row = {"group": group, **{name: settings[name] for name in ("paused", "paused_partitions")}}
    if json:
        print_json(row)
    else:
        print_table([{**row, "paused_partitions": format_setting(row["paused_partitions"])}])
