"""`shardyard pipeline fanout`: announcements to very many channels or users."""

# ruff: noqa: PLC0415 commands start quickly: what is slow to import is imported by those that need it

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from shardyard.cli.options import Json
from shardyard.cli.output import print_json, print_message, print_table
from shardyard.cli.pipeline.options import LogUrl, Master, Memory, partition_counts, require_spark, spark_session
from shardyard.model import InvalidCall, InvalidValue
from shardyard.wire.channels import EVENTS, MEMBERS, PRESENCE
from shardyard.wire.inbox import TOPIC


def fanout(
    log: LogUrl,
    registry: Annotated[
        str,
        typer.Option("--registry", metavar="URL", help="The registry of the messaging servers.", show_default=False),
    ],
    text: Annotated[str, typer.Option("--text", metavar="TEXT", help="What is sent.", show_default=False)],
    channels: Annotated[
        Path | None,
        typer.Option(
            "--channels",
            metavar="FILE",
            help="Post to these channels: one in each line, or Parquet with a column channel.",
        ),
    ] = None,
    users: Annotated[
        Path | None,
        typer.Option(
            "--users",
            metavar="FILE",
            help="Send to these users, to each a message: one in each line, or Parquet with a column user.",
        ),
    ] = None,
    everyone: Annotated[
        Literal["channels", "users"] | None,
        typer.Option("--all", help="To all channels, or to all users, that the routing snapshot has."),
    ] = None,
    routing: Annotated[
        Path | None,
        typer.Option("--routing", metavar="FOLDER", help="The routing snapshot; not needed with --users."),
    ] = None,
    sender: Annotated[str, typer.Option("--sender", metavar="USER", help="Who it is from.")] = "system",
    run: Annotated[
        str | None,
        typer.Option(
            "--run",
            metavar="ID",
            help="A run stores everything once, however often it is run. Default: by text, sender and recipients.",
        ),
    ] = None,
    staging: Annotated[
        str | None,
        typer.Option(
            "--staging", metavar="FOLDER", help="For a log on PostgreSQL: a folder that driver and workers can reach."
        ),
    ] = None,
    master: Master = None,
    memory: Memory = None,
    json: Json = False,
) -> None:
    """Send an announcement to very many channels or users, straight into their inbox partitions.

    Members of a channel who are online get it at once, the others find it in the history. If the command is
    interrupted, run it again: nothing is stored twice. To send the same once more, give another --run.

    Examples:

      shardyard pipeline fanout --log sqlite:///data/log --registry sqlite:///data/registry.db --users users.txt --text 'Hello'

      shardyard pipeline fanout --log sqlite:///data/log --registry sqlite:///data/registry.db --routing data/routing --all channels --text 'Maintenance at 22:00 UTC'
    """  # noqa: E501 an example is one line
    require_spark()
    from shardyard.pipeline.fanout.audience import all_names, digest, names_in_file
    from shardyard.pipeline.fanout.fanout import fanout as send
    from shardyard.pipeline.fanout.runs import Announcement, default_run

    if [channels, users, everyone].count(None) != 2:
        raise InvalidCall("expected one of --channels, --users and --all")
    path = channels or users
    audience: Literal["channels", "users"] = everyone or ("channels" if channels is not None else "users")
    if path is not None and not path.exists():
        raise InvalidValue(f"--{audience}", str(path), "a file that exists")
    if routing is None and (everyone is not None or channels is not None):
        raise InvalidCall("expected --routing: the folder of a snapshot that `shardyard pipeline routing` took")
    partition_counts(log, [TOPIC, *((EVENTS, MEMBERS, PRESENCE) if audience == "channels" else ())])
    recipients = f"all {audience}" if path is None else digest([path])
    name = run or default_run(text, sender, audience, recipients)
    announcement = Announcement(name, text, audience, sender)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    with spark_session("fanout", master, memory) as spark:
        names = all_names(spark, routing, audience) if path is None and routing else None
        if names is None:
            names = names_in_file(spark, path or Path(), audience)
        done = send(
            spark,
            log,
            registry,
            announcement,
            names,
            routing=routing,
            staging=staging,
            on_step=lambda step: console.print(f"[dim]{step}[/]"),
        )
    if json:
        print_json(asdict(done))
        return
    print_table([asdict(done)])
    if done.repeated:
        print_message(f"the run {done.run!r} was finished before: nothing was stored; --run starts another one")
