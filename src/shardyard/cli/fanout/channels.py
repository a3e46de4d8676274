"""`shardyard channels`: memberships of channels and events, directly on the log."""

# ruff: noqa: PLC0415 commands start quickly: what is slow to import is imported by those that need it

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from shardyard.cli.fanout.options import DEFAULT_LOG, LogUrl, existing_log
from shardyard.cli.options import Json, integer_option
from shardyard.cli.output import print_json, print_list, print_table
from shardyard.model.extras import require

if TYPE_CHECKING:
    from shardyard.fanout.channels import Channels
    from shardyard.fanout.loading import Loaded

T = TypeVar("T")

app = typer.Typer(name="channels", help="Change and show the members of channels, and publish.", no_args_is_help=True)

Channel = Annotated[str, typer.Argument(metavar="CHANNEL", help="The channel's name.", show_default=False)]
Users = Annotated[list[str], typer.Argument(metavar="USER...", help="Names of users.", show_default=False)]


def _run(log_url: str, work: "Callable[[Channels], Awaitable[T]]") -> T:
    """Do something with the channels of a log."""
    existing_log(log_url)
    require("server", "channels")

    async def whole() -> T:
        from shardyard.fanout.channels import Channels
        from shardyard.log import open_log

        async with open_log(log_url) as log:
            return await work(Channels(log))

    return asyncio.run(whole())


@app.command("join")
def join(channel: Channel, users: Users, log: LogUrl = DEFAULT_LOG, json: Json = False) -> None:
    """Make users members of a channel. A channel exists as soon as it has a member.

    Prints how many changes were stored: one for each user that is named, also for those who are members already, for
    whom it has no effect.

    Examples:

      shardyard channels join general alice bob

      shardyard channels join general alice --log postgresql://yard@db/yard
    """
    changes = _run(log, lambda channels: channels.join_many([channel] * len(users), users))
    _print_changes({"channel": channel, "changes": changes}, json=json)


@app.command("leave")
def leave(channel: Channel, users: Users, log: LogUrl = DEFAULT_LOG, json: Json = False) -> None:
    """End the membership of users in a channel.

    Prints how many changes were stored: one for each user that is named, also for those who are not members, for whom
    it has no effect.

    Examples:

      shardyard channels leave general bob
    """
    changes = _run(log, lambda channels: channels.leave_many([channel] * len(users), users))
    _print_changes({"channel": channel, "changes": changes}, json=json)


def _print_changes(row: dict[str, object], *, json: bool) -> None:
    if json:
        print_json(row)
    else:
        print_table([row])


@app.command("members")
def members(channel: Channel, log: LogUrl = DEFAULT_LOG, json: Json = False) -> None:
    """List the members of a channel, online or not.

    Examples:

      shardyard channels members general --json
    """
    found = _run(log, lambda channels: channels.members(channel))
    if json:
        print_json({"channel": channel, "members": found})
    else:
        print_list([{"user": user} for user in found], f"members of {channel}", json=False)


@app.command("publish")
def publish(
    channel: Channel,
    text: Annotated[str, typer.Argument(metavar="TEXT", help="What to publish.", show_default=False)],
    sender: Annotated[
        str, typer.Option("--sender", metavar="USER", help="The user who publishes it.", show_default=False)
    ],
    event_id: Annotated[
        int | None,
        integer_option(
            "--id",
            help="The id of the event: the same again is stored once. The history is ordered by it. "
            "Default: a new one, which ascends with time.",
        ),
    ] = None,
    log: LogUrl = DEFAULT_LOG,
    json: Json = False,
) -> None:
    """Publish a text to a channel, and return when it is durable. Its online members get it at once.

    Examples:

      shardyard channels publish general 'the build is green' --sender ci

      shardyard channels publish general 'release 7 is out' --sender ci --id 248452756620354812
    """
    published = _run(log, lambda channels: channels.publish(channel, text, sender=sender, id=event_id))
    row = {"channel": channel, "id": str(published.id), "at": published.at, "duplicate": published.duplicate}
    if json:
        print_json(row)
    else:
        print_table([row])


@app.command("load")
def load(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A Parquet file, or a CSV file with a header.", show_default=False)
    ],
    log: LogUrl = DEFAULT_LOG,
    skip_malformed: Annotated[
        bool, typer.Option("--skip-malformed", help="Leave malformed rows out, and count them.")
    ] = False,
    json: Json = False,
) -> None:
    """Load memberships from a file with the columns channel, user and, if need be, action (join or leave).

    The whole file is checked first: if a row is malformed, nothing is stored. Loading a file again changes nothing, so
    a load that was interrupted is simply repeated.

    Examples:

      shardyard channels load members.parquet

      shardyard channels load members.csv --skip-malformed --log postgresql://yard@db/yard
    """
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("checking the rows", total=None)

        def show(done: int, rows: int) -> None:
            bar.update(task, description="storing memberships", completed=done, total=rows)

        async def work(channels: "Channels") -> "Loaded":
            from shardyard.fanout.loading import load as load_file

            return await load_file(channels, file, skip_malformed=skip_malformed, progress=show)

        loaded = _run(log, work)
    if json:
        print_json(asdict(loaded))
    else:
        print_table([asdict(loaded)])
