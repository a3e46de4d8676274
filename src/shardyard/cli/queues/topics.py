"""`shardyard topics`: make, look at, resize, set, delete."""

import sys
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from shardyard.cli.help import Command, Rows
from shardyard.cli.output import Count, Json, print_json, print_table, print_tables, say
from shardyard.cli.queues.options import (
    OWN,
    Brokers,
    Settings,
    Text,
    Topic,
    ask,
    changes,
    checked,
    print_listed,
    settings_help,
    shown_setting,
)
from shardyard.model import InvalidValue, TopicInUse, whole_number

app = typer.Typer(name="topics", help="Make topics, look at them, resize, set and delete them.", no_args_is_help=True)

Partitions = Annotated[int, Count("--partitions", "-p", help="How many partitions it is to have.")]
_PARTITIONERS = "modulus, jump or round_robin"
_COLUMNS = ("name", "partitions", "receiving", "kind", "partitioner", "hash")


@app.command("list")
def list_topics(
    every: Annotated[
        bool, typer.Option("--all", help="Also those that Shardyard keeps for itself, for retries and dead letters.")
    ] = False,
    brokers: Brokers = None,
    json: Json = False,
) -> None:
    """List the topics, but for those that Shardyard keeps for itself.

    Examples:

      shardyard topics list

      shardyard topics list --all --broker http://10.0.0.5:7400 --json
    """
    found = ask(brokers, "GET", "/v1/topics")
    shown = [topic for topic in found if every or not _is_own(topic["name"])]
    print_listed(shown if json else [_row(topic) for topic in shown], "topics", len(found) - len(shown), json=json)


@app.command("create")
def create(
    topic: Topic,
    partitions: Partitions = 12,
    partitioner: Annotated[
        str, typer.Option("--partitioner", metavar="NAME", help=f"How a key finds its partition: {_PARTITIONERS}.")
    ] = "modulus",
    hash_name: Annotated[
        str | None, Text("--hash", metavar="NAME", help="Of keys. Default: the partitioner's own.")
    ] = None,
    retention_ms: Annotated[int | None, Count("--retention-ms", help="Drop records that are older, in ms.")] = None,
    retention_bytes: Annotated[
        int | None, Count("--retention-bytes", help="Drop the oldest records of a partition that is larger.")
    ] = None,
    brokers: Brokers = None,
    json: Json = False,
) -> None:
    """Make a topic.

    Examples:

      shardyard topics create orders --partitions 12

      shardyard topics create events -p 256 --partitioner jump --retention-ms 604800000
    """
    for name, value in (("--retention-ms", retention_ms), ("--retention-bytes", retention_bytes)):
        if value is not None:
            whole_number(name, value, at_least=1)
    asked = {
        "name": topic,
        "partitions": partitions,
        "partitioner": partitioner,
        "hash": hash_name,
        "retention_ms": retention_ms,
        "retention_bytes": retention_bytes,
    }
    _print(ask(brokers, "POST", "/v1/topics", asked), json=json)


@app.command("show")
def show(topic: Topic, brokers: Brokers = None, json: Json = False) -> None:
    """Show a topic, what is set about it, and which offsets its partitions hold.

    Of a topic that is being contracted also the partitions that go, and which groups have how much to read of them yet.

    Examples:

      shardyard topics show orders
    """
    _print_whole(ask(brokers, "GET", _path(topic)), json=json)


@app.command("expand")
def expand(topic: Topic, partitions: Partitions, brokers: Brokers = None, json: Json = False) -> None:
    """Raise the number of partitions. Groups share the new ones out by themselves.

    Keys may live on other partitions from then on; `shardyard pipeline reshard` moves their earlier records too.

    Examples:

      shardyard topics expand orders --partitions 24
    """
    _print(ask(brokers, "POST", f"{_path(topic)}/expand", {"partitions": partitions}), json=json)


@app.command("contract")
def contract(topic: Topic, partitions: Partitions, brokers: Brokers = None, json: Json = False) -> None:
    """Lower the number of partitions: those beyond take no more records, and go when all groups are done with them.

    What is stored on them goes with them. While no group has read them, they stay.

    Examples:

      shardyard topics contract orders --partitions 6
    """
    told = ask(brokers, "POST", f"{_path(topic)}/contract", {"partitions": partitions})
    _print(told, json=json)
    for row in _closing(told):
        say(f"{row['partition']} goes {row['goes']}")


class _Set(Command):
    def sections(self) -> Mapping[str, Rows]:
        from shardyard.wire.requests import TopicChanges  # noqa: PLC0415 slow to import

        return {"Settings": settings_help(TopicChanges)}


@app.command("set", cls=_Set)
def set_topic(topic: Topic, settings: Settings, brokers: Brokers = None, json: Json = False) -> None:
    """Change settings; those that are not named stay. It takes effect at once.

    token is what publishers must show (- reads it from standard input), records_per_second holds through each broker,
    retention_bytes for each partition.

    Examples:

      shardyard topics set orders records_per_second=5000 retention_ms=604800000

      shardyard topics set orders token=- < token.txt

      shardyard topics set orders token=none
    """
    from shardyard.wire.requests import TopicChanges  # noqa: PLC0415 slow to import

    asked = changes(TopicChanges, settings)
    if asked.get("token") == "-":
        asked["token"] = sys.stdin.readline().strip()
    try:
        told = ask(brokers, "PATCH", _path(topic), asked)
    except InvalidValue as error:  # a broker says how it is written in JSON
        raise InvalidValue(error.name, error.value, error.expected.replace("null", "none")) from None
    _print_whole(told, json=json)


@app.command("delete")
def delete(
    topic: Topic,
    force: Annotated[
        bool, typer.Option("--force", help="Also while members subscribe to it, and with dead letters.")
    ] = False,
    brokers: Brokers = None,
) -> None:
    """Delete a topic with all of its records; refused while somebody subscribes to it, unless by force.

    The retry and dead-letter topics that groups have beside it go with it. Those with dead letters are kept, unless by
    force.

    Examples:

      shardyard topics delete orders

      shardyard topics delete orders --force
    """
    try:
        told = ask(brokers, "DELETE", _path(topic), force=str(force).lower())
    except TopicInUse as error:
        groups = ", ".join(error.groups)
        error.args = (f"topic {topic!r} is subscribed to by {groups}: stop their members, or delete it by --force",)
        raise
    say_deleted(f"topic {topic!r}", told)


def say_deleted(what: str, told: dict[str, Any]) -> None:
    """What is deleted, what went with it, and what was kept."""
    say(f"{what} is deleted")
    for name in told["also_deleted"]:
        say(f"topic {name!r} went with it")
    for kept in told["kept"]:
        name = kept["topic"]
        records = f" (records: {kept['records']})" if kept["records"] else ""
        say(f"topic {name!r} is kept: {kept['because']}{records}; `shardyard topics delete {name}` deletes it")


def _path(topic: str) -> str:
    return f"/v1/topics/{checked(topic)}"


def _is_own(name: str) -> bool:
    from shardyard.queues.retry_topics import parse_companion  # noqa: PLC0415 slow to import

    return name.startswith(OWN) or parse_companion(name) is not None


def _row(topic: dict[str, Any]) -> dict[str, Any]:
    return {column: topic[column] for column in _COLUMNS}


def _print(topic: dict[str, Any], *, json: bool) -> None:
    if json:
        print_json(topic)
    else:
        print_table([_row(topic)])


def _print_whole(topic: dict[str, Any], *, json: bool) -> None:
    if json:
        print_json(topic)
        return
    settings = {name: value for name, value in topic.items() if name not in ("spans", "closing")}
    print_tables(
        {
            "topic": [{"setting": name, "value": shown_setting(value)} for name, value in settings.items()],
            "offsets": [{"partition": index, **span} for index, span in enumerate(topic["spans"])],
            "closing": _closing(topic),
        }
    )


def _closing(topic: dict[str, Any]) -> list[dict[str, str]]:
    """The partitions that go, and when they do."""
    return [
        {"partition": f"{topic['name']}/{closing['partition']}", "goes": _when(closing)} for closing in topic["closing"]
    ]


def _when(closing: dict[str, Any]) -> str:
    if closing["drained"]:
        return "in a moment"
    left = [
        f"{group} has read {count} more record{'' if count == 1 else 's'}"
        for group, count in closing["waiting_for"].items()
    ]
    return f"when {' and '.join(left) or 'a group has read it'}"
